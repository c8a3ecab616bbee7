"""Queries, keys and values: matmuls of one x, and what becomes of their gradients."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.analysis.jaxprs import equations
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.tensor_parallel import PackedWeight, separated
from jaxptd.mesh import Layout, make_mesh

D, N, H = 8, 4, 6


def test_gradients_of_parts_are_concatenated_and_not_transposed() -> None:
    """A transposed stack would cost two kernels per layer in a loop."""
    h = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, N, H)), jnp.float32)
    pieces, back = jax.vjp(lambda h: separated(h, 2), h)
    for number, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, h[:, :, number])
    np.testing.assert_array_equal(back(pieces)[0], h)
    names = [each.primitive.name for each in equations(jax.make_jaxpr(back)(pieces))]
    assert names.count("concatenate") == 1
    assert not {"transpose", "pad", "add_any", "scatter-add"} & {*names}


STEPS = Layout(tp=2, sequence_parallel=True, collective_matmul=True)
AGAIN = Layout(tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("layout", "separate"),
    [(Layout(tp=2), True), (AGAIN, True), (STEPS, False), (Layout(row=2, col=2), False)],
    ids=str,
)
def test_products_of_one_x_are_one_where_blocks_travel(layout: Layout, separate: bool) -> None:
    """Other layouts use separate matmuls: splitting results and joining gradients would copy."""
    tensor_parallel = make_tensor_parallel(layout)
    random = np.random.default_rng(0)
    x_BTD = random.normal(size=(2, 4, D))
    weights = [random.normal(size=(D, N, H)), random.normal(size=(D, 2 * N, H))]
    specs = [tensor_parallel.axes.column_spec(2, 0)] * 2

    def products(x: Array, weights: Sequence[Array]) -> Sequence[Array]:
        return tensor_parallel.column_parallel(x, [PackedWeight(w) for w in weights])

    x_spec = P(None, tensor_parallel.axes.tokens, *tensor_parallel.axes.hidden_spec())
    h_spec = P(None, tensor_parallel.axes.logit_tokens, *tensor_parallel.axes.inner_spec(2, 0))
    on_mesh = jax.shard_map(
        products,
        mesh=make_mesh(layout),
        in_specs=(x_spec, [P(*spec) for spec in specs]),
        out_specs=[h_spec] * 2,
    )
    with jax.enable_x64(True):
        for h, w in zip(jax.jit(on_mesh)(x_BTD, weights), weights, strict=True):
            np.testing.assert_allclose(h, np.einsum("btd,dnh->btnh", x_BTD, w), rtol=1e-12)
        found = [each.primitive.name for each in equations(jax.make_jaxpr(on_mesh)(x_BTD, weights))]
    assert ("split" not in found) == separate
    assert ("concatenate" not in found) == separate
