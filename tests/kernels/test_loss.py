"""The loss kernels, interpreted op by op, against the formula."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.collectives import varying_axes
from jaxptd.kernels.loss import FusedLoss
from jaxptd.mesh import Layout, make_mesh

# Columns for less than one piece; for several iterations, the last not full; without and with
# padding, including a last iteration of nothing but padding, and columns that are all padding.
CASES = [
    slow((7, 40), 40, jnp.float32),
    slow((7, 5000), 5000, jnp.float32),
    ((7, 5000), 4900, jnp.bfloat16),
    ((7, 5000), 4096, jnp.float32),
    ((7, 5000), 2049, jnp.float32),
    slow((7, 2048), 2048, jnp.bfloat16),
]
EITHER = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])


def logits(shape: tuple[int, int], dtype: Any = jnp.float32) -> Array:
    drawn = 20 * np.random.default_rng(0).standard_normal(shape)
    return jnp.asarray(drawn, dtype)


def without_padding(x_RV: Array, stop: int) -> Array:
    wide = x_RV.astype(jnp.float32)
    return jnp.where(jnp.arange(x_RV.shape[1]) < stop, wide, -jnp.inf)


@EITHER
@pytest.mark.parametrize(("shape", "stop", "dtype"), CASES, ids=str)
def test_it_is_the_loss_and_its_gradient(
    shape: tuple[int, int], stop: int, dtype: Any, interpret: bool
) -> None:
    kernels, x_RV, end = FusedLoss(interpret), logits(shape, dtype), jnp.int32(stop)
    wide_RV = without_padding(x_RV, stop)
    maximum_R, sum_R = kernels.max_and_sum(x_RV, end)
    np.testing.assert_array_equal(maximum_R, wide_RV.max(1))
    want_R = np.exp(np.asarray(wide_RV, np.float64) - np.asarray(maximum_R)[:, None]).sum(1)
    # The logarithm is added to the maximum; allow for the rounding of that sum.
    off = float(jnp.finfo(jnp.float32).eps) * (8 + float(jnp.abs(maximum_R).max()))
    np.testing.assert_allclose(np.log(sum_R), np.log(want_R), rtol=0, atol=off)
    # Targets inside: the first and last columns. Outside: padding, another device's, none.
    targets_R = jnp.array([0, stop - 1, 3, stop, -1, 1, shape[1] + 1])
    rows = np.arange(1.0, 8.0, dtype=np.float32)
    d_sum_R, d_target_R = jnp.asarray(rows / 3), jnp.asarray(rows)
    logsumexp_R = jax.nn.logsumexp(wide_RV, 1)
    grad = kernels.gradient(
        x_RV,
        end,
        targets_R=targets_R,
        logsumexp_R=logsumexp_R,
        d_sum_R=d_sum_R,
        d_target_R=d_target_R,
    )
    hit = jnp.arange(shape[1]) == jnp.where(targets_R < stop, targets_R, -1)[:, None]
    want = jnp.exp(wide_RV - logsumexp_R[:, None]) * d_sum_R[:, None] - hit * d_target_R[:, None]
    assert grad.dtype == dtype
    rounding = float(jnp.finfo(dtype).eps)
    # Exponents up to 100 lose two digits.
    atol = max(4 * rounding, 100 * float(jnp.finfo(jnp.float32).eps)) * 7
    np.testing.assert_allclose(grad.astype(jnp.float32), want, rtol=0, atol=atol)


@EITHER
def test_a_device_may_have_padding_only(interpret: bool) -> None:
    x_RV = logits((3, 5000))
    for stop in (0, -9):
        maximum_R, sum_R = FusedLoss(interpret).max_and_sum(x_RV, jnp.int32(stop))
        assert float(maximum_R.max()) < -1e38
        np.testing.assert_array_equal(sum_R, 0)


def test_results_vary_as_their_inputs_do() -> None:
    """Traces only, as JAX's kernel interpreter has no types; logits vary over dp, stop over tp."""
    mesh = make_mesh(Layout(dp=2, tp=2))

    def both_ways(x_RV: Array, row_R: Array) -> Array:
        stop = jnp.int32(5) - jax.lax.axis_index("tp")
        for each in FusedLoss().max_and_sum(x_RV, stop):
            assert varying_axes(each) == {"dp", "tp"}
        rows = dict.fromkeys(("logsumexp_R", "d_sum_R", "d_target_R"), row_R)
        grad = FusedLoss().gradient(x_RV, stop, targets_R=row_R.astype(int), **rows)
        assert varying_axes(grad) == {"dp", "tp"}
        return grad

    on_mesh = jax.shard_map(
        both_ways, mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp", "tp")
    )
    assert jax.make_jaxpr(on_mesh)(jnp.ones((4, 8)), jnp.ones(4)).out_avals[0].shape == (4, 16)
