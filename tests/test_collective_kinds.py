"""Which collectives each function of `collectives` compiles to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxptd import collectives
from jaxptd.analysis.count import collectives_of
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, BROADCAST, PERMUTE, REDUCE_SCATTER
from jaxptd.mesh import Axis
from tests.test_collectives import (
    CUT,
    MESH,
    SEQUENCE,
    WHOLE,
    X,
    array,
    backward,
    copy,
    on_mesh,
    reduce,
)


def kinds_on(platform: str, fn: Callable, stages: int = 1) -> list[str]:
    """Kinds of collectives in the trace of `fn` for two, possibly absent, devices along tp."""
    sizes = {Axis.PP: stages, Axis.TP: 2}
    mesh = AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * 2,
        abstract_device=AbstractDevice("any", None, platform),
    )
    spec = P((Axis.PP, Axis.TP))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    return [c.kind for c in collectives_of(jax.make_jaxpr(mapped)(array(4)), mesh)]


def test_broadcasts_are_native_on_gpus_where_all_groups_share_the_source() -> None:
    def kinds(platform: str, source: Callable) -> list[str]:
        return kinds_on(platform, lambda x: collectives.broadcast(x, Axis.TP, source()))

    assert kinds("gpu", lambda: 1) == [BROADCAST]
    assert kinds("gpu", lambda: jax.lax.axis_index(Axis.PP)) == [ALL_REDUCE]
    assert kinds("cpu", lambda: 1) == [ALL_REDUCE]


@pytest.mark.parametrize(
    ("platform", "stages", "kind"),
    [("gpu", 2, PERMUTE), ("cpu", 1, PERMUTE), ("cpu", 2, ALL_GATHER)],
)
def test_permutes_are_native_but_in_a_pipeline_on_cpus(platform, stages, kind) -> None:
    assert kinds_on(platform, lambda x: collectives.shift(x, Axis.TP), stages) == [kind]


MOVES = [
    pytest.param(copy, WHOLE, CUT, [], [ALL_REDUCE], id="copy_to"),
    pytest.param(reduce, CUT, WHOLE, [ALL_REDUCE], [], id="reduce_from"),
    pytest.param(
        lambda x: collectives.scatter_to(x, Axis.TP), WHOLE, CUT, [], [ALL_GATHER], id="scatter_to"
    ),
    pytest.param(
        lambda x: collectives.gather_from(x, Axis.TP), CUT, WHOLE, [ALL_GATHER], [], id="gather"
    ),
    pytest.param(
        lambda x: collectives.all_gather(x, Axis.TP),
        SEQUENCE,
        CUT,
        [ALL_GATHER],
        [REDUCE_SCATTER],
        id="all_gather",
    ),
    pytest.param(
        lambda x: collectives.reduce_scatter(x, Axis.TP),
        CUT,
        SEQUENCE,
        [REDUCE_SCATTER],
        [ALL_GATHER],
        id="reduce_scatter",
    ),
    pytest.param(
        lambda x: collectives.shift(x, Axis.TP), CUT, CUT, [PERMUTE], [PERMUTE], id="shift"
    ),
    pytest.param(
        lambda x: collectives.broadcast(x, Axis.TP, 1),
        CUT,
        CUT,
        [ALL_REDUCE],
        [ALL_REDUCE],
        id="broadcast",
    ),
    pytest.param(
        lambda x: collectives.reduce_to(x, Axis.TP, 1),
        CUT,
        CUT,
        [ALL_REDUCE],
        [ALL_REDUCE],
        id="reduce_to",
    ),
]


@pytest.mark.parametrize(("fn", "spec_x", "spec_y", "forward", "back"), MOVES)
def test_what_moves_is_what_the_table_says(fn, spec_x, spec_y, forward, back) -> None:
    """Traced collectives, forward and backward, match the table in the module's docstring."""
    trace = on_mesh(fn, spec_x, spec_y).trace(X)
    assert [c.kind for c in collectives_of(trace.jaxpr, MESH)] == forward
    dy = jnp.zeros(jax.eval_shape(on_mesh(fn, spec_x, spec_y), X).shape)
    only_back = on_mesh(lambda x, dy: jax.linear_transpose(fn, x)(dy)[0], (spec_x, spec_y), spec_x)
    if fn is not MOVES[2].values[0]:  # a custom_vjp has no linear transpose
        assert [c.kind for c in collectives_of(only_back.trace(X, dy).jaxpr, MESH)] == back
    else:
        trace = on_mesh(backward(fn), (spec_x, spec_y), spec_x).trace(X, dy)
        assert [c.kind for c in collectives_of(trace.jaxpr, MESH)] == back
