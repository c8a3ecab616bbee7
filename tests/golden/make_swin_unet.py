"""Writes the results of a float64 Swin-UNet in torch for the model of tests/helpers/hugging.

    PYTHONPATH=tests/helpers python tests/golden/make_swin_unet.py

It follows Swin-Unet's code and names. It shares only the shapes of parameters and the rules for
their names with the package, and tests these. Its Dice loss is averaged over images. Needs torch;
made with 2.14.1.

Source: `swin_transformer_unet_skip_expand_decoder_sys.py` and `utils.py` of Swin-Unet's code.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from hugging import swin_unet as tiny
from hugging.reference import summary
from torch.nn.functional import cross_entropy, gelu, layer_norm, linear, one_hot, softmax

from jaxptd import Config, Layout, ModelConfig, Program, make_mesh
from jaxptd.config import nested

PATH = Path(__file__).with_name("swin-unet.json")
Weights = dict[str, Any]


def norm(x: Any, w: Weights, name: str) -> Any:
    return layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def windows(x: Any, size: int) -> Any:
    """[B, H, W, C] -> [B windows, size size, C]."""
    B, H, W, C = x.shape
    x = x.view(B, H // size, size, W // size, size, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, C)


def whole(x: Any, size: int, H: int, W: int) -> Any:
    """Undoes `windows`."""
    x = x.view(-1, H // size, W // size, size, size, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, x.shape[-1])


def offsets(size: int) -> Any:
    one = torch.arange(size)
    at = torch.stack(torch.meshgrid(one, one, indexing="ij")).flatten(1)
    apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + size - 1
    return apart[..., 0] * (2 * size - 1) + apart[..., 1]


def mask(H: int, W: int, size: int, shift: int) -> Any:
    """Mask of 0 or -inf `[windows, size size, size size]`, from nine regions of the image."""
    region, count = torch.zeros(1, H, W, 1), 0
    slices = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
    for down in slices:
        for right in slices:
            region[:, down, right] = count
            count += 1
    parts = windows(region, size)[..., 0]
    apart = parts[:, None, :] != parts[:, :, None]
    return torch.zeros(apart.shape, dtype=torch.float64).masked_fill(apart, -torch.inf)


def attention(x: Any, w: Weights, name: str, heads: int, hidden: Any) -> Any:
    """x[windows, T, C]."""
    n, T, C = x.shape
    qkv = linear(x, w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"])
    q, k, v = qkv.reshape(n, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
    table = w[f"{name}.relative_position_bias_table"]
    bias = table[offsets(round(T**0.5)).flatten()].view(T, T, heads).permute(2, 0, 1)
    scores = (q * (C // heads) ** -0.5) @ k.transpose(-2, -1) + bias
    if hidden is not None:
        few = len(hidden)
        scores = scores.view(n // few, few, heads, T, T) + hidden[:, None]
        scores = scores.view(n, heads, T, T)
    out = (softmax(scores, -1) @ v).transpose(1, 2).reshape(n, T, C)
    return linear(out, w[f"{name}.proj.weight"], w[f"{name}.proj.bias"])


def block(x: Any, w: Weights, name: str, *, heads: int, shifted: bool) -> Any:
    """x[B, H, W, C]."""
    _, H, W, _ = x.shape
    size = min(tiny.WINDOW, H)
    shift = tiny.WINDOW // 2 if shifted and size < H else 0
    y = torch.roll(norm(x, w, f"{name}.norm1"), (-shift, -shift), (1, 2))
    hidden = mask(H, W, size, shift) if shift else None
    y = whole(attention(windows(y, size), w, f"{name}.attn", heads, hidden), size, H, W)
    x = x + torch.roll(y, (shift, shift), (1, 2))
    h = linear(norm(x, w, f"{name}.norm2"), w[f"{name}.mlp.fc1.weight"], w[f"{name}.mlp.fc1.bias"])
    return x + linear(gelu(h), w[f"{name}.mlp.fc2.weight"], w[f"{name}.mlp.fc2.bias"])


def layer(x: Any, w: Weights, name: str, level: int) -> Any:
    for number in range(tiny.DEPTHS[level]):
        of = f"{name}.blocks.{number}"
        x = block(x, w, of, heads=tiny.HEADS * 2**level, shifted=number % 2 == 1)
    return x


def merge(x: Any, w: Weights, name: str) -> Any:
    parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
    return linear(norm(torch.cat(parts, -1), w, f"{name}.norm"), w[f"{name}.reduction.weight"])


def expand(x: Any, w: Weights, name: str, side: int) -> Any:
    x = linear(x, w[f"{name}.expand.weight"])
    B, H, W, C = x.shape
    x = x.view(B, H, W, side, side, C // side**2).permute(0, 1, 3, 2, 4, 5)
    return norm(x.reshape(B, H * side, W * side, C // side**2), w, f"{name}.norm")


def logits(image: Any, w: Weights) -> Any:
    """Images [B, rows, columns, channels] -> [B, rows, columns, classes]."""
    x = torch.nn.functional.conv2d(
        image.permute(0, 3, 1, 2),
        w["patch_embed.proj.weight"],
        w["patch_embed.proj.bias"],
        stride=tiny.SIDE,
    )
    x, skips = norm(x.permute(0, 2, 3, 1), w, "patch_embed.norm"), []
    for level in range(tiny.LEVELS):
        skips.append(x)
        x = layer(x, w, f"layers.{level}", level)
        if level < tiny.LEVELS - 1:
            x = merge(x, w, f"layers.{level}.downsample")
    x = expand(norm(x, w, "norm"), w, "layers_up.0", 2)
    for place in range(1, tiny.LEVELS):
        level, back = tiny.LEVELS - 1 - place, f"concat_back_dim.{place}"
        x = torch.cat([x, skips[level]], -1)
        x = linear(x, w[f"{back}.weight"], w[f"{back}.bias"])
        x = layer(x, w, f"layers_up.{place}", level)
        if place < tiny.LEVELS - 1:
            x = expand(x, w, f"layers_up.{place}.upsample", 2)
    x = expand(norm(x, w, "norm_up"), w, "up", tiny.SIDE).permute(0, 3, 1, 2)
    return torch.nn.functional.conv2d(x, w["output.weight"]).permute(0, 2, 3, 1)


def terms(found: Any, label: Any) -> dict[str, Any]:
    """Weighted losses: 0.4 of the cross-entropy, 0.6 of the Dice loss (its mean over images)."""
    counted = label >= 0
    flat = found.flatten(0, 2)
    pixels = cross_entropy(flat, label.flatten(), ignore_index=-1)
    dice = 0
    for each, right, ok in zip(softmax(found, -1), label, counted, strict=True):
        p, t = each[ok], one_hot(right[ok], tiny.CLASSES)
        for number in range(tiny.CLASSES):
            score, target = p[:, number], t[:, number].double()
            both = 2 * (score * target).sum() + 1e-5
            loss = 1 - both / ((score * score).sum() + (target * target).sum() + 1e-5)
            dice = dice + loss / tiny.CLASSES * ok.sum() / counted.sum()
    return {"cross_entropy": 0.4 * pixels, "dice_loss": 0.6 * dice}


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    config = Config(ModelConfig(**nested(tiny.MODEL)))
    infos = Program(config, make_mesh(Layout())).infos
    params = tiny.drawn({name: info.shape for name, info in infos.items()})
    weights = {n: torch.tensor(x, requires_grad=True) for n, x in tiny.tensors(params).items()}
    batch = tiny.batch()
    image, label = torch.tensor(batch["image"]).double(), torch.tensor(batch["label"]).long()
    losses = terms(logits(image, weights), label)
    sum(losses.values()).backward()
    found = {
        "losses": {name: loss.item() for name, loss in losses.items()},
        "gradients": {name: summary(np.asarray(x.grad)) for name, x in weights.items()},
    }
    PATH.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
