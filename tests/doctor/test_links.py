"""Links measured beside the hardware table, with times that are injected."""

import pytest

from jaxptd.calibration.suite import Exchange, Machine, Product, Sample
from jaxptd.doctor.links import measured, samples_of
from jaxptd.doctor.page import Row
from jaxptd.hardware import Cluster, find_accelerator

TWO_NODES = Machine(devices=16, node=8)


class Times:
    """The cost model's times, longer by a factor where a sample's name has a word."""

    def __init__(self, factors: dict[str, float], error: str = "") -> None:
        self._factors, self._error = factors, error

    def __call__(self, sample: Sample) -> tuple[float, ...]:
        if self._error and isinstance(sample, Exchange):
            raise RuntimeError(self._error)
        seconds = sample.term(Cluster(find_accelerator("h200"), 8)).seconds
        factor = next((x for word, x in self._factors.items() if word in str(sample)), 1.0)
        return (2 * factor * seconds, factor * seconds)


def verdicts(factors: dict[str, float], **options: str) -> list[str]:
    return [str(row.verdict) for row in measured("h200", TWO_NODES, Times(factors, **options))]


def test_the_table_s_own_times_are_ok() -> None:
    rows = measured("h200", TWO_NODES, Times({}))
    assert [str(row.verdict) for row in rows] == ["ok"] * 4
    product: Row = rows[0]
    assert product.name == str(Product(8192, 8192, 8192))
    percent = f"{find_accelerator('h200').products_share:.0%}"
    assert product.finding.endswith(f": {percent} of the limit, {percent} in the table")


@pytest.mark.parametrize(
    ("word", "index"), [("matmul", 0), ("pass", 1), ("over 8 devices", 2), ("over 2 nodes", 3)]
)
def test_what_is_slow_is_named(word: str, index: int) -> None:
    for factor, verdict in ((1.4, "note"), (3.0, "problem")):
        expected = ["ok"] * 4
        expected[index] = verdict
        assert verdicts({word: factor}) == expected


def test_a_link_that_fails_is_a_problem() -> None:
    assert verdicts({}, error="INTERNAL: NCCL\n error") == ["ok", "ok", "problem", "problem"]


def test_only_links_that_exist_are_measured() -> None:
    assert len(samples_of(Machine(1, 1))) == 2
    assert len(samples_of(Machine(8, 8))) == 3
    assert len(samples_of(Machine(2, 1))) == 3
