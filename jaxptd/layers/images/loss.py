"""Losses of images whose classes each device has all of.

Letters: B images, K classes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

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


def dice_loss(logits: Array, label: Array, summed: Callable[[Array], Array] = lambda x: x) -> Array:
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
    counts_BRQ1 = (label >= 0)[..., None].astype(logits.dtype)
    p, t = jax.nn.softmax(logits) * counts_BRQ1, one_hot(label, logits)
    pixels = (1, 2)
    both_BK, pp_BK, tt_BK = summed(jnp.stack([jnp.sum(x, pixels) for x in (p * t, p * p, t)]))
    loss_B = jnp.mean(1 - (2 * both_BK + SMOOTH) / (pp_BK + tt_BK + SMOOTH), -1)
    return jnp.sum(loss_B * jnp.sum(counts_BRQ1, (1, 2, 3)))


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
