"""A norm's statistics in one pass over values far from zero or from each other."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxptd.config import ModelConfig
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.norm import Norm
from jaxptd.mesh import Layout

SIZE, ROUNDING = 768, 2.0**-24
DRAWN = np.random.default_rng(0).standard_normal((4, 8, SIZE))


def unit(number: int) -> np.ndarray:
    return np.arange(SIZE) == number % SIZE


def moments(x_BTD: np.ndarray) -> list[np.ndarray]:
    """Mean and variance in float32, as a norm on one device computes them."""
    options, tensor_parallel = ModelConfig().block, make_tensor_parallel(Layout())
    norm = Norm(SIZE, options=options, tensor_parallel=tensor_parallel, rngs=nnx.Rngs(0))
    both = norm.over.mean_and_variance(jnp.asarray(x_BTD), jnp.float32)
    return [np.asarray(m) for m in both]


@pytest.mark.parametrize(
    ("x_BTD", "roundings"),
    [
        (DRAWN, 16),
        (DRAWN + 1e3, 16),
        (DRAWN + 1e3 * unit(-1), 16),
        (DRAWN + 1e3 * unit(0), 16),
        (DRAWN + 1e3 * (unit(0) | unit(-1)), 8 * SIZE),
    ],
    ids=["around 0", "far from 0", "last beyond", "first beyond", "both beyond"],
)
def test_variances_lose_few_digits(x_BTD: np.ndarray, roundings: int) -> None:
    """Inputs are rounded to float32 first, so that rounding does not count."""
    x_BTD = x_BTD.astype(np.float32).astype(np.float64)
    mean_BT1, variance_BT1 = moments(x_BTD)
    largest = np.abs(x_BTD).max()
    np.testing.assert_allclose(
        mean_BT1, x_BTD.mean(-1, keepdims=True), rtol=0, atol=8 * ROUNDING * largest
    )
    want = x_BTD.var(-1, keepdims=True)
    np.testing.assert_allclose(variance_BT1, want, rtol=roundings * ROUNDING)


def test_equal_numbers_have_no_variance() -> None:
    mean_BT1, variance_BT1 = moments(np.full((1, 1, SIZE), 12345.678))
    assert abs(variance_BT1.item()) < (2 * ROUNDING * 12345.678) ** 2  # the mean's rounding
    assert mean_BT1.item() == pytest.approx(12345.678, rel=2 * ROUNDING)
