"""A tiny Swin-UNet by the names of Swin-Unet's own code: its tensors, and the rules for ours.

Source: `swin_transformer_unet_skip_expand_decoder_sys.py` of Swin-Unet's code.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxptd.hf.dims import Rule

LEVELS, SIZE, HEADS, WINDOW, SIDE = 3, 12, 3, 4, 2  # windows of rows 16, 8 and 4
IMAGE, CHANNELS, CLASSES, ROWS = 32, 2, 4, 4
DEPTHS = (4, 2, 2)
MODEL = {
    "family": "swin-unet",
    "hidden_size": SIZE,
    "num_heads": HEADS,
    "image_size": IMAGE,
    "image_channels": CHANNELS,
    "image_classes": CLASSES,
    "image_patch": SIDE,
    "image_window": WINDOW,
    "image_depths": DEPTHS,
}
PATCH = f"{SIDE}y {SIDE}x"
Shape = tuple[int, ...]


def _blocks(ours: str, theirs: str) -> Iterator[Rule]:
    for first, block in enumerate(("first", "second")):
        names = {
            "attention_norm.w": ("L D", "norm1.weight", "D"),
            "attention_norm.b": ("L D", "norm1.bias", "D"),
            "attention.qkv.w": ("L D C N H", "attn.qkv.weight", "(C N H) D"),
            "attention.qkv.b": ("L C N H", "attn.qkv.bias", "(C N H)"),
            "attention.window_bias.table": ("L R N", "attn.relative_position_bias_table", "R N"),
            "attention.out.w": ("L N H D", "attn.proj.weight", "D (N H)"),
            "attention.out.b": ("L D", "attn.proj.bias", "D"),
            "mlp_norm.w": ("L D", "norm2.weight", "D"),
            "mlp_norm.b": ("L D", "norm2.bias", "D"),
            "mlp.up.w": ("L D F", "mlp.fc1.weight", "F D"),
            "mlp.up.b": ("L F", "mlp.fc1.bias", "F"),
            "mlp.down.w": ("L F D", "mlp.fc2.weight", "D F"),
            "mlp.down.b": ("L D", "mlp.fc2.bias", "D"),
        }
        for name, (dims, tensor, tensor_dims) in names.items():
            yield Rule(
                *(f"{ours}.{block}.{name}", dims, f"{theirs}.blocks.{{}}.{tensor}", tensor_dims),
                first=first,
                step=2,
            )


def _norm(ours: str, theirs: str, dims: tuple[str, str] = ("D", "D")) -> Iterator[Rule]:
    for end, name in (("w", "weight"), ("b", "bias")):
        yield Rule(f"{ours}.{end}", dims[0], f"{theirs}.{name}", dims[1])


def rules() -> list[Rule]:
    """The rules of every parameter; 2y and 2x are rows and columns of patches."""
    found = [
        Rule("patches.w", "S Y X D", "patch_embed.proj.weight", "D S Y X"),
        Rule("patches.b", "D", "patch_embed.proj.bias", "D"),
        *_norm("patches.norm", "patch_embed.norm"),
        *_norm("norm", "norm"),
        *_norm("last_norm", "norm_up"),
        Rule("pixels.linear.w", f"D E ({PATCH})", "up.expand.weight", f"({PATCH} E) D"),
        *_norm("pixels.norm", "up.norm"),
        Rule("head.w", "D K", "output.weight", "K D"),
    ]
    for level in range(LEVELS):
        found += _blocks(f"down{level}", f"layers.{level}")
    for level in range(1, LEVELS):
        down, merge = f"layers.{level - 1}.downsample", f"merge{level}"
        found += [
            Rule(f"{merge}.linear.w", "D (2y 2x) E", f"{down}.reduction.weight", "E (2x 2y D)"),
            *_norm(f"{merge}.norm", f"{down}.norm", ("(D 2y 2x)", "(2x 2y D)")),
        ]
    for level in range(LEVELS - 1):
        place = LEVELS - 1 - level  # among its layers on the way up, of which the first expands
        up = "layers_up.0" if place == 1 else f"layers_up.{place - 1}.upsample"
        back = f"concat_back_dim.{place}"
        found += [
            Rule(f"expand{level}.linear.w", "D E (2y 2x)", f"{up}.expand.weight", "(2y 2x E) D"),
            *_norm(f"expand{level}.norm", f"{up}.norm"),
            Rule(f"skip{level}.linear.w", "D 2 E", f"{back}.weight", "E (2 D)"),
            Rule(f"skip{level}.linear.b", "E", f"{back}.bias", "E"),
            *_blocks(f"up{level}", f"layers_up.{place}"),
        ]
    return found


def tensors(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters, or gradients, of ours by Swin-Unet's names and in its shapes."""
    of = {name: [rule for rule in rules() if rule.ours == name] for name in params}
    found: dict[str, np.ndarray] = {}
    for name, x in params.items():
        for rule in of[name]:
            found |= rule.tensors(np.asarray(x))
    return found


def drawn(shapes: dict[str, Shape]) -> dict[str, np.ndarray]:
    """Parameters of ours by their shapes, float64, whose norms and biases matter."""
    rng = np.random.default_rng(7)
    return {
        name: 0.2 * rng.standard_normal(shape) + name.endswith("norm.w")
        for name, shape in sorted(shapes.items())
    }


def batch() -> dict[str, np.ndarray]:
    """Images and labels; some pixels of one image do not count."""
    rng = np.random.default_rng(8)
    label = rng.integers(0, CLASSES, (ROWS, IMAGE, IMAGE))
    label[1, :9] = -1
    image = rng.standard_normal((ROWS, IMAGE, IMAGE, CHANNELS))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}
