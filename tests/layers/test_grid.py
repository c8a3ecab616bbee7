"""Generation on a grid against dense matmuls, tables and heads."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxptd.layers.for_layout import for_decoding
from jaxptd.layers.grid import DecodeGrid2D
from jaxptd.layers.megatron import TensorParallel1D
from jaxptd.layers.tensor_parallel import PackedWeight, block_along
from jaxptd.mesh import Axis, Layout, make_mesh

B, T, D, F, N, H, V = 2, 3, 8, 16, 8, 5, 24  # all sharded dims divide; tokens do not
X, TURNED = P(None, None, Axis.COL), P(None, None, Axis.ROW)
LAYOUTS = [
    Layout(row=2, col=2),
    Layout(row=2, col=4, attention2d="blocks"),
    Layout(row=4, col=2, matmul2d="summa"),
    Layout(row=1, col=4),
    Layout(row=4, col=1),
]


def form_of(layout: Layout) -> DecodeGrid2D:
    tensor_parallel = for_decoding(layout)
    assert isinstance(tensor_parallel, DecodeGrid2D)
    return tensor_parallel


def on_mesh(layout: Layout, body: Callable, ins: Any, outs: Any) -> Callable:
    mapped = jax.shard_map(
        body, mesh=make_mesh(layout), in_specs=ins, out_specs=outs, check_vma=True
    )
    return jax.jit(mapped)


def array(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_products_are_the_dense_ones_and_results_lie_as_operands_do(layout: Layout) -> None:
    tensor_parallel = form_of(layout)
    x_BTD, w_DcN, h_BTNF, w_NFD = array(B, T, D), array(D, 3, N), array(B, T, N, F), array(N, F, D)
    shard_dims = [0, 1]  # dim of `in` that is sharded

    def body(x, w, *hw):
        return *tensor_parallel.column_parallel(x, [PackedWeight(w)]), *(
            tensor_parallel.row_parallel(h, w, dim)
            for dim, h, w in zip(shard_dims, hw[::2], hw[1::2], strict=True)
        )

    ins = [X, P(*tensor_parallel.axes.column_spec(2, 1))]
    for dim in shard_dims:
        ins += [
            P(None, None, *tensor_parallel.axes.inner_spec(2, dim)),
            P(*tensor_parallel.axes.row_spec(2, dim)),
        ]
    outs = (P(None, None, *tensor_parallel.axes.inner_spec(2, 1)), X, X)
    with jax.enable_x64(True):
        found = on_mesh(layout, body, tuple(ins), outs)(x_BTD, w_DcN, *(h_BTNF, w_NFD) * 2)
    want = np.einsum("BTNF,NFD->BTD", h_BTNF, w_NFD)
    np.testing.assert_allclose(found[0], np.einsum("BTD,DcN->BTcN", x_BTD, w_DcN), rtol=1e-12)
    np.testing.assert_allclose(found[1], want, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(found[2], want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rows_of_both_tables(layout: Layout) -> None:
    tensor_parallel = form_of(layout)
    tokens = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)
    positions = np.array([5, 0, 7], np.int32)
    table, token_info = array(V, D).astype(np.float32), array(8, D).astype(np.float32)

    def body(tokens, table, positions, token_info):
        return (
            tensor_parallel.lookup(tokens, table, np.float32),
            tensor_parallel.positions(positions, token_info, np.float32),
        )

    ins = (
        P(),
        P(*tensor_parallel.axes.table_spec()),
        P(),
        P(*tensor_parallel.axes.position_spec()),
    )
    found = on_mesh(layout, body, ins, (X, P(None, Axis.COL)))(tokens, table, positions, token_info)
    np.testing.assert_array_equal(found[0], table[tokens])
    np.testing.assert_array_equal(found[1], token_info[positions])


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[1]], ids=str)
def test_heads_are_whole_for_attention_and_cut_again_after_it(layout: Layout) -> None:
    """Joins H without its padding where devices hold slices of heads; else heads stay sharded."""
    tensor_parallel = form_of(layout)
    blocks = layout.attention2d == "blocks"
    padded = tensor_parallel.padded(H) if blocks else H
    h_BTNH = np.zeros((B, T, N, padded), np.float32)
    h_BTNH[..., :H] = array(B, T, N, H)
    spec = P(None, None, *tensor_parallel.axes.inner_spec(2, tensor_parallel.axes.head_dim))

    def body(h):
        whole = tensor_parallel.join_heads(h, H)
        assert whole.shape == (B, T, N if blocks else N // layout.col, H)
        return tensor_parallel.split_heads(whole)

    np.testing.assert_array_equal(on_mesh(layout, body, spec, spec)(h_BTNH), h_BTNH)


def test_tokens_are_cut_nowhere() -> None:
    tensor_parallel = form_of(LAYOUTS[0])
    positions = np.arange(3)
    assert tensor_parallel.axes.tokens == tensor_parallel.axes.logit_tokens == ()
    assert block_along(positions, tensor_parallel.axes.tokens, 0) is positions
    for steps in (False, True):
        tensor_parallel = for_decoding(
            Layout(tp=4, sequence_parallel=True, collective_matmul=steps)
        )
        assert type(tensor_parallel) is TensorParallel1D
        assert tensor_parallel.axes.tokens == ()
