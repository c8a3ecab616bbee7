"""Counts collectives in jaxprs: in a layer, between stages, in loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import lax
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.analysis.count import collectives_of, count, count_compiled, per_layer
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.collectives import as_varying
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
    add_up,
)
from jaxptd.mesh import Axis, Layout, make_mesh

B_T_D = 4 * 8 * 16 * 4  # bytes of a device's x[B/dp, T, D] in float32, with dp=2

RING_STEPS = dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True)


def by_kind(collectives: list[Collective]) -> dict[str, tuple[int, int]]:
    return {c.kind: (c.count, c.bytes) for c in collectives if c.axes == ("tp",)}


@pytest.mark.parametrize("remat", ["none", slow("attention")])
def test_a_layer_makes_four_all_reduces(remat: str) -> None:
    program = tiny.program(Layout(dp=2, tp=4), micro_batches=1, remat=remat)
    assert by_kind(per_layer(program)) == {ALL_REDUCE: (4, 4 * B_T_D)}


@pytest.mark.parametrize(("keeps", "gathers"), [(False, 6), slow(True, 4)])
def test_a_layer_of_sequence_parallelism_makes_four_scatters(keeps: bool, gathers: int) -> None:
    """Also makes four gathers, or six if it does not save the inputs of matmuls."""
    layout = dataclasses.replace(tiny.SEQUENCE_PARALLEL, keep_gathered=keeps)
    wanted = {ALL_GATHER: (gathers, gathers * B_T_D), REDUCE_SCATTER: (4, 4 * B_T_D)}
    assert by_kind(per_layer(tiny.program(layout, micro_batches=1))) == wanted


def test_a_layer_makes_ten_rounds_of_hops_with_collective_matmul() -> None:
    """Two gathers, two scatters and their conjugates; backward also re-gathers both blocks of x."""
    program = tiny.program(RING_STEPS, micro_batches=1)
    assert by_kind(per_layer(program)) == {PERMUTE: (30, 30 * B_T_D // 4)}


@pytest.mark.parametrize(("ring", "hops"), [slow("zigzag", 9), slow("blockwise", 9), ("rsa", 18)])
def test_a_layer_sends_keys_and_values_round_and_their_gradients_home(ring, hops) -> None:
    """No other collective runs over cp: no gather, no full-length sum of gradients."""
    program = tiny.program(Layout(cp=4, ring=ring), micro_batches=1)
    block = 8 * 8 // 4 * 16 * 4  # bytes of a device's k, [B, T/cp, D] in float32
    (found,) = [c for c in per_layer(program) if c.kind != ALL_REDUCE]
    # 3 hops of k and v forward, 3 backward, 3 of dk and dv; RSA sends the two separately
    assert found == Collective(PERMUTE, ("cp",), hops, 9 * 2 * block)


def test_between_stages_moves_what_a_message_holds_and_what_is_no_layer_once() -> None:
    """Scalars of the norm are the only other collectives over pp alone."""
    program = tiny.program(Layout(pp=2, dp=2), num_layers=4, micro_batches=4)
    found = {c.kind: (c.count, c.bytes) for c in count(program) if c.axes == ("pp",)}
    ends = [info for info in program.infos.values() if not info.stack]
    whole = sum(4 * np.prod(info.shape) for info in ends)
    message = 1 * 8 * 16 * 4  # x[B/dp/M, T, D] in float32
    # 1F1B, M + p - 1 times: an activation goes forward while a gradient goes backward.
    assert found.pop(PERMUTE) == (5, 5 * message)
    assert found.pop(ALL_GATHER) == found.pop(REDUCE_SCATTER) == (len(ends), whole)
    assert found == {
        ALL_REDUCE: (2, 8)
    }  # sums of squares: one for the parameters that tp would shard, one for the rest


def test_gradients_are_one_message_in_the_compiled_program() -> None:
    """One runs over dp; sequence parallelism adds one over dp and tp, for norms and biases."""
    found = {
        (c.kind, c.axes): c.count for c in count_compiled(tiny.program(tiny.SEQUENCE_PARALLEL))
    }
    assert found[ALL_REDUCE, ("dp", "tp")] == 1
    assert found[ALL_REDUCE, ("dp",)] == 2  # first the number of targets, in a separate all-reduce


def test_loops_count_as_often_as_they_run_and_size_one_axes_not_at_all() -> None:
    mesh = make_mesh(Layout(dp=2))

    def body(x):
        add = lambda carry, _: (lax.psum(carry, Axis.DP) * x, None)  # noqa: E731
        looped = lax.scan(add, x, None, length=5)[0]
        alone = lax.psum(as_varying(jnp.ones(3), [Axis.TP]), Axis.TP)
        return lax.psum(looped, Axis.DP) + x + alone

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P(Axis.DP), out_specs=P(Axis.DP), check_vma=True
    )
    traced = jax.jit(mapped).trace(jnp.zeros((4, 3)))
    want = [Collective(ALL_REDUCE, ("dp",), 6, 6 * 2 * 3 * 4)]
    assert collectives_of(traced.jaxpr, mesh) == want
    text = traced.lower().compile().as_text()
    assert add_up(collectives_from_hlo(text, dict(mesh.shape))) == want


def test_a_loop_of_unknown_length_is_an_error() -> None:
    mesh = make_mesh(Layout(dp=2))

    def body(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.psum(x, Axis.DP), x)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=True)
    with pytest.raises(ValueError, match="while loop"):
        collectives_of(jax.make_jaxpr(mapped)(jnp.ones(3)), mesh)
