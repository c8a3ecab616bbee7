"""Dead equations of a traced program are removed; its results stay the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.pipeline.split_backward import run_without_dead_code


def test_an_unused_psum_is_not_run() -> None:
    """`jax.vjp` includes the forward pass even if its result is unused."""
    mesh, spec = make_mesh(Layout(tp=2)), P(Axis.TP)

    def back(w: Array, dy: Array) -> Array:
        return jax.vjp(lambda w: lax.psum(jnp.sin(w) * 2, Axis.TP), w)[1](dy)[0]

    def traced(body: Callable) -> Any:
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
        return jax.make_jaxpr(mapped)(w, dy), mapped(w, dy)

    w, dy = jnp.arange(6.0), jnp.arange(3.0)
    (plain, want), (shorter, found) = traced(back), traced(partial(run_without_dead_code, back))
    assert [str(program).count("psum") > 0 for program in (plain, shorter)] == [True, False]
    np.testing.assert_array_equal(found, want)


def test_the_results_are_those_of_the_program() -> None:
    def program(x: dict, y: Array) -> dict:
        jnp.exp(x["a"])
        return {"sum": x["a"] + y, "same": y, "number": 2.0 * jnp.ones(3)}

    x, y = {"a": jnp.arange(3.0)}, jnp.ones(3)
    found, want = run_without_dead_code(program, x, y), program(x, y)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    names = [
        eqn.primitive.name
        for eqn in jax.make_jaxpr(partial(run_without_dead_code, program))(x, y).eqns
    ]
    assert "exp" not in names
