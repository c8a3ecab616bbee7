"""Statistics of BERT's masked tokens and sentence pairs.

Each token of the corpus is its own position, so a batch tells where all of its tokens come from.

Letters: B samples, W = 100 tokens of the corpus in a sample, K = 15 predicted ones.
Source: Devlin et al., arXiv 1810.04805, section 3.1 and appendix A.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks.draws.statistics import (
    Row,
    all_shifts,
    chi_square,
    independent_samples,
    normal_tail,
    pooled,
    standard,
)
from jaxptd.data.batches import WindowsInOrder
from jaxptd.data.objectives import MaskedPairs, MaskIds

OF = "masked tokens"
SPECIAL = 5
LENGTH, MARKS = 100, 3
PREDICTED, MASKED, RANDOM = 15, 0.8, 0.1  # of 100 tokens; of the predicted
CELLS = 20  # of ids, of windows and of places


class Found(NamedTuple):
    """What happened to samples, read off their batch.

    is_target: `[B, W]`, tokens to predict. place_BK: their positions. kind_BK: 0 for masked, 1 for
    random, 2 for unchanged ones. token_BK: the original tokens. seen_BK: the tokens that the model
    sees. split_B: tokens in the first sentence. step_B: windows from the first sentence to the
    second. swapped_B: True where the second does not follow the first.
    """

    is_target: np.ndarray
    place_BK: np.ndarray
    kind_BK: np.ndarray
    token_BK: np.ndarray
    seen_BK: np.ndarray
    split_B: np.ndarray
    step_B: np.ndarray
    swapped_B: np.ndarray


def rows(windows: int) -> Iterator[Row]:
    """All tests of masked tokens; windows: samples per epoch."""
    first = _found(windows, epoch=0, seed=0)
    yield from _of_positions(first)
    yield from _of_kinds(first, windows)
    yield from _of_pairs(first, windows)
    others = _found(windows, epoch=1, seed=0), _found(windows, epoch=0, seed=1)
    masks = [standard(each.is_target) for each in (first, *others)]
    yield from independent_samples(OF, *(x * math.sqrt((LENGTH - 1) / LENGTH) for x in masks))


def _found(windows: int, *, epoch: int, seed: int) -> Found:
    size = SPECIAL + windows * LENGTH + 1
    samples = WindowsInOrder(np.arange(SPECIAL, size), LENGTH, vocab_size=size)
    assert samples.windows_per_epoch == windows
    ids = MaskIds(pad=0, cls=1, sep=2, mask=3, end_of_document=4, vocab_size=size)
    fields = MaskedPairs(ids, LENGTH + MARKS).fields(
        samples, epoch * windows + np.arange(windows), seed=seed
    )
    split_B = (fields["token_types"] == 0).sum(1) - 2  # [CLS] and [SEP]
    place_T = np.arange(LENGTH + MARKS)
    text = (place_T > 0) & (place_T < LENGTH + 2) & (place_T != split_B[:, None] + 1)
    seen_BW, target_BW = (
        x[text].reshape(windows, LENGTH) for x in (fields["tokens"], fields["targets"])
    )
    is_target = target_BW >= 0
    place_BK = np.nonzero(is_target)[1].reshape(windows, -1)
    seen_BK, token_BK = (x[is_target].reshape(windows, -1) for x in (seen_BW, target_BW))
    kind_BK = np.select([seen_BK == ids.mask, seen_BK != token_BK], [0, 1], 2)
    whole_BW = np.where(is_target, target_BW, seen_BW) - SPECIAL
    step_B = (whole_BW[:, -1] // LENGTH - whole_BW[:, 0] // LENGTH) % windows
    return Found(
        is_target, place_BK, kind_BK, token_BK, seen_BK, split_B, step_B, fields["next_sentence"]
    )


def _of_positions(found: Found) -> Iterator[Row]:
    samples = len(found.is_target)
    exact = bool((found.is_target.sum(1) == PREDICTED).all())
    yield Row(OF, f"{PREDICTED} of {LENGTH} tokens are predicted", samples, float(exact))
    share, draws = PREDICTED / LENGTH, samples * PREDICTED
    expected = samples * share
    # A sample always draws the same number: counts vary less than with independent draws.
    spread = math.sqrt((1 - share) * LENGTH / (LENGTH - 1))
    scaled = expected + (found.is_target.sum(0) - expected) / spread
    yield Row(OF, "positions", draws, chi_square(scaled, expected, LENGTH - 1))
    # One gap per sample, since the gaps of a sample depend on each other.
    number = np.arange(samples)
    pair = number % (PREDICTED - 1)
    gap = found.place_BK[number, pair + 1] - found.place_BK[number, pair]
    ways = [math.comb(LENGTH - g, PREDICTED - 1) for g in range(1, LENGTH - PREDICTED + 2)]
    p = chi_square(*pooled(np.bincount(gap, minlength=len(ways) + 1)[1:], ways))
    yield Row(OF, "distances of neighbours", samples, p)


def _of_kinds(found: Found, windows: int) -> Iterator[Row]:
    kind, draws = found.kind_BK, found.kind_BK.size
    ids = windows * LENGTH + 1
    own = RANDOM / ids  # a random token may equal the old one and look unchanged
    share = np.array([MASKED, RANDOM - own, 1 - MASKED - RANDOM + own])
    counts = np.bincount(kind.ravel(), minlength=3)
    yield Row(OF, "masked, random, unchanged", draws, chi_square(counts, share * draws))
    place = found.place_BK * CELLS // LENGTH
    joint = np.bincount((place * 3 + kind).ravel(), minlength=3 * CELLS).reshape(CELLS, 3)
    p = chi_square(joint, joint.sum(1, keepdims=True) * share, 2 * CELLS)
    yield Row(OF, "what happens at each position", draws, p)
    x = ((kind == 0) - MASKED) / math.sqrt(MASKED * (1 - MASKED))
    yield Row(OF, "what happens to neighbours", draws, all_shifts(x, x, itself=True))
    random = kind == 1
    drawn, old = found.seen_BK[random] - SPECIAL, found.token_BK[random] - SPECIAL
    cells = np.bincount(drawn * CELLS // ids, minlength=CELLS)
    yield Row(OF, "random tokens", drawn.size, chi_square(cells, drawn.size / CELLS))
    yield Row(
        OF, "random tokens against the old ones", drawn.size, all_shifts(_even(drawn), _even(old))
    )


def _even(x: np.ndarray) -> np.ndarray:
    return standard(np.argsort(np.argsort(x)))


def _of_pairs(found: Found, windows: int) -> Iterator[Row]:
    swapped, samples = found.swapped_B, found.swapped_B.size
    right = bool(((found.step_B != 0) == swapped).all())
    yield Row(OF, "second sentences follow or not, as labelled", samples, float(right))
    half = normal_tail((swapped.sum() - samples / 2) / math.sqrt(samples / 4))
    yield Row(OF, "half of the pairs do not follow", samples, half)
    signs = 2.0 * swapped - 1
    yield Row(OF, "neighbouring pairs", samples, all_shifts(signs, signs, itself=True))
    splits = np.bincount(found.split_B - 1, minlength=LENGTH - 1)
    yield Row(OF, "length of first sentences", samples, chi_square(splits, samples / (LENGTH - 1)))
    step = found.step_B[swapped == 1]
    cell, share = (step - 1) * CELLS // (windows - 1), np.arange(windows - 1) * CELLS
    expected = np.bincount(share // (windows - 1), minlength=CELLS) / (windows - 1)
    p = chi_square(np.bincount(cell, minlength=CELLS), expected * step.size)
    yield Row(OF, "windows of second sentences", step.size, p)
