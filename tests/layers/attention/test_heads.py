"""Queries, keys and values of a joined product."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxptd.analysis.jaxprs import equations
from jaxptd.layers.attention.heads import separated


def test_gradients_of_queries_keys_and_values_are_concatenated_and_not_transposed() -> None:
    """A stack of them, transposed, was two kernels of a layer in a loop."""
    h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 4, 6)), jnp.float32)
    pieces, back = jax.vjp(separated, h)
    for number, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, h[:, :, number])
    np.testing.assert_array_equal(back(pieces)[0], h)
    names = [each.primitive.name for each in equations(jax.make_jaxpr(back)(pieces))]
    assert names.count("concatenate") == 1
    assert not {"transpose", "pad", "add_any", "scatter-add"} & {*names}
