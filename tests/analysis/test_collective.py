"""Bytes that each device sends in a collective."""

import pytest

from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective


@pytest.mark.parametrize(
    ("kind", "sent"),
    [(ALL_REDUCE, 150), (ALL_GATHER, 75), (REDUCE_SCATTER, 75), ("collective-permute", 100)],
)
def test_bytes_that_a_ring_sends(kind: str, sent: int) -> None:
    assert Collective(kind, ("tp",), 1, 100).wire_bytes({"tp": 4, "dp": 2}) == sent
