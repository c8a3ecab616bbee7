"""Hausdorff distances of classes of pixels, against distances of all pairs of pixels."""

import jax
import numpy as np
import pytest

from jaxptd.vision.distance import hausdorff_scores, squared_distances

RNG = np.random.default_rng(0)
ROWS, COLS, CLASSES = 9, 12, 4
DIAGONAL = 15.0  # of an image of 9 x 12 pixels
score = jax.jit(hausdorff_scores, static_argnums=2)


def border(mask: np.ndarray) -> np.ndarray:
    """Places of the pixels with a neighbour outside, `[n, 2]`."""
    wide = np.pad(mask, 1)
    sides = [np.roll(wide, by, axis) for axis in (0, 1) for by in (1, -1)]
    return np.argwhere(wide & ~np.all(sides, 0))


def hd95(found: np.ndarray, true: np.ndarray) -> float:
    if not found.any() or not true.any():
        return DIAGONAL if found.any() or true.any() else 0.0
    a, b = border(found), border(true)
    apart = np.linalg.norm(a[:, None] - b[None], axis=-1)
    return float(np.percentile([*apart.min(1), *apart.min(0)], 95))


def pictures(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Found classes and labels, int32[B, ROWS, COLS] each."""
    label = RNG.integers(-1, CLASSES, (5, ROWS, COLS))
    if kind == "noise":
        return RNG.integers(0, CLASSES, label.shape), label
    label[:] = 0
    for image in label:
        top, left = RNG.integers(0, 4, 2)
        image[top : top + 4, left : left + 6] = RNG.integers(1, CLASSES)
    return np.roll(label, (1, 2), (1, 2)), label


@pytest.mark.parametrize("kind", ["noise", "blocks"])
def test_scores_are_those_of_all_pairs_of_border_pixels(kind: str) -> None:
    found, label = pictures(kind)
    wanted = np.zeros(CLASSES - 1)
    for image, right in zip(found, label, strict=True):
        counted = right >= 0
        for number in range(1, CLASSES):
            each = hd95((image == number) & counted, right == number)
            wanted[number - 1] += each * counted.sum()
    mean, *each = score(found, label, CLASSES)
    np.testing.assert_allclose(each, wanted, rtol=1e-6)
    np.testing.assert_allclose(mean, wanted.mean(), rtol=1e-6)


def test_classes_that_are_nowhere_are_right_and_those_not_found_are_far_away() -> None:
    label = np.zeros((1, ROWS, COLS), np.int32)
    label[0, 2, 3] = 1
    mean, *each = score(np.zeros_like(label), label, CLASSES)
    assert np.array(each) / label.size == pytest.approx([DIAGONAL, 0, 0])
    assert float(mean) / label.size == pytest.approx(DIAGONAL / 3)
    assert np.array(score(label, np.zeros_like(label), CLASSES)[1]) > 0
    assert not np.any(score(label, label, CLASSES))


def test_an_image_that_does_not_count_adds_nothing() -> None:
    found, label = pictures("noise")
    label[1:] = -1
    assert score(found, label, CLASSES) == score(found[:1], label[:1], CLASSES)


def test_distances_are_those_to_the_nearest_pixel() -> None:
    mask = RNG.random((3, ROWS, COLS)) < 0.05
    mask[2] = False
    found = np.asarray(jax.jit(squared_distances)(mask))
    for image, squares in zip(mask[:2], found, strict=False):
        places = np.argwhere(image)
        every = np.stack(np.indices(image.shape), -1)[:, :, None] - places
        np.testing.assert_array_equal(squares, (every**2).sum(-1).min(-1))
    assert (found[2] >= 2**28).all()
