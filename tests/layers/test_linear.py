"""The bias of the linear layers; their matmuls are rows of the contract's table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxptd.layers.tensor_parallel import add_bias


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_the_gradient_of_a_bias_is_summed_in_its_own_precision(dtype):
    """Sums 2**15 tokens; a bfloat16 sum would reach only a quarter of that."""
    x, b = jnp.zeros((64, 512, 4), dtype), jnp.full(4, 1 / 3, jnp.float32)
    y, vjp = jax.vjp(add_bias, x, b)
    dx, db = jax.jit(vjp)(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, db.dtype) == (dtype, dtype, jnp.float32)
    np.testing.assert_array_equal(db, 2**15)
    assert float(y[0, 0, 0]) == float(jnp.asarray(1 / 3, dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
def test_a_bias_is_added_in_the_precision_of_activations(dtype):
    """Rounds b once and the sum once, like PyTorch's autocast; gradients pass unchanged."""
    rng = np.random.default_rng(0)
    x, b = jnp.asarray(rng.standard_normal((2, 8, 3, 4)), dtype), jnp.asarray(rng.random((3, 4)))
    y, vjp = jax.vjp(add_bias, x, b.astype(jnp.float32))
    np.testing.assert_array_equal(y, x + b.astype(dtype))
    dy = jnp.asarray(rng.standard_normal(x.shape), dtype)
    dx, db = vjp(dy)
    np.testing.assert_array_equal(dx, dy)
    np.testing.assert_allclose(db, np.asarray(dy, np.float64).sum((0, 1)), rtol=1e-5)
