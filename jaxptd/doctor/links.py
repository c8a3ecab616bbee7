"""Measures a few kernels and links, and compares them with the hardware table."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxptd.calibration.report import share_of
from jaxptd.calibration.suite import Exchange, Machine, Pass, Product, Sample, with_numbers
from jaxptd.calibration.timer import Timer, find_machine, table_name
from jaxptd.costs.collective import ALL_GATHER
from jaxptd.doctor.page import Row, failed, judged
from jaxptd.hardware import Accelerator, Cluster, Figure, Group, accelerators
from jaxptd.hardware.table import figures_of

MIB = 2**20
WEAK, SLOW = 0.8, 0.5  # of the table's share: a note, a problem
PRODUCT, PASS, EXCHANGE = (8192, 8192, 8192), 512 * MIB, 256 * MIB


class Times(Protocol):
    """Times samples, such as `calibration.timer.Timer`."""

    def __call__(self, sample: Sample) -> tuple[float, ...]: ...


def samples_of(machine: Machine) -> list[Sample]:
    """A matmul, a pass over memory, and a gather within a node and between nodes."""
    samples: list[Sample] = [Product(*PRODUCT), Pass(PASS)]
    if machine.node > 1:
        samples.append(Exchange(ALL_GATHER, Group(machine.node), EXCHANGE))
    if machine.nodes > 1:
        across = Group(machine.nodes, machine.node)
        samples.append(Exchange(ALL_GATHER, across, EXCHANGE, crosses=True))
    return samples


def links(devices: Sequence[Any]) -> list[Row]:
    """The rows of this section.

    devices: all accelerators of the run.

    Raises:
        UserError: the table has no such accelerator, or nodes have different numbers of them.
    """
    name = table_name(devices[0].device_kind, accelerators())
    return measured(name, find_machine(devices, fp8=False), Timer(devices))


def measured(name: str, machine: Machine, times: Times) -> list[Row]:
    """Rows on what each sample reaches of its limit, and on what the table says.

    Args:
        name: of the accelerator in the hardware table.
        machine: the devices.
        times: times a sample on them.
    """
    figures = figures_of(name)
    return [_row(sample, times, figures, machine) for sample in samples_of(machine)]


def _row(sample: Sample, times: Times, figures: Mapping[str, Figure], machine: Machine) -> Row:
    values: dict[str, Any] = {name: figure.value for name, figure in figures.items()}
    cluster = Cluster(Accelerator("measured", **values), machine.node)
    try:
        seconds = min(times(sample))
    except RuntimeError as error:
        return failed(str(sample), error)
    assert sample.number is not None
    expected = figures[sample.number].value
    reached = share_of(sample, seconds, with_numbers(cluster, {sample.number: expected}))
    if reached is None:
        return Row(str(sample), f"{1e3 * seconds:.3g} ms, too short to tell")
    ratio = reached / expected
    remedy = "see whether other programs use it, its clocks are lowered, or a link is down"
    return judged(
        str(sample),
        f"{1e3 * seconds:.3g} ms: {reached:.0%} of the limit, {expected:.0%} in the table",
        bad=remedy if ratio < SLOW else "",
        remark=remedy if ratio < WEAK else "",
    )
