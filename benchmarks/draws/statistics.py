"""Tests of randomness: each gives the probability of a result as unlikely as the one found.

A table of tests fails at a stated significance: the chance that any of its rows fails although all
draws are correct. With n rows, a row fails below significance / n. The probability of a row that
looks at m cells at once is m times that of its worst cell (Bonferroni).

Source: Wilson and Hilferty, PNAS 17(12), 1931 (chi-square); L'Ecuyer and Simard, TestU01, ACM TOMS
33(4), 2007 (a battery of tests and their significance).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

SIGNIFICANCE = 1e-6  # of a table
LEAST = 5  # expected per cell, so that its count is nearly normal


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table."""

    of: str  # kind of draws
    what: str  # property that is tested
    draws: int  # number of them
    p: float  # probability of a result at least as unlikely, if the draws have the property


def failing(rows: Sequence[Row], significance: float = SIGNIFICANCE) -> list[Row]:
    """The rows whose result is too unlikely."""
    return [row for row in rows if not row.p >= significance / len(rows)]


def worst(each: Iterable[float]) -> float:
    """The probability of the worst of several tests."""
    found = list(each)
    return min(1.0, min(found) * len(found))


def normal_tail(z: float) -> float:
    """The probability that a standard normal number is at least as far from 0, on either side."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square(counts: np.ndarray, expected: np.ndarray | float, free: int | None = None) -> float:
    """The two-sided probability of counts that deviate from the expected ones as these do.

    Both sides count: draws that are too even are not random either.

    Args:
        counts: counts of each cell.
        expected: expected counts of each cell, `LEAST` or more.
        free: degrees of freedom; None means the number of cells minus one.
    """
    k = free or counts.size - 1
    statistic = float((np.square(counts - expected) / expected).sum())
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return normal_tail(z)


def pooled(counts: np.ndarray, weights: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Counts and expected counts, merging neighbouring cells until `LEAST` are expected.

    Args:
        counts: counts of each cell.
        weights: weights of the cells, proportional to their probabilities.
    """
    share = np.asarray(weights, np.float64)
    expected = share / share.sum() * counts.sum()
    cell, number, filled = [], 0, 0.0
    for each in expected:
        cell.append(number)
        filled += each
        if filled >= LEAST:
            number, filled = number + 1, 0.0
    whole = np.minimum(cell, number - 1)  # the rest at the end joins the last cell
    found, wanted = (np.bincount(whole, weights=x) for x in (counts, expected))
    return found, wanted


def uniform_bytes(words: np.ndarray, shift: int) -> float:
    """`chi_square` of the byte of each word that begins at bit `shift`."""
    byte = (words.ravel() >> np.uint32(shift)) & np.uint32(255)
    return chi_square(np.bincount(byte, minlength=256), words.size / 256)


def all_shifts(x: np.ndarray, y: np.ndarray, *, itself: bool = False) -> float:
    """The worst correlation of two arrays of mean 0 and variance 1, over all cyclic shifts.

    itself: x and y are the same array, so the test leaves out the zero shift.
    """
    product = np.fft.rfftn(x) * np.conj(np.fft.rfftn(y))
    axes = tuple(range(x.ndim))
    z = np.abs(np.fft.irfftn(product, x.shape, axes)).ravel()[int(itself) :] / math.sqrt(x.size)
    return min(1.0, normal_tail(float(z.max())) * z.size)


def standard(x: np.ndarray) -> np.ndarray:
    """x with mean 0 and variance 1."""
    return (x - x.mean()) / x.std()


def independent_samples(
    of: str, first: np.ndarray, epoch: np.ndarray, seed: np.ndarray
) -> Iterator[Row]:
    """Tests with `all_shifts` that no sample follows from another.

    Args:
        of: kind of draws.
        first: an array of mean 0 and variance 1, whose first dim is the sample.
        epoch: the same for the next epoch's samples.
        seed: the same for the next seed's.
    """
    yield Row(of, "neighbouring samples", first.size, all_shifts(first[::2], first[1::2]))
    yield Row(of, "consecutive epochs", first.size, all_shifts(first, epoch))
    yield Row(of, "consecutive seeds", first.size, all_shifts(first, seed))
