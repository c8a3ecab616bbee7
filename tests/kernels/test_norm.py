"""Norms in one kernel per direction, interpreted op by op, against the formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.collectives import varying_axes
from jaxptd.kernels import norm as fused
from jaxptd.kernels.norm import FusedNorm
from jaxptd.mesh import Layout, make_mesh

EPS = 1e-5
# Rows for less than one tile; for several tiles, with sizes that are not powers of two; for
# several programs, each with several tiles, the last tile not full.
CASES = [
    slow((3, 5, 24), True, True, jnp.float32),
    slow((2, 7, 1600), False, True, jnp.float32),
    slow((1, 1, 8), True, False, jnp.float32),
    slow((2, 7, 1600), True, False, jnp.bfloat16),
    slow((3, 47, 768), True, True, jnp.float32),
    ((3, 47, 768), True, False, jnp.float32),
    slow((3, 47, 768), False, False, jnp.float32),
    ((3, 47, 768), False, True, jnp.bfloat16),
]


def plain(x: Array, w: Array, b: Array | None, *, centred: bool) -> Array:
    wide = x.astype(jnp.float32)
    wide -= wide.mean(-1, keepdims=True) if centred else 0
    y = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + EPS) * w
    return (y if b is None else y + b).astype(x.dtype)


def drawn(shape: tuple[int, ...], dtype: Any, *, centred: bool) -> tuple[list, list]:
    """x, w and b; the gradients of x as passed along the residual stream, and of y."""
    draw = np.random.default_rng(0).standard_normal
    w, b = 1 + 0.1 * draw(shape[-1]), draw(shape[-1]) if centred else None
    found = [[2 * draw(shape) + 1, w, b], [draw(shape), draw(shape)]]
    kinds = [[dtype, jnp.float32, jnp.float32], [dtype, dtype]]
    x, grads = (
        [None if a is None else jnp.asarray(a, kind) for a, kind in zip(*each, strict=True)]
        for each in zip(found, kinds, strict=True)
    )
    return x, grads


@pytest.mark.parametrize(("shape", "centred", "beside", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_it_is_the_norm_and_its_gradient(
    shape: tuple[int, ...],
    centred: bool,
    beside: bool,
    dtype: Any,
    interpret: bool,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(fused, "_THREADS", 10)
    (x, w, b), grads = drawn(shape, dtype, centred=centred)
    norm = FusedNorm(EPS, centred, beside, interpret)
    grads = grads if beside else grads[1:]

    def formula(x: Array, w: Array, b: Array | None) -> tuple[Array, ...]:
        return (x,) * beside + (plain(x, w, b, centred=centred),)

    found, want = (
        jax.tree.leaves((results, pull(tuple(grads))))
        for results, pull in (jax.vjp(each, x, w, b) for each in (norm, formula))
    )
    assert [a.shape for a in found] == [a.shape for a in want]
    assert [a.dtype for a in found] == [a.dtype for a in want]
    rounding = float(jnp.finfo(dtype).eps)
    for a, c in zip(found, want, strict=True):
        wide = np.asarray(c, np.float64)
        # Sums over all rows run in another order; in bfloat16 they add gradients rounded once.
        np.testing.assert_allclose(a, wide, rtol=0, atol=4 * rounding * np.abs(wide).max())


def test_rows_that_a_program_cannot_hold_are_a_limit_of_models() -> None:
    assert fused.LONGEST == 8192  # with more, ptxas spills an H200's registers


def test_gradients_of_weights_are_sums_over_devices_in_their_type() -> None:
    """Traces only, as JAX's kernel interpreter has no types; x varies over dp and tp, not w."""
    mesh, norm = make_mesh(Layout(dp=2, tp=2)), FusedNorm(EPS, True, beside=True)

    def both_ways(x: Array, w: Array, b: Array) -> tuple[Array, ...]:
        results, pull = jax.vjp(norm, x, w, b)
        found = pull(results)
        assert [varying_axes(a) for a in results] == [{"dp", "tp"}] * 2
        assert [varying_axes(a) for a in found] == [{"dp", "tp"}, set(), set()]
        return found

    tokens = P("dp", "tp")
    on_mesh = jax.shard_map(
        both_ways, mesh=mesh, in_specs=(tokens, P(), P()), out_specs=(tokens, P(), P())
    )
    x, w = jnp.ones((4, 8, 24)), jnp.ones(24)
    assert str(jax.make_jaxpr(on_mesh)(x, w, w)).count("psum") >= 2
