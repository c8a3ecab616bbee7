"""Losses of images whose classes all are on each device, and scores of predicted classes.

Letters: B images, K classes, R rows, Q columns.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

# ---- cross-entropy and Dice coefficients ---------------------------------------------------------

Sum = Callable[[Array], Array]
SMOOTH = 1e-5  # added to both sides of a Dice coefficient, so that absent classes have one


def cross_entropy(logits: Array, label: Array) -> Array:
    """The sum of -log softmax(logits[.., K])[label] over labels >= 0."""
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(one_hot(label, logits) * log_p)


def right(logits: Array, label: Array) -> Array:
    """The number of labels >= 0 that are the most likely class."""
    return jnp.sum(jnp.argmax(logits, -1) == label).astype(logits.dtype)


def one_hot(label: Array, logits: Array) -> Array:
    """1 at each label's class, `[.., K]`; zeros for labels below 0."""
    return (label[..., None] == jnp.arange(logits.shape[-1])).astype(logits.dtype)


def dice_loss(logits: Array, label: Array, summed: Sum = lambda x: x) -> Array:
    """The sum over images of the Dice loss times the number of the image's counted pixels here.

    Divided by all counted pixels, it is the mean loss of an image, whichever images are computed
    together. The loss of an image is the mean over classes of
    1 - (2 sum(p t) + s) / (sum(p p) + sum(t t) + s), with probabilities p and 0 or 1 in t.

    Args:
        logits: `[B, rows, columns, K]`.
        label: int32[B, rows, columns]; those below 0 are not counted.
        summed: sums over an image's strips -> those over the image, if these are strips.

    Source: Milletari et al., arXiv 1606.04797; p p instead of p as in Swin-Unet's code.
    """
    sums_3BK, pixels_B = _dice_sums(logits, label)
    return jnp.sum(_dice(summed(sums_3BK)) * pixels_B)


def batch_dice_loss(logits: Array, label: Array, summed: Sum = lambda x: x) -> Array:
    """The joint Dice loss of a batch's images, times the number of counted pixels here.

    Sums are over all pixels of the batch, as in Swin-Unet's code.

    Args:
        logits: `[B, rows, columns, K]` of this device's images, or of its strips.
        label: int32[B, rows, columns]; those below 0 are not counted.
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
    """The Dice coefficients of predicted classes, defined as in `dice_loss`.

    First their mean over all classes but the first, then each of these. A class that neither the
    labels nor the prediction of an image contains scores 1.

    Args:
        found_BRQ: classes of whole images.
        label_BRQ: the correct ones; those below 0 are ignored.
        classes: K.
    """
    counts_BRQ, number_K = label_BRQ >= 0, jnp.arange(1, classes)
    p, t = (x[..., None] == number_K for x in (jnp.where(counts_BRQ, found_BRQ, -1), label_BRQ))
    pixels, wide = (1, 2), jnp.zeros(()).dtype
    both_BK, all_BK = (jnp.sum(x, pixels, wide) for x in (p & t, p.astype(wide) + t))
    score_BK = jnp.where(all_BK > 0, 2 * both_BK / jnp.maximum(all_BK, 1), 1)
    total_K = jnp.sum(score_BK * jnp.sum(counts_BRQ, pixels, wide)[:, None], 0)
    return [total_K.mean(), *total_K]


# ---- Hausdorff distances of classes of pixels ----------------------------------------------------

FAR = 2**14  # pixels: more than any image has in a row; twice its square fits in int32


def hausdorff_scores(found_BRQ: Array, label_BRQ: Array, classes: int) -> list[Array]:
    """The 95 % Hausdorff distances of classes in pixels, weighted by images' counted pixels.

    First their mean over all classes but the first, then each of these, summed over images. A
    mask's border is its pixels with one of the four neighbours outside, or at the image's edge. A
    distance is from the middle of a pixel of one border to the nearest one of the other. The score
    is the 95th percentile of the distances from both borders together, interpolated linearly. If
    both masks are empty it is 0; if one is, it is the image's diagonal, so missing a class is worse
    than misplacing it.

    Args:
        found_BRQ: predicted classes.
        label_BRQ: the correct ones; pixels with labels below 0 are in neither mask.
        classes: K.

    Source: `hd95` of MedPy, which Swin-Unet's code uses; for empty masks the BraTS challenges.
    """
    counts_BRQ = label_BRQ >= 0
    number_K = jnp.arange(1, classes)[:, None, None]
    masks = ((x_BRQ[:, None] == number_K) & counts_BRQ[:, None] for x_BRQ in (found_BRQ, label_BRQ))
    score_BK = _percentile(*masks)
    pixels_B = jnp.sum(counts_BRQ, (1, 2)).astype(score_BK.dtype)
    total_K = jnp.sum(score_BK * pixels_B[:, None], 0)
    return [total_K.mean(), *total_K]


def _percentile(one_BKRQ: Array, other_BKRQ: Array) -> Array:
    """The score of each image and class, `[B, K]`."""
    rows, cols = one_BKRQ.shape[-2:]
    borders = _border(one_BKRQ), _border(other_BKRQ)
    squares = [
        jnp.where(border, squared_distances(other), FAR**2)
        for border, other in zip(borders, borders[::-1], strict=True)
    ]
    sorted_BKn = jnp.sort(jnp.concatenate(squares, -2).reshape(*one_BKRQ.shape[:2], -1))
    count_BK = sum(jnp.sum(border, (-2, -1)) for border in borders)
    place_BK = 19 * jnp.maximum(count_BK - 1, 0)  # in twentieths: 0.95 of the last place
    ends = (
        jnp.take_along_axis(sorted_BKn, each[..., None], -1)[..., 0]
        for each in (place_BK // 20, -(-place_BK // 20))
    )
    low_BK, high_BK = (jnp.sqrt(end.astype(jnp.float32)) for end in ends)
    score_BK = low_BK + (place_BK % 20) / 20 * (high_BK - low_BK)
    in_one, in_other = (jnp.any(mask, (-2, -1)) for mask in (one_BKRQ, other_BKRQ))
    diagonal = (rows**2 + cols**2) ** 0.5
    return jnp.where(in_one & in_other, score_BK, jnp.where(in_one | in_other, diagonal, 0.0))


def _border(mask_RQ: Array) -> Array:
    """The pixels of masks `[.., R, Q]` with a neighbour outside."""
    sides = [(0, 0)] * (mask_RQ.ndim - 2) + [(1, 1)] * 2
    wide = jnp.pad(mask_RQ, sides)
    inside = wide[..., :-2, 1:-1] & wide[..., 2:, 1:-1] & wide[..., 1:-1, :-2] & wide[..., 1:-1, 2:]
    return mask_RQ & ~inside


def squared_distances(mask_RQ: Array) -> Array:
    """The squared distance of each pixel from the nearest one of a mask, int32[.., R, Q].

    Works in two passes: within rows, then across rows. For an empty mask it is FAR**2 or more.
    Source: Felzenszwalb and Huttenlocher, Distance transforms of sampled functions, section 3.
    """
    rows, cols = mask_RQ.shape[-2:]
    col_Q, axis = jnp.arange(cols), mask_RQ.ndim - 1
    before_RQ = lax.cummax(jnp.where(mask_RQ, col_Q, -FAR), axis)
    after_RQ = lax.cummin(jnp.where(mask_RQ, col_Q, FAR + cols), axis, reverse=True)
    along_RQ = jnp.minimum(jnp.minimum(col_Q - before_RQ, after_RQ - col_Q), FAR) ** 2
    apart_RR = (jnp.arange(rows)[:, None] - jnp.arange(rows)) ** 2

    def nearer(least_RQ: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        along_Q, apart_R = row
        return jnp.minimum(least_RQ, along_Q[..., None, :] + apart_R[:, None]), None

    each_row = jnp.moveaxis(along_RQ, -2, 0), apart_RR
    return lax.scan(nearer, along_RQ, each_row)[0]
