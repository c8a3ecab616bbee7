"""Losses and scores of pixels, against plain sums."""

import jax
import numpy as np

from jaxptd.vision import losses as loss

cross_entropy, dice_loss, batch_dice_loss = map(
    jax.jit, (loss.cross_entropy, loss.dice_loss, loss.batch_dice_loss)
)
dice_scores = jax.jit(loss.dice_scores, static_argnums=2)
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
    """As if the images were one."""
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
