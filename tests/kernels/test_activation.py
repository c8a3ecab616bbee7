"""Activation kernels with bias and gate, interpreted op by op, against the formula."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.collectives import varying_axes
from jaxptd.kernels import activation
from jaxptd.kernels.activation import FUSED, FusedActivation
from jaxptd.layers.mlp import ACTIVATIONS
from jaxptd.mesh import Layout, make_mesh

# Smaller than a tile; several tiles each way, none full; and several tiles per program.
CASES = [
    slow((3, 5, 24), "gelu-tanh", False, True, jnp.float32),
    slow((3, 47, 300), "gelu-tanh", False, True, jnp.float32),
    ((3, 47, 300), "gelu-tanh", False, True, jnp.bfloat16),
    slow((2, 47, 2, 300), "silu", True, False, jnp.bfloat16),
    ((2, 47, 2, 300), "silu", True, True, jnp.float32),
    slow((3, 47, 1300), "relu", False, False, jnp.float32),
]


def plain(h: Array, b: Array | None, name: Any, *, gated: bool) -> Array:
    wide = h.astype(jnp.promote_types(h.dtype, jnp.float32)) + (0 if b is None else b)
    act = ACTIVATIONS[name]
    y = act(wide[..., 0, :]) * wide[..., 1, :] if gated else act(wide)
    return y.astype(h.dtype)


@pytest.mark.parametrize(("shape", "name", "gated", "biased", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_it_is_the_activation_and_its_gradient(
    shape: tuple[int, ...],
    name: Any,
    gated: bool,
    biased: bool,
    dtype: Any,
    interpret: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation, "_PROGRAMS", 5)
    draw = np.random.default_rng(0).standard_normal
    parts = shape[-1 - gated :]
    h, dy = jnp.asarray(3 * draw(shape), dtype), draw((*shape[: -len(parts)], parts[-1]))
    b = jnp.asarray(draw(parts), jnp.float32) if biased else None
    dy = jnp.asarray(dy, dtype)

    def results(of: Any, *arrays: Array | None) -> list[Array]:
        *inputs, dy = arrays
        y, pull = jax.vjp(of, *inputs)
        return jax.tree.leaves((y, pull(dy)))

    formula = partial(plain, name=name, gated=gated)
    found = results(FusedActivation(FUSED[name], gated, interpret), h, b, dy)
    other = results(formula, h, b, dy)
    with jax.enable_x64(True):
        exact = results(formula, *(x if x is None else x.astype(jnp.float64) for x in (h, b, dy)))
    assert [(a.shape, a.dtype) for a in found] == [(a.shape, a.dtype) for a in other]
    for a, c, want in zip(found, other, exact, strict=True):
        off, own = (np.abs(np.asarray(x, np.float64) - np.asarray(want)).max() for x in (a, c))
        # The error may exceed that of the formula in this precision, which loses ten roundings in
        # 1 - s for a sigmoid s near 1, by this much: exponents up to ten are rounded, a GPU's power
        # and root have two bits less, and sums over rows run in another order.
        rounding = float(jnp.finfo(dtype).eps) * np.abs(want).max()
        assert off <= own + (8 if interpret else 32) * rounding


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_large_numbers_do_not_overflow(name: Any, interpret: bool) -> None:
    """Powers of these numbers overflow or underflow."""
    x = jnp.array([-1e12, -200.0, -90.0, 90.0, 1e12])
    y, pull = jax.vjp(lambda x: FusedActivation(FUSED[name], False, interpret)(x, None), x)
    np.testing.assert_array_equal(y, jnp.maximum(x, 0))
    np.testing.assert_array_equal(pull(jnp.ones(5))[0], x > 0)


def test_gradients_of_biases_are_sums_over_devices_in_their_type() -> None:
    """Traces only, as JAX's kernel interpreter has no types; h varies over dp and tp, b over tp."""
    mesh = make_mesh(Layout(dp=2, tp=2))
    fused = FusedActivation(FUSED["gelu-tanh"], gated=False)

    def both_ways(h: Array, b: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(fused, h, b)
        found = pull(y)
        assert [varying_axes(a) for a in (y, *found)] == [{"dp", "tp"}, {"dp", "tp"}, {"tp"}]
        return found

    specs = P("dp", None, "tp"), P("tp")
    on_mesh = jax.shard_map(both_ways, mesh=mesh, in_specs=specs, out_specs=specs)
    assert "psum" in str(jax.make_jaxpr(on_mesh)(jnp.ones((4, 8, 24)), jnp.ones(24)))
