"""Figures of a few kinds, each a function of its seed and number: images with one class each.

A disc, a square, a triangle or a ring of any size and place, a little turned, with noise.
Letters: S rows and columns.
"""

import numpy as np

from jaxptd.data.images.phantoms import drawing, normalised, turned

FIGURES = ("disc", "square", "triangle", "ring")
NOISE = 0.15  # standard deviation; a figure and its background differ by 0.6 or more
TURN = 0.3  # of a figure to either side, at most


def figure(seed: int, stream: int, number: int, *, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The image, float32[S, S] with mean 0 and variance 1, and the number of its kind, int32[].

    Args:
        seed: of the run, 0 or more.
        stream: of numbers; two streams have no figure in common.
        number: of the sample.
        size: S.
    """
    rng = drawing(seed, stream, number)
    kind = int(rng.integers(len(FIGURES)))
    axis = (np.arange(size) + 0.5) / size - 0.5
    down, right = rng.uniform(-0.15, 0.15, 2)
    x, y = turned(axis - down, axis - right, rng.uniform(-TURN, TURN))
    radius = rng.uniform(0.22, 0.34)
    x, y = x / radius, y / radius
    around = x**2 + y**2
    insides = (
        around < 0.8,
        np.maximum(abs(x), abs(y)) < 0.75,
        np.maximum(-y, y / 2 + abs(x) * 0.75**0.5) < 0.5,
        (around < 1) & (around > 0.35),
    )
    bright = rng.choice([-1, 1]) * rng.uniform(0.6, 1.0)
    image = bright * insides[kind] + NOISE * rng.standard_normal((size, size))
    return normalised(image), np.array(kind, np.int32)
