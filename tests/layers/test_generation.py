"""Attention token by token, with cached keys and values, equals attention to whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import Case, run, starting_params
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from moves import B, D, H, N, T
from turns import slow

from jaxptd.layers.attention import Cache, SelfAttention, Source
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.for_layout import for_decoding, make_tensor_parallel
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.params import Blueprint, normal
from jaxptd.parts.attention import AttentionShape
from tests.layers.cases import CASES
from tests.layers.inputs import MODEL, array

(CROSS,) = (case for case in CASES if case.name == "cross-attention, dropout 0.0")
LAYOUTS = [
    slow(Layout(tp=2)),
    slow(Layout(row=2, col=2)),
    Layout(row=2, col=2, attention2d="blocks"),
]


def token_by_token(case: Case, layout: Layout) -> np.ndarray:
    """The layer's output, with its source encoded before the first token."""
    tensor_parallel = for_decoding(layout)
    blueprint = Blueprint(lambda key: case.make(tensor_parallel, nnx.Rngs(key)))
    x, samples, positions, _, source, segments = case.inputs

    def body(params: dict, x: Array, source: Array) -> Array:
        layer = blueprint.build(params)
        encoded = layer.encode(Source(source, jnp.asarray(segments)[:, None]))
        each = [
            layer(x[:, t : t + 1], TokenInfo(samples, positions[t : t + 1], None), encoded)
            for t in range(T)
        ]
        return jnp.concatenate(each, 1)

    spec = P(None, None, *tensor_parallel.axes.hidden_spec())
    ins = (blueprint.specs, spec, spec)
    mapped = jax.shard_map(body, mesh=make_mesh(layout), in_specs=ins, out_specs=spec)
    params = starting_params(case, layout, "float64")
    return np.asarray(jax.jit(mapped)(params, x.astype("float64"), source.astype("float64")))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_source_is_encoded_once(layout: Layout) -> None:
    with jax.enable_x64(True):
        want = run(CROSS, Layout(), "float64").output
        np.testing.assert_allclose(token_by_token(CROSS, layout), want, rtol=1e-11, atol=1e-13)


def test_a_bias_is_of_the_distance_to_cached_keys() -> None:
    tensor_parallel = make_tensor_parallel(Layout())
    x, bias = array(B, T, D), array(N, 2 * T - 1)
    samples, positions = np.arange(B), np.arange(T, dtype=np.int32)
    empty = jnp.zeros((B, T, N, H))

    def both(x: Array) -> tuple[Array, Array]:
        layer = SelfAttention(
            AttentionShape.of(MODEL),
            MODEL,
            tensor_parallel=tensor_parallel,
            rngs=nnx.Rngs(0),
            init_out=normal(0.02),
        )
        whole, _ = layer(x, TokenInfo(samples, positions, None), None, bias_NR=bias)
        cache, each = Cache(empty, empty, jnp.int32(0)), []
        for first, end in ((0, 3), (3, 4), (4, T)):
            token_info = TokenInfo(samples, positions[first:end], None)
            o, cache = layer(x[:, first:end], token_info, cache, bias_NR=bias)
            each.append(o)
        return whole, jnp.concatenate(each, 1)

    mesh, spec = make_mesh(Layout()), P(None, Axis.CP)
    whole, each = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=spec))(x)
    np.testing.assert_allclose(each, whole, rtol=1e-5, atol=1e-6)
