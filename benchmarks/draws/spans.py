"""Statistics of T5's corrupted spans.

The numbers of tokens are fixed: 15 of 100, in 5 spans. All ways to cut them into spans are equally
likely, and so are all ways to place these in the text, which begins with an unchanged token.

Letters: B samples, P = 5 spans.
Source: Raffel et al., arXiv 1910.10683, section 3.1.4, and `random_spans_noise_mask` of its code.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.draws.statistics import (
    Row,
    all_shifts,
    chi_square,
    independent_samples,
    pooled,
    standard,
    worst,
)
from jaxptd.data.batches import WindowsInOrder
from jaxptd.data.objectives import SpanCorruption, SpanIds

OF = "spans"
LENGTH, CUT, SPANS = 100, 15, 5
KEPT = LENGTH - CUT
SENTINELS = tuple(range(2, 2 + SPANS))


class Found(NamedTuple):
    """Lengths of the spans and of the text before each, `[B, P]`."""

    cut: np.ndarray
    kept: np.ndarray


def rows(samples: int) -> Iterator[Row]:
    """All tests of spans; samples: how many per epoch."""
    first = _found(samples, epoch=0, seed=0)
    exact = bool((first.cut.sum(1) == CUT).all() and (first.kept.sum(1) == KEPT).all())
    yield Row(OF, f"{CUT} of {LENGTH} tokens in {SPANS} spans", samples, float(exact))
    number = np.arange(samples)
    turn = number % SPANS  # one span per sample, since its spans depend on each other
    for of, x, total in (("spans", first.cut, CUT), ("the text between", first.kept, KEPT)):
        counts = np.bincount(x[number, turn], minlength=total + 1)[1:]
        p = chi_square(*pooled(counts, _weights(total)))
        yield Row(OF, f"length of {of}", samples, p)
    yield Row(OF, "ways to cut", samples, _ways(first.cut))
    begin = np.cumsum(first.kept, 1) + np.cumsum(first.cut, 1) - first.cut
    found = [_begins(begin[turn == p, p], p) for p in range(SPANS)]
    yield Row(OF, "where spans begin", samples, worst(found))
    cuts, between = _ends(first.cut), _ends(first.kept)
    wide = np.zeros_like(between)
    wide[:, : cuts.shape[1]] = cuts * math.sqrt(between.size / cuts.size)
    yield Row(OF, "spans against the text between", samples, all_shifts(wide, between))
    others = _found(samples, epoch=1, seed=0), _found(samples, epoch=0, seed=1)
    ends = (np.concatenate([*map(_ends, each)], 1) for each in (first, *others))
    yield from independent_samples(OF, *ends)


def _ends(lengths: np.ndarray) -> np.ndarray:
    """Where pieces except the last end, standardised to mean 0 and variance 1, `[B, tokens - 1]`.

    The number of ends is fixed, so sums of them vary a little more.
    """
    places = lengths.sum(1).max() - 1
    ends = np.zeros((len(lengths), places))
    np.put_along_axis(ends, np.cumsum(lengths, 1)[:, :-1] - 1, 1.0, axis=1)
    return standard(ends) * math.sqrt((places - 1) / places)


def _found(samples: int, *, epoch: int, seed: int) -> Found:
    size = 2 + SPANS + samples * LENGTH + 1
    windows = WindowsInOrder(np.arange(2 + SPANS, size), LENGTH, vocab_size=size)
    assert windows.windows_per_epoch == samples
    ids = SpanIds(pad=0, end=1, sentinels=SENTINELS, vocab_size=size)
    objective = SpanCorruption(ids, KEPT + SPANS + 1, CUT + SPANS + 1)
    assert objective.window == LENGTH
    fields = objective.fields(windows, epoch * samples + np.arange(samples), seed=seed)
    source, targets = fields["source"], fields["targets"]
    kept = np.diff(_places(source, SENTINELS), prepend=-1) - 1
    cut = np.diff(_places(targets, (*SENTINELS, ids.end))) - 1
    return Found(cut, kept)


def _places(tokens: np.ndarray, of: Sequence[int]) -> np.ndarray:
    """The positions of each of these tokens, `[B, number of them]`."""
    return np.stack([(tokens == each).argmax(1) for each in of], 1)


def _weights(total: int) -> list[int]:
    """The number of ways to cut the rest after a first piece of 1, 2, ... tokens."""
    rest = (total - size for size in range(1, total + 1))
    return [math.comb(each - 1, SPANS - 2) if each else 0 for each in rest]


def _ways(cut: np.ndarray) -> float:
    """`chi_square` of each way to cut into spans."""
    ends = np.cumsum(cut, 1)[:, :-1]
    number = {way: i for i, way in enumerate(itertools.combinations(range(1, CUT), SPANS - 1))}
    found = np.array([number.get(tuple(each), 0) for each in ends.tolist()])
    return chi_square(np.bincount(found, minlength=len(number)), len(cut) / len(number))


def _prefix(total: int, pieces: int) -> np.ndarray:
    """The probability that the first pieces have 0, 1, ..., total tokens in all."""
    if pieces in (0, SPANS):
        return np.eye(total + 1)[total if pieces else 0]
    ways = [
        math.comb(each - 1, pieces - 1) * math.comb(total - each - 1, SPANS - pieces - 1)
        if 0 < each < total
        else 0
        for each in range(total + 1)
    ]
    return np.array(ways) / math.comb(total - 1, SPANS - 1)


def _begins(begin: np.ndarray, span: int) -> float:
    """`chi_square` of the positions of a span's first tokens."""
    share = np.convolve(_prefix(KEPT, span + 1), _prefix(CUT, span))
    return chi_square(*pooled(np.bincount(begin, minlength=share.size), share))
