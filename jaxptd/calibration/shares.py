"""Solves the cost model for the shares of limits that timed samples reach."""

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median

from jaxptd.calibration.samples import Sample, with_numbers
from jaxptd.hardware import Cluster

# A sample tells a share if at least this part of its time is inverse to the share: in the time of a
# short collective a wrong constant of the model would count for more than the link's rate.
TELLING = 0.8
LOWEST = 1e-9  # of a share in a hardware file
SHARES = (
    *("products_share", "hbm_share", "attention_forward_share", "attention_backward_share"),
    *("nvlink_share", "network_share"),
)


@dataclasses.dataclass(frozen=True)
class Timed:
    """A sample, and the seconds of each repetition."""

    sample: Sample
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    def spread(self) -> tuple[float, float, float]:
        """Minimum, median and maximum of the seconds."""
        return min(self.seconds), self.median, max(self.seconds)


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of a limit, and how it was found.

    Args:
        value: median of the samples' shares, at most 1.
        lowest, highest: of all repetitions of all samples.
        samples: that tell it.
        repetitions: of all samples together.
    """

    value: float
    lowest: float
    highest: float
    samples: int
    repetitions: int

    @property
    def above_limit(self) -> bool:
        """True if the median was above the limit itself, which was written instead."""
        return self.value == 1.0 < self.highest


def share_of(sample: Sample, seconds: float, cluster: Cluster) -> float | None:
    """The share with which the cost model gives a sample these seconds.

    None if less than `TELLING` of them depends on the share.
    """
    fixed, work = _parts(sample, cluster)
    if seconds - fixed < TELLING * seconds:
        return None
    return work / (seconds - fixed)


def _parts(sample: Sample, cluster: Cluster) -> tuple[float, float]:
    """Seconds that do not depend on the share, and at a share of 1 those that are inverse to it."""
    whole, half = (_predicted(sample, cluster, share) for share in (1.0, 0.5))
    return 2 * whole - half, half - whole


def _predicted(sample: Sample, cluster: Cluster, share: float) -> float:
    assert sample.number is not None
    return sample.term(with_numbers(cluster, {sample.number: share})).seconds


def derived_shares(timed: Sequence[Timed], cluster: Cluster) -> dict[str, Share]:
    """The shares that samples tell, by the name of the number; others are left out."""
    found = {number: _derived(number, timed, cluster) for number in SHARES}
    return {number: share for number, share in found.items() if share is not None}


def _derived(number: str, timed: Sequence[Timed], cluster: Cluster) -> Share | None:
    """The share that the samples tell whose fastest repetition does."""
    own = [each for each in timed if each.sample.number == number]
    spreads = [
        [share_of(each.sample, seconds, cluster) for seconds in each.spread()] for each in own
    ]
    telling = [[x for x in spread if x is not None] for spread in spreads if None not in spread]
    if not telling:
        return None
    highest, medians, lowest = zip(*telling, strict=True)
    value = min(1.0, max(LOWEST, median(medians)))
    repetitions = sum(
        len(each.seconds) for each, spread in zip(own, spreads, strict=True) if None not in spread
    )
    return Share(value, min(lowest), max(highest), len(telling), repetitions)


def with_shares(cluster: Cluster, shares: Mapping[str, Share]) -> Cluster:
    """The cluster with shares that were found."""
    return with_numbers(cluster, {number: share.value for number, share in shares.items()})
