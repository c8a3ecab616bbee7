"""Layouts: sizes, descriptions, and mutually exclusive options."""

import dataclasses

import pytest

from jaxptd.errors import UserError
from jaxptd.layout import Axis, Layout


def test_a_layout_counts_its_devices():
    layout = Layout(pp=2, dp=3, ep=2, cp=5, tp=7, sequence_parallel=True)
    assert layout.num_devices == 420
    assert layout.sample_shards == 6
    assert list(layout.sizes) == ["pp", "replicas", "dp", "ep", "cp", "ulysses", "row", "col", "tp"]
    assert str(layout) == "pp=2 dp=3 ep=2 cp=5 tp=7 1f1b sequence_parallel zigzag"
    assert str(Layout()) == "one device"
    assert str(Layout(row=2, col=2)) == "row=2 col=2 zigzag gather heads"
    grid = Layout(row=2, col=4, matmul2d_slices=2, attention2d="blocks")
    assert str(grid) == "row=2 col=4 gather in 2 slices blocks"


@pytest.mark.parametrize("axis", list(Axis))
@pytest.mark.parametrize("size", [0, -2])
def test_an_axis_has_at_least_one_device(axis, size):
    with pytest.raises(UserError, match=rf"layout\.{axis}={size}: .* use 1 or more"):
        Layout(**{axis: size})


@pytest.mark.parametrize("grid", [{"row": 2}, {"col": 2}, {"row": 2, "col": 2}])
def test_tp_and_a_grid_exclude_each_other(grid):
    assert Layout(**grid).num_devices > 1
    with pytest.raises(UserError, match=r"layout\.tp=2 .*set tp=1 or row=col=1"):
        Layout(tp=2, **grid)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"row": 2, "col": 4, "matmul2d": "fox"},
            "layout.col=4 is not square, but .*=fox needs that",
        ),
        (
            {"row": 2, "ulysses": 2},
            "layout.ulysses=2 with a grid of .* shards heads over its columns",
        ),
        ({"row": 2, "matmul2d": "cannon"}, "use layout.matmul2d=gather or summa"),
        ({"matmul2d_slices": 0}, "layout.matmul2d_slices=0: use 1 or more"),
        ({"virtual_stages": 0}, "layout.virtual_stages=0: use 1 or more, or null"),
        ({"matmul2d": "summa", "matmul2d_slices": 2}, "layout.matmul2d=summa has no slices"),
        ({"col": 2, "sequence_parallel": True}, "leave layout.sequence_parallel false"),
        ({"tp": 2, "collective_matmul": True}, "set both, or leave it false"),
        ({"row": 2, "collective_matmul": True}, "a grid has layout.matmul2d_slices"),
        ({"matmul2d": "sumna"}, "matmul2d=sumna: use one of gather, summa, fox, cannon"),
        ({"attention2d": "block"}, "layout.attention2d=block: use one of heads, blocks"),
    ],
)
def test_a_layout_that_cannot_be(fields, words):
    with pytest.raises(UserError, match=words):
        Layout(**fields)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (Layout(tp=4), 1),
        (Layout(cp=3, tp=2), 3),
        (Layout(cp=3, row=2, col=5), 6),
        (Layout(row=2, col=5, attention2d="blocks"), 1),
    ],
)
def test_the_ring_is_of_the_devices_that_shard_the_sequence(layout, size):
    assert layout.ring_size == size


def test_zero_shards_a_state_over_the_devices_of_a_replica():
    layout = Layout(replicas=3, dp=2, ep=5, cp=7, ulysses=11, zero=1)
    assert (layout.sample_shards, layout.batch_shards, layout.zero_shards) == (30, 2310, 770)
    assert str(Layout(replicas=2, dp=4, zero=3)) == "replicas=2 dp=4 zero=3"


def test_ulysses_is_among_the_devices_that_share_a_batch_and_its_sequences():
    layout = Layout(dp=2, ep=3, cp=5, ulysses=2)
    assert (layout.sample_shards, layout.sequence_shards, layout.batch_shards) == (6, 10, 60)
    assert layout.sequence_unit == 10  # two chunks on each of five devices, and halves of both
    assert Layout(cp=2, ulysses=4).sequence_unit == 8
    assert Layout(ulysses=4, tp=2, sequence_parallel=True).sequence_unit == 8


def test_latent_vectors_move_where_sequences_are_shared_and_a_strategy_can_expand_them() -> None:
    for fields in ({"cp": 2}, {"ulysses": 2}, {"cp": 2, "ring": "gather"}):
        assert Layout(**fields).exchanges_latents
        expanded = Layout(**fields, latent_exchange="expanded")
        assert not expanded.exchanges_latents
        assert str(expanded).endswith("latent_exchange=expanded")
    for fields in ({"tp": 2}, {"cp": 2, "ring": "rsa"}, {"ulysses": 2, "ring": "rsa"}):
        assert not Layout(**fields).exchanges_latents
        assert "latent" not in str(Layout(**fields, latent_exchange="expanded"))


def test_absorbed_products_take_latent_vectors_everywhere_and_expand_none() -> None:
    for fields in ({}, {"tp": 2}, {"cp": 2}, {"cp": 2, "ring": "rsa"}, {"ulysses": 2}):
        absorbed = Layout(**fields, latent_products="absorbed")
        assert absorbed.attends_latents
        assert not absorbed.exchanges_latents
        assert str(absorbed).endswith("latent_products=absorbed")
        both = dataclasses.replace(absorbed, latent_exchange="expanded")
        assert str(both) == str(absorbed)
    assert Layout(cp=2).attends_latents
    assert not Layout(tp=2).attends_latents


def test_replicas_split_a_state_that_is_sharded_and_on_the_device():
    split = Layout(replicas=2, dp=2, zero=1, replica_state="split")
    assert split.splits_state and str(split) == "replicas=2 dp=2 zero=1 replica_state=split"
    for without in ({"zero": 0}, {"replicas": 1}, {"replica_state": "copied"}):
        assert not dataclasses.replace(split, **without).splits_state
    for offload in ("optimizer", "parameters"):
        with pytest.raises(UserError, match=f"layout.offload={offload}: masters are split over re"):
            dataclasses.replace(split, offload=offload)
