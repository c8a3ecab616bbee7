"""Rings: which device holds which tokens, and how blocks travel."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.count import collectives_of
from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.kernel import Lengths
from jaxptd.attention.ring import travel, travel_back
from jaxptd.collectives import as_varying
from jaxptd.costs.collective import Collective
from jaxptd.mesh import Axis, Layout, RingKind, make_mesh

KINDS: tuple[RingKind, ...] = get_args(RingKind)
SIZES = (1, 2, 3, 8)  # rings of two and of three have special hops


def on_ring(size: int, body: Callable[..., Any]) -> tuple[Callable, Mesh]:
    """Runs `body` on each device of a ring and stacks the devices' results."""
    mesh = make_mesh(Layout(cp=size))

    def stacked(*inputs: Array) -> Any:
        return jax.tree.map(lambda x: as_varying(x, [Axis.CP])[None], body(*inputs))

    specs = {"in_specs": P(), "out_specs": P(Axis.CP)}
    return jax.jit(jax.shard_map(stacked, mesh=mesh, **specs, check_vma=True)), mesh


# ---- blocks ----------------------------------------------------------------------------------


def blocks(kind: RingKind, length: int, devices: int) -> np.ndarray:
    return Ring(Axis.CP, kind).order(length, devices).reshape(devices, -1)


@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 5))
def test_each_token_is_held_once_and_each_part_ascends(kind, devices: int, half: int) -> None:
    length = devices * 2 * half
    held = blocks(kind, length, devices)
    assert sorted(held.ravel()) == list(range(length))
    assert (np.diff(held) > 0).all()


def test_blocks_by_hand() -> None:
    zigzag = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert blocks("zigzag", 12, 3).tolist() == zigzag
    contiguous = np.arange(12).reshape(3, 4).tolist()
    assert blocks("blockwise", 12, 3).tolist() == contiguous
    assert blocks("rsa", 12, 3).tolist() == contiguous


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_holds_the_sequence_as_it_is(kind: RingKind) -> None:
    assert blocks(kind, 7, 1).tolist() == [list(range(7))]


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_zigzag_gives_each_device_the_same_work(devices: int) -> None:
    held = blocks("zigzag", 8 * devices, devices)
    seen = (held[:, None, :, None] >= held[None, :, None, :]).sum((2, 3))  # by pair of devices
    others = ~np.eye(devices, dtype=bool)
    assert (seen[others] == 8 * 8 // 2).all()
    assert len(set(np.diag(seen))) == 1
    contiguous = blocks("blockwise", 8 * devices, devices)
    work = (contiguous[:, :, None] >= contiguous.ravel()).sum((1, 2))
    assert work[-1] > work[0]  # this count would detect an imbalance


@pytest.mark.parametrize("kind", ["zigzag", "blockwise"])
def test_the_first_axis_of_a_ring_has_the_blocks_of_its_devices_one_after_the_other(kind) -> None:
    mesh = make_mesh(Layout(cp=2, row=2))
    ring = Ring((Axis.CP, Axis.ROW), kind)
    found = jax.shard_map(
        lambda: ring.positions_along(Axis.CP, 8), mesh=mesh, in_specs=(), out_specs=P(Axis.CP)
    )
    assert jax.jit(found)().tolist() == ring.order(16, 4).tolist()


@pytest.mark.parametrize("kind", ["zigzag", "blockwise"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_device_knows_the_positions_and_documents_of_all(kind: RingKind, size: int) -> None:
    ring, length = Ring(Axis.CP, kind), 6
    held = blocks(kind, size * length, size)
    segment_BCT = np.random.default_rng(0).integers(-1, 9, (2, size, length)).astype(np.int32)

    def body(segment_BCT: Array) -> Any:
        tokens, lengths = AttentionInputs(segment_BCT, segment_BCT), Lengths(length, length)
        found = [ring.coordinates(tokens, lengths, jnp.int32(source)) for source in range(size)]
        local, of = (
            ring.positions(length),
            [ring.positions(length, jnp.int32(i)) for i in range(size)],
        )
        return local, jnp.stack(of), found, ring.all_coordinates(tokens, lengths)

    local, of, found, every = on_ring(size, body)[0](segment_BCT)
    assert local.dtype == jnp.int32
    np.testing.assert_array_equal(local, held)
    np.testing.assert_array_equal(of, np.broadcast_to(held, (size, *held.shape)))
    queries = segment_BCT.swapaxes(0, 1)
    for source, coordinates in enumerate(found):
        np.testing.assert_array_equal(coordinates.query_T, held)
        np.testing.assert_array_equal(coordinates.key_S, np.broadcast_to(held[source], held.shape))
        np.testing.assert_array_equal(coordinates.query_segment_BT, queries)
        np.testing.assert_array_equal(coordinates.key_segment_BS, [segment_BCT[:, source]] * size)
    np.testing.assert_array_equal(every.query_T, held)
    np.testing.assert_array_equal(every.key_S, [held.ravel()] * size)
    np.testing.assert_array_equal(every.query_segment_BT, queries)
    np.testing.assert_array_equal(every.key_segment_BS, [segment_BCT.reshape(2, -1)] * size)


# ---- hops ------------------------------------------------------------------------------------


def note(diary: tuple[Array, Array], x: Array, source: Array) -> tuple[Array, Array]:
    """Records the block that arrived, and the device named as its source."""
    pages, used = diary
    return pages.at[used].set(jnp.stack([x, source])), used + 1


def empty(size: int) -> Any:
    diary = jnp.full((size + 1, 2), -1, jnp.int32), jnp.int32(0)
    return jax.tree.map(lambda x: as_varying(x, [Axis.CP]), diary)


def visited(size: int) -> np.ndarray:
    """Each device visits those before it, nearest first; device i holds the block 100 + i.

    `[devices, pages, (block, owner)]`; -1 marks pages that are not written.
    """
    source = (np.arange(size)[:, None] - np.arange(1, size)) % size
    pages = np.stack([source + 100, source], -1)
    return np.concatenate([pages, np.full((size, 2, 2), -1)], 1)


@pytest.mark.parametrize("size", SIZES)
def test_every_other_device_is_visited_once_in_order(size: int) -> None:
    def body() -> Any:
        return travel(lax.axis_index(Axis.CP) + 100, Ring(Axis.CP), empty(size), note)

    run, mesh = on_ring(size, body)
    pages, used = run()
    np.testing.assert_array_equal(pages, visited(size))
    assert (np.asarray(used) == size - 1).all()
    assert collectives_of(jax.make_jaxpr(run)(), mesh) == permutes(size - 1)


def permutes(count: int) -> list[Collective]:
    """Permutes of one int32 each."""
    return [Collective("collective-permute", ("cp",), count, 4 * count)] if count else []


@pytest.mark.parametrize("size", SIZES)
def test_sums_come_home_to_the_device_that_they_belong_to(size: int) -> None:
    def visit(me: Array, diary: Any, x: Array, source: Array) -> Any:
        """The gradient encodes the device that computed it and the block's owner."""
        return note(diary, x, source), 10**me * (source + 1)

    def body() -> Any:
        me = lax.axis_index(Axis.CP)
        diary, returned = travel_back(me + 100, Ring(Axis.CP), empty(size), partial(visit, me))
        return diary, as_varying(jnp.asarray(returned, jnp.int32), [Axis.CP] if size == 1 else [])

    run, mesh = on_ring(size, body)
    (pages, used), returned = run()
    np.testing.assert_array_equal(pages, visited(size))
    assert (np.asarray(used) == size - 1).all()
    others = sum(10**i for i in range(size))
    want = [(others - 10**i) * (i + 1) for i in range(size)]
    np.testing.assert_array_equal(returned, want)
    assert collectives_of(jax.make_jaxpr(run)(), mesh) == permutes(2 * (size - 1))


@pytest.mark.parametrize(("go", "loops"), [(travel, 7 - 1), (travel_back, 7 - 2)])
def test_hops_stand_in_one_loop(go: Callable, loops: int) -> None:
    """One loop reuses the memory of a visit, and the program does not grow with the devices."""

    def visit(total: Array, x: Array, source: Array) -> Any:
        return total + jnp.sin(x) if go is travel else (total + jnp.sin(x), jnp.cos(x))

    def body() -> Array:
        x = lax.axis_index(Axis.CP) * 1.0
        total = go(x, Ring(Axis.CP), x, visit)
        return total if go is travel else total[0]

    text = str(jax.make_jaxpr(on_ring(8, body)[0])())
    assert f"length={loops}" in text
    assert text.count("= sin") == 8 - loops


def test_a_zigzag_of_odd_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 3 tokens does not split into a zigzag's two"):
        Ring("cp", "zigzag").order(6, 2)
    assert Ring("cp", "zigzag").order(3, 1).tolist() == [0, 1, 2]


def test_a_ring_has_a_strategy_that_there_is() -> None:
    with pytest.raises(
        ValueError, match="kind 'zig-zag': use one of zigzag, blockwise, rsa, gather"
    ):
        Ring("cp", "zig-zag")  # type: ignore[arg-type]
