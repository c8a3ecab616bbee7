"""Losses and scores of pixels against plain sums, and distances against all pairs."""

import jax
import numpy as np
import pytest

from jaxptd.vision import losses

cross_entropy, dice_loss, batch_dice_loss = map(
    jax.jit, (losses.cross_entropy, losses.dice_loss, losses.batch_dice_loss)
)
dice_scores = jax.jit(losses.dice_scores, static_argnums=2)
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(3, 4, 5, 3)).astype(np.float32)
LABEL = RNG.integers(-1, 3, (3, 4, 5)).astype(np.int32)
LABEL[2] = np.where(LABEL[2] == 2, 0, LABEL[2])


def probabilities() -> np.ndarray:
    e = np.exp(LOGITS - LOGITS.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_cross_entropy_leaves_out_what_does_not_count() -> None:
    p, wanted = probabilities(), 0.0
    for place in np.ndindex(LABEL.shape):
        wanted -= np.log(p[place][LABEL[place]]) if LABEL[place] >= 0 else 0
    np.testing.assert_allclose(cross_entropy(LOGITS, LABEL), wanted, rtol=1e-5)


def test_the_dice_loss_is_of_an_image_times_its_pixels() -> None:
    wanted = 0.0
    for p, label in zip(probabilities(), LABEL, strict=True):
        p, t = p[label >= 0], np.eye(3)[label[label >= 0]]
        score = (2 * (p * t).sum(0) + 1e-5) / ((p * p).sum(0) + t.sum(0) + 1e-5)
        wanted += (1 - score).mean() * (label >= 0).sum()
    np.testing.assert_allclose(dice_loss(LOGITS, LABEL), wanted, rtol=1e-5)


def test_the_dice_loss_of_a_batch_is_of_all_its_pixels() -> None:
    """The loss equals that of one image with all pixels."""
    counted = LABEL >= 0
    p, t = probabilities()[counted], np.eye(3)[LABEL[counted]]
    score = (2 * (p * t).sum(0) + 1e-5) / ((p * p).sum(0) + t.sum(0) + 1e-5)
    wanted = (1 - score).mean() * counted.sum()
    found = batch_dice_loss(LOGITS, LABEL)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    one = dice_loss(LOGITS.reshape(1, 12, 5, 3), LABEL.reshape(1, 12, 5))
    np.testing.assert_allclose(found, one, rtol=1e-6)


def test_scores_are_of_the_most_likely_classes() -> None:
    wanted = np.zeros(2)
    for p, label in zip(probabilities(), LABEL, strict=True):
        counted = label >= 0
        for number in (1, 2):
            found, true = (p.argmax(-1) == number) & counted, label == number
            size = found.sum() + true.sum()
            score = 2 * (found & true).sum() / size if size else 1.0
            wanted[number - 1] += score * counted.sum()
    mean, *each = dice_scores(LOGITS.argmax(-1), LABEL, 3)
    np.testing.assert_allclose(each, wanted, rtol=1e-5)
    np.testing.assert_allclose(mean, wanted.mean(), rtol=1e-5)


def test_a_class_that_is_nowhere_scores_one() -> None:
    nothing = np.zeros((1, 2, 2), np.int32)
    mean, first, second = dice_scores(nothing, nothing, 3)
    assert float(first) == float(second) == float(mean) == 4  # pixels


# ---- Hausdorff distances -------------------------------------------------------------------------

ROWS, COLS, CLASSES = 9, 12, 4
DIAGONAL = 15.0  # an image of 9 x 12 pixels
score = jax.jit(losses.hausdorff_scores, static_argnums=2)


def border(mask: np.ndarray) -> np.ndarray:
    """Positions of the pixels with a neighbour outside, `[n, 2]`."""
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
    """Predicted classes and labels, int32[B, ROWS, COLS] each."""
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
    found = np.asarray(jax.jit(losses.squared_distances)(mask))
    for image, squares in zip(mask[:2], found, strict=False):
        places = np.argwhere(image)
        every = np.stack(np.indices(image.shape), -1)[:, :, None] - places
        np.testing.assert_array_equal(squares, (every**2).sum(-1).min(-1))
    assert (found[2] >= 2**28).all()
