"""A tiny Swin-UNet by the names of Swin-Unet's code, with other levels and patches."""

from typing import Any

import numpy as np

from jaxptd.hf.families.swin_unet import PREFIX, rules

LEVELS, SIZE, HEADS, WINDOW, SIDE = 3, 12, 3, 4, 2  # windows of rows 16, 8 and 4
IMAGE, CHANNELS, CLASSES, ROWS = 32, 2, 4, 4
DEPTHS = (4, 2, 2)
MODEL = {
    "family": "swin-unet",
    "hidden_size": SIZE,
    "num_heads": HEADS,
    "images.size": IMAGE,
    "images.channels": CHANNELS,
    "images.classes": CLASSES,
    "images.patch": SIDE,
    "images.window": WINDOW,
    "images.depths": DEPTHS,
}
Shape = tuple[int, ...]


def tensors(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Our parameters, or gradients, with Swin-Unet's names and shapes."""
    made = (
        rule.tensors(np.asarray(params[rule.ours]))
        for rule in rules(LEVELS, SIDE)
        if rule.ours in params
    )
    return {name.removeprefix(PREFIX): x for each in made for name, x in each.items()}


def drawn(shapes: dict[str, Shape]) -> dict[str, np.ndarray]:
    """Random parameters in float64 for these shapes, with norms and biases that matter."""
    rng = np.random.default_rng(7)
    return {
        name: 0.2 * rng.standard_normal(shape) + name.endswith("norm.w")
        for name, shape in sorted(shapes.items())
    }


def batch() -> dict[str, np.ndarray]:
    """Images and labels; some pixels of one image are ignored."""
    rng = np.random.default_rng(8)
    label = rng.integers(0, CLASSES, (ROWS, IMAGE, IMAGE))
    label[1, :9] = -1
    image = rng.standard_normal((ROWS, IMAGE, IMAGE, CHANNELS))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}
