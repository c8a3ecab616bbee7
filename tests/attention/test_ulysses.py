"""Ulysses: heads exchanged for tokens around attention, alone and around a ring."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.attention.attend import Ring
from jaxptd.attention.ulysses import to_heads, to_tokens
from jaxptd.costs.collective import Collective, add_up, subtract
from jaxptd.mesh import SEQUENCE_AXES, Axis, Layout, make_mesh
from tests.test_ring_attention import B, Case, H, T, both_ways, hold, moved, only_forward


def case(ulysses: int, cp: int = 1, ring: Any = "zigzag", *, rich: bool = False, **choice: Any):
    layout = Layout(cp=cp, ulysses=ulysses, ring=ring)
    return Case(layout, rate=0.1 * rich, documents=rich, **{"heads": 4} | choice)


@pytest.mark.parametrize(
    "case",
    [
        case(2, rich=True, bias=True),
        slow(case(4)),
        case(2, 2, rich=True, group=2),
        case(4, 2, "gather", group=2, rich=True),  # two devices share a head of keys
        slow(case(4, 2, "gather", group=4)),
        slow(case(2, 3, bias=True, rich=True)),
        slow(case(2, 3, "blockwise", window=14, rich=True)),
        slow(case(2, 2, window=17, group=2)),
        slow(case(2, 4, "rsa", rich=True)),
        case(2, 2, "rsa", bias=True, causal=False, keys=72, rich=True),
        slow(case(2, 2, causal=False, keys=72, bias=True, chunk=4)),
        slow(Case(Layout(dp=2, ulysses=2, tp=2), rate=0.1, documents=True, heads=4, bias=True)),
    ],
    ids=str,
)
def test_it_gives_the_attention_of_one_device(case: Case) -> None:
    hold(case, "float64")


@pytest.mark.parametrize(
    ("heads", "first"), [(4, [0, 2]), (2, [0, 1]), (1, [0, 0])], ids="heads={}".format
)
def test_a_device_gets_all_tokens_of_its_heads(heads: int, first: list[int]) -> None:
    """Token t of head n is 10 t + n. Device i of 2 has tokens 4 i to 4 i + 3 before."""
    x_TNH = (10 * np.arange(8)[:, None] + np.arange(heads))[..., None]
    layout = Layout(ulysses=2)
    found = jax.jit(
        jax.shard_map(
            lambda x: to_heads(x, Axis.ULYSSES),
            mesh=make_mesh(layout),
            in_specs=P(Axis.ULYSSES),
            out_specs=P(None, Axis.ULYSSES),
        )
    )(x_TNH)
    each = max(1, heads // 2)
    own = [slice(n, n + each) for n in first]
    np.testing.assert_array_equal(found, np.concatenate([x_TNH[:, n] for n in own], 1))


def test_tokens_return_to_their_devices() -> None:
    x_TNH = np.arange(8 * 4 * 3).reshape(8, 4, 3)
    both = jax.shard_map(
        lambda x: to_tokens(to_heads(x, Axis.ULYSSES), Axis.ULYSSES),
        mesh=make_mesh(Layout(ulysses=4)),
        in_specs=P(Axis.ULYSSES),
        out_specs=P(Axis.ULYSSES),
    )
    np.testing.assert_array_equal(jax.jit(both)(x_TNH), x_TNH)


def test_tokens_are_those_of_a_ring_cut_further() -> None:
    ring = Ring(Axis.CP, "zigzag", Axis.ULYSSES)
    found = jax.shard_map(
        lambda: ring.positions_along(Axis.CP, 4),
        mesh=make_mesh(Layout(cp=2, ulysses=2)),
        in_specs=(),
        out_specs=P(SEQUENCE_AXES),
    )()
    np.testing.assert_array_equal(found, ring.order(16, 2))


def test_heads_that_do_not_split_are_refused() -> None:
    mapped = jax.shard_map(
        lambda x: to_heads(x, Axis.ULYSSES),
        mesh=make_mesh(Layout(ulysses=4)),
        in_specs=P(Axis.ULYSSES),
        out_specs=P(None, Axis.ULYSSES),
    )
    with pytest.raises(ValueError, match="3 heads do not split over ulysses=4, nor the reverse"):
        mapped(np.zeros((8, 3, 2)))


@pytest.mark.parametrize(
    ("group", "keys"), [(1, 4), (2, 2), (4, 2)], ids=["4 heads of keys", "2", "1"]
)  # heads of keys that a device sends: one to each device at least
def test_queries_keys_and_outputs_move_once_forward_and_once_back(group: int, keys: int) -> None:
    """Keys and values share a message. The ring sends as many bytes a hop as without Ulysses."""
    each = case(2, 2, group=group)
    forward = moved(each, only_forward(each), "bfloat16")
    backward = subtract(moved(each, both_ways(each), "bfloat16"), forward)
    block = B * T // 4 * H
    size = 2 * block * (2 * each.heads + 2 * keys)
    exchanged = Collective("all-to-all", ("ulysses",), 3, size)
    hop = Collective("collective-permute", ("cp",), 1, 2 * 2 * block * keys)
    assert forward == [exchanged, hop]
    back = Collective("collective-permute", ("cp",), 2, 2 * 2 * block * keys * (1 + 2))
    assert backward == add_up([exchanged, back])
