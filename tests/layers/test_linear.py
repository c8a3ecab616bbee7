"""The bias of the linear layers; their products are rows of the contract's table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxptd.layers.linear import add_bias


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_the_gradient_of_a_bias_is_summed_in_its_own_precision(dtype):
    """Sums 2**15 tokens: in bfloat16 the sum would be a quarter of the right one."""
    x, b = jnp.zeros((64, 512, 4), dtype), jnp.full(4, 1 / 3, jnp.float32)
    y, vjp = jax.vjp(add_bias, x, b)
    dx, db = jax.jit(vjp)(jnp.ones_like(y))
    assert (y.dtype, dx.dtype, db.dtype) == (dtype, dtype, jnp.float32)
    np.testing.assert_array_equal(db, 2**15)
    assert float(y[0, 0, 0]) == float(jnp.asarray(1 / 3, dtype))
