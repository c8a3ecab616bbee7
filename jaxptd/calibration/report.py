"""The result of a calibration: as a hardware file, as a table and as JSON."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from statistics import median
from typing import Any

from jaxptd.calibration.suite import Machine, Sample, with_numbers
from jaxptd.display import Table
from jaxptd.hardware import Accelerator, Cluster, Figure

# ---- shares of limits that the timed samples reach, by the cost model ----------------------------

# A sample measures a share only if at least this part of its time is inversely proportional to the
# share: in a short collective, errors of the model's constants would outweigh the link's rate.
TELLING = 0.8
LOWEST = 1e-9  # kind of a share in a hardware file
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
        lowest, highest: over all repetitions of all samples.
        samples: number of samples that measure it.
        repetitions: total over these samples.
    """

    value: float
    lowest: float
    highest: float
    samples: int
    repetitions: int

    @property
    def above_limit(self) -> bool:
        """True if the median exceeded the limit itself, so that 1 is written."""
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
    """Seconds that do not depend on the share, and those inverse to it, at a share of 1."""
    whole, half = (_predicted(sample, cluster, share) for share in (1.0, 0.5))
    return 2 * whole - half, half - whole


def _predicted(sample: Sample, cluster: Cluster, share: float) -> float:
    assert sample.number is not None
    return sample.term(with_numbers(cluster, {sample.number: share})).seconds


def derived_shares(timed: Sequence[Timed], cluster: Cluster) -> dict[str, Share]:
    """The shares that the samples measure, by the name of the number."""
    shares = {number: _derived(number, timed, cluster) for number in SHARES}
    return {number: share for number, share in shares.items() if share is not None}


def _derived(number: str, timed: Sequence[Timed], cluster: Cluster) -> Share | None:
    """The share according to the samples whose fastest repetition measures it."""
    timings = [each for each in timed if each.sample.number == number]
    spreads = [
        [share_of(each.sample, seconds, cluster) for seconds in each.spread()] for each in timings
    ]
    telling = [[x for x in spread if x is not None] for spread in spreads if None not in spread]
    if not telling:
        return None
    highest, medians, lowest = zip(*telling, strict=True)
    value = min(1.0, max(LOWEST, median(medians)))
    repetitions = sum(
        len(each.seconds)
        for each, spread in zip(timings, spreads, strict=True)
        if None not in spread
    )
    return Share(value, min(lowest), max(highest), len(telling), repetitions)


def with_shares(cluster: Cluster, shares: Mapping[str, Share]) -> Cluster:
    """The cluster with the measured shares."""
    return with_numbers(cluster, {number: share.value for number, share in shares.items()})


MEASURED = "measured"
CPU_FIGURES = "CPU figures, not those of an accelerator"


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """The times of a machine, and the hardware table that follows from them.

    Args:
        name: the accelerator's name in the file.
        base: name of the accelerator whose limits the shares refer to.
        figures: numbers of the base.
        machine: the devices.
        where: date, devices and versions, in one line.
        simulated: whether the devices are a CPU's.
        timed: samples with their seconds.
        left: samples that were not timed, with the reason.
        attention: the attention kernel.
    """

    name: str
    base: str
    figures: Mapping[str, Figure]
    machine: Machine
    where: str
    simulated: bool
    timed: Sequence[Timed]
    left: Sequence[tuple[Sample, str]]
    attention: str

    @property
    def cluster(self) -> Cluster:
        """The machine with its initial limits and shares."""
        values: dict[str, Any] = {name: figure.value for name, figure in self.figures.items()}
        return Cluster(Accelerator(self.base, **values), self.machine.node)

    @property
    def shares(self) -> dict[str, Share]:
        return derived_shares(self.timed, self.cluster)

    def numbers(self) -> dict[str, Figure]:
        """All numbers of the file: measured shares, and the others unchanged."""
        shares = self.shares
        return {
            name: self._measured(name, shares[name]) if name in shares else self._kept(name)
            for name in self.figures
        }

    def _measured(self, number: str, share: Share) -> Figure:
        low, middle, high = (f"{x:.4g}" for x in (share.lowest, share.value, share.highest))
        programs = "a program" if share.samples == 1 else f"{share.samples} programs"
        times = f"{share.repetitions} repetitions of {programs}"
        source = f"{self.where}; minimum {low}, median {middle}, maximum {high} of {times}"
        if number.startswith("attention"):
            source += f"; kernel {self.attention}"
        if share.above_limit:
            source += f"; above the limit of {self.base}, so 1 is written"
        if self.simulated:
            source = f"{CPU_FIGURES}: {source}"
        return Figure(float(f"{share.value:.6g}"), MEASURED, source)

    def _kept(self, number: str) -> Figure:
        figure = self.figures[number]
        if not number.endswith("_share"):
            return figure
        source = f"{figure.source} ({self.base}; not measured: {self._obstacle(number)})"
        return dataclasses.replace(figure, source=source)

    def _obstacle(self, number: str) -> str:
        """The reason why a share was not measured."""
        if number == "network_share" and self.machine.nodes == 1:
            return "one node"
        if number == "nvlink_share" and self.machine.node == 1:
            return "one device per node"
        reasons = [reason for sample, reason in self.left if sample.number == number]
        return reasons[0] if reasons else "its times are too short"

    def yaml(self) -> str:
        """The file, in the form that `--hardware` reads."""
        rows = [
            f"  {name}: {{value: {_number(figure.value)}, kind: {figure.kind}, "
            f"source: {json.dumps(figure.source)}}}"
            for name, figure in self.numbers().items()
        ]
        return "\n".join([*self._comments(), "", f"{json.dumps(self.name)}:", *rows, ""])

    def _comments(self) -> Iterator[str]:
        yield "# Written by `jaxptd plan calibrate`; a file for `--hardware`."
        yield f"# {self.where}. The limits are those of {self.base}."
        if self.simulated:
            yield f"# {CPU_FIGURES}: the devices are simulated, to try the command."
        yield "# Microseconds: minimum, median, maximum, and the cost model's with these shares."
        for row in self._rows():
            yield f"#   {row[0]:<58} {' '.join(f'{cell:>11}' for cell in row[1:])}"
        for sample, reason in self.left:
            yield f"#   {sample!s:<58} not timed: {reason}"

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Samples with their microseconds: minimum, median, maximum, and the cost model's."""
        for each, predicted in zip(self.timed, self._predicted(), strict=True):
            spread = (f"{1e6 * seconds:.1f}" for seconds in each.spread())
            yield str(each.sample), *spread, f"{1e6 * predicted:.1f}" if predicted else "-"

    def _predicted(self) -> list[float]:
        cluster = with_shares(self.cluster, self.shares)
        return [each.sample.term(cluster).seconds for each in self.timed]

    def tables(self) -> list[Table]:
        """The shares, and the times."""
        numbers, shares = self.numbers(), self.shares
        rows = []
        for name in SHARES:
            before, now = self.figures[name], numbers[name]
            share = shares.get(name)
            spread = (f"{share.lowest:.4g}", f"{share.highest:.4g}") if share else ("-", "-")
            rows.append((name, f"{now.value:.4g}", *spread, now.kind, f"{before.value:.4g}"))
        columns = ("number", "value", "minimum", "maximum", "kind", self.base)
        times = ("microseconds", "minimum", "median", "maximum", "cost model")
        return [Table(self.name, columns, rows), Table(self.where, times, list(self._rows()))]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        shares = {name: dataclasses.asdict(share) for name, share in self.shares.items()}
        samples = [
            {
                "sample": str(each.sample),
                "number": each.sample.number,
                "seconds": each.spread(),
                "predicted": predicted or None,
            }
            for each, predicted in zip(self.timed, self._predicted(), strict=True)
        ]
        return {
            "name": self.name,
            "base": self.base,
            "where": self.where,
            "simulated": self.simulated,
            "machine": dataclasses.asdict(self.machine),
            "numbers": {name: dataclasses.asdict(x) for name, x in self.numbers().items()},
            "shares": shares,
            "samples": samples,
            "not_timed": [{"sample": str(x), "reason": reason} for x, reason in self.left],
        }


def _number(value: float) -> str:
    """A number as YAML reads it: with an exponent it has a point and a sign."""
    text = str(Decimal(repr(value)).normalize()).lower()
    return text.replace("e", ".0e") if "e" in text and "." not in text else text
