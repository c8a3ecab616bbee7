"""Samples of several sources, mixed by weight: a pure function of seed and sample number.

A source with the share w of all weights owns an interval of [0, 1) of length w. Sample n comes from
the source whose interval contains frac(c + n / golden ratio), with c drawn from the seed. These
numbers spread evenly over every interval: among any N consecutive samples the source has w * N, to
within 8 samples (the error grows with log N, and is below 7 in a period).

Fractions are multiples of 1 / PERIOD, so shares are exact to 1 / PERIOD and the sequence of sources
repeats after PERIOD samples. A table of one period gives the number of earlier samples from the
same source. That is the sample's number within its source, which is read in its own order, epoch
after epoch.

Source: Kuipers and Niederreiter, Uniform Distribution of Sequences, 1974, chapter 2.3.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxptd.data.batches import Samples

PERIOD = 2**20
# Near PERIOD / golden ratio, and odd, so that its multiples reach all numbers below PERIOD. Their
# fractions are as even as the golden ratio's, because no term of the continued fraction of
# step / PERIOD exceeds 3 (the golden ratio's are all 1).
STEP = 646_735
OF_MIXTURES = 2**63  # Philox is also keyed with epochs, which have smaller numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Samples):
    """Samples of several sources.

    Args:
        parts: the samples of each source.
        weights: of each source, above 0, with any sum.
        seq_length: T.
        seed: 0 or more.
    """

    parts: tuple[Samples, ...]
    weights: tuple[float, ...]
    seq_length: int
    seed: int

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def windows_per_epoch(self) -> int:
        """Samples before any source is read a second time."""
        return min(
            self._period.number_of(source, part.windows_per_epoch)
            for source, part in enumerate(self.parts)
        )

    def rows(self, indices: np.ndarray) -> np.ndarray:
        return self._read(indices, lambda part, numbers: part.rows(numbers), self.seq_length + 1)

    def targets(self, indices: np.ndarray) -> np.ndarray:
        return self._read(indices, lambda part, numbers: part.targets(numbers), self.seq_length)

    def documents(self, indices: np.ndarray, end_of_document: int) -> np.ndarray:
        def read(part: Samples, numbers: np.ndarray) -> np.ndarray:
            return part.documents(numbers, end_of_document)

        return self._read(indices, read, self.seq_length)

    def first_tokens(self, count: int) -> np.ndarray:
        return self.parts[0].first_tokens(count)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sample numbers[n] -> the source of each[n], and its number among that source's[n]."""
        return self._period.locate(np.asarray(indices, dtype=np.int64))

    def _read(
        self,
        indices: np.ndarray,
        read: Callable[[Samples, np.ndarray], np.ndarray],
        width: int,
    ) -> np.ndarray:
        sources, numbers = self.locate(indices)
        tokens = np.empty((len(sources), width), dtype=np.int32)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            tokens[chosen] = read(self.parts[source], numbers[chosen])
        return tokens

    @functools.cached_property
    def _period(self) -> "Period":
        return make_period(self.weights, self.seed)


class Period(NamedTuple):
    """The sources of PERIOD consecutive samples.

    sources: of each sample. ranks: number of earlier samples from its source. places: sample
    numbers, grouped by source. counts: number of samples of each source.
    """

    sources: np.ndarray
    ranks: np.ndarray
    places: np.ndarray
    counts: np.ndarray

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sample numbers[n] -> the source of each[n], and its number among that source's[n]."""
        periods, places = indices // PERIOD, indices % PERIOD
        sources = self.sources[places]
        return sources, periods * self.counts[sources] + self.ranks[places]

    def number_of(self, source: int, rank: int) -> int:
        """The number of a source's sample `rank` among all samples."""
        periods, rest = divmod(rank, int(self.counts[source]))
        earlier = int(self.counts[:source].sum())
        return periods * PERIOD + int(self.places[earlier + rest])


def make_period(weights: Sequence[float], seed: int) -> Period:
    """Makes the table of one period."""
    samples = np.arange(PERIOD, dtype=np.int64)
    fractions = (_draw(seed, 0) % PERIOD + STEP * samples) % PERIOD
    ends = np.cumsum(counts_of(weights))
    sources = np.searchsorted(ends, fractions, side="right").astype(np.int16)
    counts = np.bincount(sources, minlength=len(weights))
    places = np.argsort(sources, kind="stable")
    ranks = np.empty_like(places)
    ranks[places] = samples - np.repeat(np.cumsum(counts) - counts, counts)
    return Period(sources, ranks.astype(np.int32), places.astype(np.int32), counts)


def counts_of(weights: Sequence[float]) -> np.ndarray:
    """Samples of each source in a period, within 1 of its share; 0 is possible for a tiny one."""
    shares = np.array(weights, dtype=np.float64) / sum(weights)
    ends = np.round(PERIOD * np.cumsum(shares)).astype(np.int64)
    return np.diff(ends, prepend=0)


def seed_of(seed: int, source: int) -> int:
    """The seed of a source's own order, so that equal sources have different orders."""
    return _draw(seed, 1 + source)


def _draw(seed: int, number: int) -> int:
    """Draws 64 random bits, as a pure function."""
    key = np.array([seed, OF_MIXTURES + number], dtype=np.uint64)
    return int(np.random.Philox(key=key).random_raw())
