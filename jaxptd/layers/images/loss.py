"""Losses of images whose classes each device has all of.

Letters: B images, K classes.
"""

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


def dice_loss(logits: Array, label: Array) -> Array:
    """The Dice loss of each image, times the number of its pixels that count; their sum.

    So its sum over images, divided by all pixels that count, is the mean loss of an image: the same
    whatever images are computed together. The loss of an image is the mean over classes of
    1 - (2 sum(p t) + s) / (sum(p p) + sum(t t) + s), with probabilities p and 0 or 1 in t.

    Args:
        logits: `[B, rows, columns, K]`.
        label: int32[B, rows, columns]; those below 0 do not count.

    Source: Milletari et al., arXiv 1606.04797; p p in place of p as in Swin-Unet's code.
    """
    counts_BRQ1 = (label >= 0)[..., None].astype(logits.dtype)
    p, t = jax.nn.softmax(logits) * counts_BRQ1, one_hot(label, logits)
    pixels = (1, 2)
    both_BK, pp_BK, tt_BK = (jnp.sum(x, pixels) for x in (p * t, p * p, t))
    loss_B = jnp.mean(1 - (2 * both_BK + SMOOTH) / (pp_BK + tt_BK + SMOOTH), -1)
    return jnp.sum(loss_B * jnp.sum(counts_BRQ1, (1, 2, 3)))


def dice_scores(logits: Array, label: Array) -> list[Array]:
    """The Dice coefficients of the most likely classes, as `dice_loss` takes their mean.

    First the mean of all classes but the first, then each of these. A class that neither the labels
    nor the most likely classes of an image have has 1.
    """
    counts_BRQ1 = (label >= 0)[..., None].astype(logits.dtype)
    p = one_hot(jnp.argmax(logits, -1), logits) * counts_BRQ1
    t, pixels = one_hot(label, logits), (1, 2)
    both_BK, all_BK = jnp.sum(p * t, pixels), jnp.sum(p + t, pixels)
    score_BK = jnp.where(all_BK > 0, 2 * both_BK / jnp.maximum(all_BK, 1), 1)[:, 1:]
    total_K = jnp.sum(score_BK * jnp.sum(counts_BRQ1, pixels), 0)
    return [total_K.mean(), *total_K]
