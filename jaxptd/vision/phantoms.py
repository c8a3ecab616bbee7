"""Images made by formulas: phantoms of a heart, and figures of a few kinds.

A phantom is what a slice of an MRI shows, a function of its seed and number.

A bright chamber in a dark ring, the left ventricle and its muscle, and beside them the right
ventricle, on a background with soft stripes and noise. Classes are numbered as in the data set
ACDC: 0 background, 1 right ventricle, 2 muscle, 3 left ventricle.

Letters: S rows and columns.
"""

import numpy as np

CLASSES = 4
NOISE = 0.15  # standard deviation; a figure and what is around it differ by about 0.6
TRAINING, HELD_OUT, ORDER, TURN = range(4)  # streams of numbers: samples, and draws of all data


def phantom(seed: int, stream: int, number: int, *, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The image, float32[S, S] with mean 0 and variance 1, and the labels, int32[S, S].

    Args:
        seed: of the run, 0 or more.
        stream: of numbers; two streams have no phantom in common.
        number: of the sample.
        size: S.
    """
    rng = drawing(seed, stream, number)
    axis = (np.arange(size) + 0.5) / size - 0.5
    turn, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0.15, 0.21)
    x, y = turned(axis - rng.uniform(-0.08, 0.08), axis - rng.uniform(-0.08, 0.08), turn)
    shape = rng.uniform(0.85, 1.0)
    thickness = rng.uniform(0.3, 0.45)
    heart = (x / radius) ** 2 + (y / (radius * shape)) ** 2
    chamber = heart < (1 - thickness) ** 2
    beside, wide = rng.uniform(0.8, 1.0) * radius, rng.uniform(0.75, 0.95) * radius
    right = ((x - beside) / wide) ** 2 + (y / (1.25 * wide)) ** 2 < 1
    label = np.zeros((size, size), np.int32)
    label[right] = 1
    label[heart < 1] = 2
    label[chamber] = 3
    levels = np.array([0.35, 0.95, 0.25, 1.0]) + rng.uniform(-0.08, 0.08, CLASSES)
    waves = rng.uniform(-6, 6, (3, 2)), rng.uniform(0, 2 * np.pi, 3)
    stripes = sum(
        np.cos(2 * np.pi * (a * axis[:, None] + b * axis) + phase)
        for (a, b), phase in zip(*waves, strict=True)
    )
    image = levels[label] + 0.06 * stripes + NOISE * rng.standard_normal((size, size))
    return normalised(image), label


def drawing(seed: int, stream: int, number: int) -> np.random.Generator:
    """Draws of a sample of a stream, or of an epoch."""
    # The highest word of the counter, which no number of draws reaches, is the sample's.
    counter = np.array([0, 0, stream, number], np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=counter))


def normalised(image: np.ndarray) -> np.ndarray:
    """The image with mean 0 and variance 1, float32; one without contrast is 0."""
    spread = float(image.std())
    return ((image - image.mean()) / (spread or 1.0)).astype(np.float32)


def turned(down: np.ndarray, right: np.ndarray, turn: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of all pixels, turned by an angle, `[S, S]` each."""
    y, x = np.meshgrid(down, right, indexing="ij")
    return x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)


# ---- figures with one class each -----------------------------------------------------------------

# A disc, a square, a triangle or a ring of any size and place, a little turned, with noise.

FIGURES = ("disc", "square", "triangle", "ring")
TILT = 0.3  # of a figure to either side, at most


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
    x, y = turned(axis - down, axis - right, rng.uniform(-TILT, TILT))
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
