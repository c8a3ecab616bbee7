"""Every layer on every layout against the same layer on one device."""

import jax
import numpy as np
import pytest
from contract import Case, hold, residual_spec
from jax.sharding import PartitionSpec as P

from jaxptd.config import ModelConfig
from jaxptd.layers.attention import SelfAttention
from jaxptd.layers.block import Block
from jaxptd.layers.dropout import Places
from jaxptd.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.layers.loss import vocab_parallel_cross_entropy
from jaxptd.layers.mlp import MLP
from jaxptd.layers.norm import LayerNorm
from jaxptd.mesh import Axis, Layout
from jaxptd.params import normal
from jaxptd.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

B, T, D, F, N, H, V = 4, 8, 16, 24, 4, 4, 13
MODEL = ModelConfig(
    num_layers=1, hidden_size=D, num_heads=N, ffn_hidden_size=F, seq_length=T, vocab_size=V
)
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, tp=2),
    Layout(dp=2, cp=4, ring="blockwise"),
    Layout(cp=2, tp=4, sequence_parallel=True, ring="blockwise"),
    Layout(dp=2, tp=4, sequence_parallel=True),
]


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TOKENS = np.random.default_rng(3).integers(0, V, (B, T)).astype(np.int32)
TOKEN_SPEC = P(Axis.DP, Axis.CP)
SAMPLES = np.arange(B, dtype=np.int32)
POSITIONS = np.arange(T, dtype=np.int32)
SEED = np.array([5, 6], np.uint32)


def ends(forward_and_backward: int):
    """So many all-reduces, or under sequence parallelism as many gathers and scatters."""

    def moves(layout: Layout) -> dict[str, int]:
        if layout.sequence_parallel:
            return {ALL_GATHER: forward_and_backward, REDUCE_SCATTER: forward_and_backward}
        return {ALL_REDUCE: forward_and_backward}

    return moves


def with_owed(moves, params: int):
    """And under sequence parallelism a sum for each whole parameter; `Program` puts them off."""

    def both(layout: Layout) -> dict[str, int]:
        owed = {ALL_REDUCE: params} if layout.sequence_parallel else {}
        return {**moves(layout), **owed}

    return both


def run_attention(layer, x, samples, positions, seed):
    return layer(x, Places(samples, positions, seed), None)[0]


def run_block(layer, x, samples, positions, seed):
    return layer(x, Places(samples, positions, seed), 0, None)[0]


def place_specs(form):
    return residual_spec(form), P(Axis.DP), P(Axis.CP), P()


def dropping(rate: float) -> ModelConfig:
    return ModelConfig(**{**vars(MODEL), "dropout": rate})


CASES = [
    Case(
        "column",
        lambda form, rngs: ColumnParallelLinear(D, (F,), form=form, rngs=rngs),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        lambda form: P(Axis.DP, Axis.CP, Axis.TP),
        lambda layout: (
            {ALL_GATHER: 1, REDUCE_SCATTER: 1} if layout.sequence_parallel else {ALL_REDUCE: 1}
        ),
    ),
    Case(
        "column, gathered, no bias",
        lambda form, rngs: ColumnParallelLinear(
            D, (3, N, H), cut=1, form=form, rngs=rngs, bias=False, gather_output=True
        ),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        lambda form: P(Axis.DP, Axis.CP),
        lambda layout: (
            {ALL_GATHER: 2, REDUCE_SCATTER: 1}
            if layout.sequence_parallel
            else {ALL_REDUCE: 1, ALL_GATHER: 1}
        ),
    ),
    Case(
        "row",
        lambda form, rngs: RowParallelLinear((F,), D, form=form, rngs=rngs),
        (array(B, T, F),),
        lambda form: (P(Axis.DP, Axis.CP, Axis.TP),),
        residual_spec,
        lambda layout: (
            {REDUCE_SCATTER: 1, ALL_GATHER: 1, ALL_REDUCE: 1}
            if layout.sequence_parallel
            else {ALL_REDUCE: 1}
        ),
    ),
    Case(
        "row, whole input, no bias",
        lambda form, rngs: RowParallelLinear(
            (N, H), D, form=form, rngs=rngs, bias=False, input_is_parallel=False
        ),
        (array(B, T, N, H),),
        lambda form: (P(Axis.DP, Axis.CP),),
        residual_spec,
        lambda layout: (
            {REDUCE_SCATTER: 1, ALL_GATHER: 2}
            if layout.sequence_parallel
            else {ALL_REDUCE: 1, ALL_GATHER: 1}
        ),
    ),
    Case(
        "norm",
        lambda form, rngs: LayerNorm(D, form=form, rngs=rngs),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        residual_spec,
        with_owed(lambda layout: {}, 2),
    ),
    Case(
        "mlp",
        lambda form, rngs: MLP(D, F, form=form, rngs=rngs, init_out=normal(0.02)),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        residual_spec,
        with_owed(ends(2), 1),
    ),
    *(
        Case(
            f"attention, dropout {rate}",
            lambda form, rngs, rate=rate: SelfAttention(
                dropping(rate), form=form, rngs=rngs, init_out=normal(0.02)
            ),
            (array(B, T, D), SAMPLES, POSITIONS, SEED),
            place_specs,
            residual_spec,
            with_owed(ends(2), 1),
            run_attention,
        )
        for rate in (0.0, 0.3)
    ),
    *(
        Case(
            f"block, dropout {rate}",
            lambda form, rngs, rate=rate: Block(dropping(rate), form=form, rngs=rngs),
            (array(B, T, D), SAMPLES, POSITIONS, SEED),
            place_specs,
            residual_spec,
            with_owed(ends(4), 6),
            run_block,
        )
        for rate in (0.0, 0.3)
    ),
    Case(
        "embedding",
        lambda form, rngs: VocabParallelEmbedding(V, D, form=form, rngs=rngs),
        (TOKENS,),
        lambda form: (TOKEN_SPEC,),
        residual_spec,
        lambda layout: (
            {REDUCE_SCATTER: 1, ALL_GATHER: 1} if layout.sequence_parallel else {ALL_REDUCE: 1}
        ),
        lambda layer, tokens: layer(tokens, layer.table.dtype),
    ),
    Case(
        "positions",
        lambda form, rngs: PositionEmbedding(T, D, form=form, rngs=rngs),
        (array(B, T, D), POSITIONS),
        lambda form: (residual_spec(form), P(Axis.CP)),
        residual_spec,
        with_owed(lambda layout: {}, 1),
        lambda layer, x, positions: x * layer(positions, x.dtype),
    ),
    Case(
        "output layer and loss",
        lambda form, rngs: VocabParallelEmbedding(V, D, form=form, rngs=rngs),
        (array(B, T, D), TOKENS),
        lambda form: (residual_spec(form), TOKEN_SPEC),
        lambda form: TOKEN_SPEC,
        lambda layout: (
            {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1}
            if layout.sequence_parallel
            else {ALL_REDUCE: 3}
        ),
        lambda layer, x, targets: vocab_parallel_cross_entropy(
            layer.logits(x), targets, layer.form, V
        ),
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_is_the_layer_on_one_device(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_is_the_layer_on_one_device_in_float32(case: Case) -> None:
    hold(case, LAYOUTS[-1], dtype="float32")
