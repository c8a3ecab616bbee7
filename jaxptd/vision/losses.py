"""Losses of images whose classes each device has all of.

Letters: B images, K classes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Sum = Callable[[Array], Array]
SMOOTH = 1e-5  # added to both sides of a Dice coefficient, so that an absent class has one


def cross_entropy(logits: Array, label: Array) -> Array:
    """The sum of -log softmax(logits[.., K])[label] over labels of 0 or more."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(one_hot(label, logits) * log_p)


def right(logits: Array, label: Array) -> Array:
    """The number of labels of 0 or more that are the most likely class."""
    return jnp.sum(jnp.argmax(logits, -1) == label).astype(logits.dtype)


def one_hot(label: Array, logits: Array) -> Array:
    """1 at each label's class, `[.., K]`; zeros where the label is below 0."""
    return (label[..., None] == jnp.arange(logits.shape[-1])).astype(logits.dtype)


def dice_loss(logits: Array, label: Array, summed: Sum = lambda x: x) -> Array:
    """The Dice loss of each image, times the number of its pixels here that count; their sum.

    So its sum over images, divided by all pixels that count, is the mean loss of an image: the same
    whatever images are computed together. The loss of an image is the mean over classes of
    1 - (2 sum(p t) + s) / (sum(p p) + sum(t t) + s), with probabilities p and 0 or 1 in t.

    Args:
        logits: `[B, rows, columns, K]`.
        label: int32[B, rows, columns]; those below 0 do not count.
        summed: sums over an image's strips -> those over the image, if these are strips.

    Source: Milletari et al., arXiv 1606.04797; p p in place of p as in Swin-Unet's code.
    """
    sums_3BK, pixels_B = _dice_sums(logits, label)
    return jnp.sum(_dice(summed(sums_3BK)) * pixels_B)


def batch_dice_loss(logits: Array, label: Array, summed: Sum = lambda x: x) -> Array:
    """The Dice loss of all images of a batch together, times the number of pixels here that count.

    Sums are over all pixels of the batch, as in Swin-Unet's code.

    Args:
        logits: `[B, rows, columns, K]` of this device's images, or of its strips.
        label: int32[B, rows, columns]; those below 0 do not count.
        summed: sums over these pixels -> those over the batch.
    """
    sums_3BK, pixels_B = _dice_sums(logits, label)
    return _dice(summed(sums_3BK.sum(1))) * jnp.sum(pixels_B)


def _dice_sums(logits: Array, label: Array) -> tuple[Array, Array]:
    """The sums of p t, p p and t over the pixels of each image, and the number of those pixels."""
    counts_BRQ1 = (label >= 0)[..., None].astype(logits.dtype)
    p, t = jax.nn.softmax(logits) * counts_BRQ1, one_hot(label, logits)
    sums_3BK = jnp.stack([jnp.sum(x, (1, 2)) for x in (p * t, p * p, t)])
    return sums_3BK, jnp.sum(counts_BRQ1, (1, 2, 3))


def _dice(sums: Array) -> Array:
    """The sums `[3, .., K]` of p t, p p and t -> the mean loss of a class, `[..]`."""
    both, pp, tt = sums
    return jnp.mean(1 - (2 * both + SMOOTH) / (pp + tt + SMOOTH), -1)


def dice_scores(found_BRQ: Array, label_BRQ: Array, classes: int) -> list[Array]:
    """The Dice coefficients of classes that were found, as `dice_loss` takes their mean.

    First the mean of all classes but the first, then each of these. A class that neither the labels
    of an image nor those found have has 1.

    Args:
        found_BRQ: classes of whole images.
        label_BRQ: those that are right; those below 0 do not count.
        classes: K.
    """
    counts_BRQ, number_K = label_BRQ >= 0, jnp.arange(1, classes)
    p, t = (x[..., None] == number_K for x in (jnp.where(counts_BRQ, found_BRQ, -1), label_BRQ))
    pixels, wide = (1, 2), jnp.zeros(()).dtype
    both_BK, all_BK = (jnp.sum(x, pixels, wide) for x in (p & t, p.astype(wide) + t))
    score_BK = jnp.where(all_BK > 0, 2 * both_BK / jnp.maximum(all_BK, 1), 1)
    total_K = jnp.sum(score_BK * jnp.sum(counts_BRQ, pixels, wide)[:, None], 0)
    return [total_K.mean(), *total_K]
