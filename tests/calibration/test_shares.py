"""Recovers a machine's known shares from the times that the cost model predicts for it."""

import dataclasses

import pytest

from jaxptd.calibration.report import SHARES, Timed, derived_shares, share_of
from jaxptd.calibration.suite import (
    ACCELERATOR,
    CPU,
    KINDS,
    Attention,
    Dispatch,
    Exchange,
    Machine,
    Pass,
    Product,
    Sample,
    SmallKernels,
    suite,
)
from jaxptd.costs import kernels
from jaxptd.costs.collective import ALL_REDUCE
from jaxptd.costs.kernels import LAUNCH
from jaxptd.hardware import Cluster, Group, find_accelerator

TABLE = find_accelerator("h200")
KNOWN = dict(zip(SHARES, (0.71, 0.83, 0.52, 0.41, 0.66, 0.79), strict=True))
MACHINE = dataclasses.replace(TABLE, **KNOWN)
TWO_NODES = Machine(devices=16, node=8, fp8=True)


def seconds(sample: Sample, cluster: Cluster) -> float:
    """Predicted time of a sample on a cluster."""
    a = cluster.accelerator
    match sample:
        case Product(fp8=False):
            return kernels.product(a, sample.M, sample.N, sample.K).seconds
        case Pass():
            return kernels.moved(a, 2.0 * sample.size).seconds
        case Attention():
            flops = 2.0 * sample.heads * sample.length**2 * 128
            return kernels.flash(a, flops, 128, backward=sample.backward).seconds
        case Exchange():
            return kernels.collective(cluster, sample.kind, sample.group, sample.size).seconds
    return LAUNCH


def timed(machine: Machine, *, late: float = 0.0) -> list[Timed]:
    """Times the suite on `MACHINE`; of three repetitions, one is slower and one faster."""
    found = []
    for sample in suite(machine, ACCELERATOR):
        each = seconds(sample, Cluster(MACHINE, machine.node))
        each += late * isinstance(sample, Exchange)
        found.append(Timed(sample, (each, 0.99 * each, 1.03 * each)))
    return found


def test_the_shares_of_a_known_machine_come_back() -> None:
    found = derived_shares(timed(TWO_NODES), Cluster(TABLE, 8))
    assert {name: share.value for name, share in found.items()} == pytest.approx(KNOWN, rel=1e-9)
    for share in found.values():
        assert 0.96 * share.value < share.lowest < share.value < share.highest < 1.04 * share.value
        assert share.repetitions == 3 * share.samples
        assert not share.above_limit


def test_short_collectives_tell_nothing() -> None:
    """Adding ten microseconds to each collective changes shares by only a few percent."""
    found = derived_shares(timed(TWO_NODES, late=1e-5), Cluster(TABLE, 8))
    assert found["nvlink_share"].value == pytest.approx(KNOWN["nvlink_share"], rel=0.04)
    assert found["nvlink_share"].samples < len(KINDS) * 3 * len(ACCELERATOR.exchanges)
    short = Exchange(ALL_REDUCE, Group(8), 2**20)
    assert share_of(short, seconds(short, Cluster(MACHINE, 8)), Cluster(TABLE, 8)) is None


def test_a_share_is_at_most_one() -> None:
    """Tries a device that is faster than its published limits."""
    fast = dataclasses.replace(MACHINE, bf16_flops=2 * TABLE.bf16_flops)
    sample = Product(8192, 8192, 8192)
    both = (seconds(sample, Cluster(fast)),) * 3
    (share,) = derived_shares([Timed(sample, both)], Cluster(TABLE)).values()
    assert (share.value, share.above_limit) == (1.0, True)
    assert share.highest == pytest.approx(1.42)


def test_what_was_not_timed_has_no_share() -> None:
    one = Machine(devices=1, node=1)
    assert set(derived_shares(timed(one), Cluster(TABLE, 1))) == set(SHARES) - {
        "nvlink_share",
        "network_share",
    }


def test_the_suite_begins_with_one_sample_of_each_number() -> None:
    samples = suite(TWO_NODES, ACCELERATOR)
    first = [sample.number for sample in samples[: len(SHARES)]]
    assert set(first) == set(SHARES)
    exchanges = [sample for sample in samples if isinstance(sample, Exchange)]
    assert {(x.group.members, x.group.stride) for x in exchanges} == {
        *((2, 1), (4, 1), (8, 1)),
        (2, 8),
    }
    assert len(set(samples)) == len(samples)
    others = [sample for sample in samples if sample.number is None]
    assert others == [SmallKernels(), Product(8192, 8192, 8192, fp8=True), Dispatch()]


def test_samples_fit_into_memory() -> None:
    small = Machine(devices=6, node=6, memory=2**30)
    samples = suite(small, ACCELERATOR)
    assert 0 < len(samples) < len(suite(Machine(6, 6), ACCELERATOR))
    assert all(sample.bytes <= 2**29 for sample in samples)
    groups = {x.group.members for x in suite(Machine(6, 6), CPU) if isinstance(x, Exchange)}
    assert groups == {2, 6}


def test_a_sample_with_a_repetition_that_tells_nothing_counts_for_nothing() -> None:
    sample = Pass(2**22)
    long = Timed(Pass(2**30), (seconds(Pass(2**30), Cluster(MACHINE)),))
    found = derived_shares([Timed(sample, (LAUNCH, 1.0, 1.0)), long], Cluster(TABLE))
    share = found["hbm_share"]
    assert (share.samples, share.repetitions) == (1, 1)
    assert share.lowest == share.value == share.highest == pytest.approx(KNOWN["hbm_share"])
