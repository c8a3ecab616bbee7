"""Packed documents arranged by their work: equal pieces, as functions of the documents only."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.context_parallel import CHUNK, STRATEGIES, placed_blocks
from jaxptd.data.balance import dealt, sample_work, shares, token_orders, visits

T = 32_768


def packed(seed: int, *, median: int = 1024, sigma: float = 1.0, length: int = T) -> np.ndarray:
    """The document of each token of a sequence, with documents of log-normal length."""
    draw = np.random.default_rng(seed)
    ends = np.cumsum(np.ceil(draw.lognormal(np.log(median), sigma, length)))
    return np.searchsorted(ends, np.arange(length), side="right")


def ratio(work: np.ndarray) -> float:
    """Largest over mean."""
    return float(work.max() / work.mean())


@pytest.mark.parametrize("reach", [None, 1, 5, 30])
def test_visits_are_the_blocks_with_a_key_that_a_query_sees(
    reach: int | None, block: int = 4
) -> None:
    segment_BT = np.stack([packed(seed, median=5, length=40) for seed in range(20)])
    place = np.arange(40)
    seen = (segment_BT[:, :, None] == segment_BT[:, None]) & (place[:, None] >= place)
    if reach is not None:
        seen &= place[:, None] - place < reach
    met = seen.reshape(20, 10, block, 10, block).any((2, 4)).sum(2)
    assert (visits(segment_BT, block, reach=reach) == met).all()


@given(st.lists(st.integers(0, 50), min_size=12, max_size=12), st.sampled_from([1, 2, 3, 4, 12]))
def test_shares_hold_every_piece_once_and_equally_many(work: list[int], count: int) -> None:
    found = shares(np.array(work), count)
    assert found.shape == (count, 12 // count)
    assert sorted(found.ravel()) == [*range(12)]
    assert (np.diff(found, axis=1) > 0).all()


def test_the_largest_piece_does_not_meet_the_second() -> None:
    assert shares(np.array([9, 8, 1, 1, 2, 1]), 2).tolist() == [[0, 2, 3], [1, 4, 5]]
    assert shares(np.array([20, 5, 5, 1, 1, 1]), 2).tolist() == [[0, 4, 5], [1, 2, 3]]


@pytest.mark.parametrize(("median", "sigma"), [(1024, 1.0), (1024, 1.5), (1024, 2.0)])
@pytest.mark.parametrize("devices", [2, 4, 8, 16])
def test_devices_of_a_sequence_have_equal_work(median: int, sigma: float, devices: int) -> None:
    """The goal is 1.10; chunks of a zigzag leave more."""
    segment_BT = np.stack([packed(seed, median=median, sigma=sigma) for seed in range(16)])
    work = visits(segment_BT, CHUNK).repeat(CHUNK, 1)
    order = token_orders(segment_BT, devices)
    assert (np.sort(order, 1) == np.arange(T)).all()
    split = STRATEGIES["zigzag"].order.split
    chunks = [split(T // devices, i, devices) for i in range(devices)]
    zigzag = np.concatenate([start + np.arange(n) for each in chunks for start, n in each])
    found, before = (
        [ratio(row[o].reshape(devices, -1).sum(1)) for row, o in zip(work, orders, strict=True)]
        for orders in (order, np.broadcast_to(zigzag, order.shape))
    )
    assert np.mean(found) <= 1.10 < np.mean(before)


def test_devices_hold_whole_blocks_in_the_order_of_the_sequence() -> None:
    order = token_orders(packed(3, median=9, length=96)[None], 4)[0].reshape(4, 2, -1)
    assert placed_blocks(96, 4) == 8
    assert (order[:, :, 0] % 12 == 0).all()
    assert (np.diff(order.reshape(4, -1)) > 0).all()
    assert placed_blocks(T, 8) == T // CHUNK


def test_replicas_and_micro_batches_have_equal_work() -> None:
    work = np.array([sample_work(packed(seed, length=8192)[None])[0] for seed in range(32)])
    row = dealt(work, 4, 4)
    assert sorted(row) == [*range(32)]
    replicas = work[row].reshape(4, 4, 2).sum(2)
    assert ratio(replicas.sum(1)) <= 1.10 < ratio(work.reshape(4, -1).sum(1))
    assert (np.diff(replicas, axis=1) <= 0).all()
    assert np.mean(replicas.max(0) / replicas.mean(0)) <= 1.10


def test_what_is_alike_stays_in_its_order() -> None:
    for split in ((1, 4), (4, 1), (2, 2)):
        assert dealt(np.full(8, 5), *split).tolist() == [*range(8)]


def test_documents_alone_decide() -> None:
    """Numbers of documents do not matter, nor the other samples of a batch."""
    one, two = (packed(seed, median=50, length=1024) for seed in range(2))
    both = token_orders(np.stack([one, two]), 4)
    assert (token_orders(two[None] + 7, 4) == both[1:]).all()
    assert (both[0] != both[1]).any()
