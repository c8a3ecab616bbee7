"""A tiny Swin: its tensors by their names in files, and transformers' model in float64."""

import functools
from typing import Any

import numpy as np

from jaxptd.hf.families import FAMILIES

CLASSES, LENGTH = 3, 32
CONFIG = {
    "model_type": "swin",
    "architectures": ["SwinForImageClassification"],
    "image_size": LENGTH,
    "patch_size": 2,
    "num_channels": 2,
    "embed_dim": 12,
    "depths": [4, 2],
    "num_heads": [3, 6],
    "window_size": 4,  # of 16 and 8 rows: both levels shift their windows
    "mlp_ratio": 3.0,
    "id2label": {str(number): f"LABEL_{number}" for number in range(CLASSES)},
}


def linear(name: str, out: int, into: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (out, into), f"{name}.bias": (out,)}


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def shapes(prefix: str = "swin.") -> dict[str, tuple[int, ...]]:
    size, patches = CONFIG["embed_dim"], f"{prefix}embeddings.patch_embeddings.projection"
    places = (2 * CONFIG["window_size"] - 1) ** 2
    side = CONFIG["patch_size"]
    found: dict[str, tuple[int, ...]] = {
        f"{patches}.weight": (size, CONFIG["num_channels"], side, side),
        f"{patches}.bias": (size,),
        **norm(f"{prefix}embeddings.norm", size),
    }
    for level, (depth, heads) in enumerate(zip(CONFIG["depths"], CONFIG["num_heads"], strict=True)):
        D, layer = size * 2**level, f"{prefix}encoder.layers.{level}"
        for number in range(depth):
            name = f"{layer}.blocks.{number}"
            itself = f"{name}.attention.self"
            for each in ("query", "key", "value"):
                found |= linear(f"{itself}.{each}", D, D)
            found[f"{itself}.relative_position_bias_table"] = (places, heads)
            found |= linear(f"{name}.attention.output.dense", D, D)
            found |= linear(f"{name}.intermediate.dense", 3 * D, D)
            found |= linear(f"{name}.output.dense", D, 3 * D)
            found |= norm(f"{name}.layernorm_before", D) | norm(f"{name}.layernorm_after", D)
        if level + 1 < len(CONFIG["depths"]):
            found[f"{layer}.downsample.reduction.weight"] = (2 * D, 4 * D)
            found |= norm(f"{layer}.downsample.norm", 4 * D)
    return found | norm(f"{prefix}layernorm", D) | linear("classifier", CLASSES, D)


def swin_tensors(*, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The state dict of a SwinForImageClassification, as in files."""
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, shape).astype(dtype) for name, shape in shapes().items()}


def images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Eight images; the class of one is ignored."""
    label = rng.integers(0, CLASSES, 8)
    label[2] = -1
    image = rng.standard_normal((8, LENGTH, LENGTH, CONFIG["num_channels"]))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def swin_config(transformers: Any) -> Any:
    others = ("model_type", "architectures", "id2label")
    sizes = {name: value for name, value in CONFIG.items() if name not in others}
    return transformers.SwinConfig(**sizes, num_labels=CLASSES)


def swin_logits(model: Any, batch: dict[str, np.ndarray]) -> Any:
    """Logits of transformers' model, with its eager softmax, fixed to float32, replaced."""
    import torch
    from transformers.models.swin import modeling_swin

    modeling_swin.eager_attention_forward = functools.partial(_attend, torch)
    pixels = torch.tensor(np.moveaxis(batch["image"], -1, 1)).double()
    return model(pixel_values=pixels).logits


def _attend(torch: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any):
    scores = query @ key.transpose(2, 3) * options["scaling"] + mask
    weights = torch.softmax(scores, -1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def name_in_files(name: str) -> str:
    """The name in files of a parameter of transformers 5."""
    return next(FAMILIES["swin"].tensors.others(name), name)
