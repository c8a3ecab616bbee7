"""Every layer on every layout against the same layer on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import Case, between_spec, hold, residual_spec, token_spec
from jax.sharding import PartitionSpec as P
from moves import (
    ATTENTION_MOVES,
    GATED_MOVES,
    GROUPS_MOVES,
    MLP_MOVES,
    NORM,
    RMS_NORM,
    B,
    D,
    F,
    H,
    K,
    N,
    T,
    V,
    both,
    ends,
    groups,
    message,
    moves,
    nothing,
    position_rows,
    product,
)
from turns import by_turns, slow

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from jaxptd.config import ModelConfig
from jaxptd.layers.attention import SelfAttention
from jaxptd.layers.block import Block
from jaxptd.layers.dropout import Places
from jaxptd.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.layers.loss import vocab_parallel_cross_entropy
from jaxptd.layers.mlp import MLP
from jaxptd.layers.norm import Norm
from jaxptd.mesh import Axis, Layout
from jaxptd.params import normal

MODEL = ModelConfig(
    num_layers=1, hidden_size=D, num_heads=N, ffn_hidden_size=F, seq_length=T, vocab_size=V
)
GPT = MODEL.block
QWEN = dataclasses.replace(MODEL, family="qwen3", num_kv_heads=K, linear_bias="qkv")
LAYOUTS = [
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, tp=2),
    Layout(dp=2, cp=4, ring="blockwise"),
    Layout(cp=2, tp=4, sequence_parallel=True, ring="blockwise"),
    Layout(tp=2, cp=2, sequence_parallel=True, collective_matmul=True, ring="blockwise"),
    Layout(dp=2, tp=4, sequence_parallel=True, collective_matmul=True),
    Layout(dp=2, tp=4, sequence_parallel=True),
]
GRIDS = [
    Layout(row=2, col=4, ring="blockwise"),
    Layout(row=4, col=2, ring="blockwise"),
    Layout(row=2, col=2, cp=2, ring="blockwise"),
    Layout(dp=2, row=2, col=2, ring="blockwise", matmul2d_slices=3),  # every size is padded
]
ALGORITHMS = [
    Layout(row=2, col=2, ring="blockwise", matmul2d="summa"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d="summa"),
    Layout(row=2, col=2, ring="blockwise", matmul2d="fox"),
    Layout(row=2, col=2, attention2d="blocks", matmul2d="fox"),
    Layout(dp=2, row=2, col=2, attention2d="blocks", matmul2d="cannon"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d_slices=2),  # H is padded
]


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


TOKENS = np.random.default_rng(3).integers(0, V, (B, T)).astype(np.int32)
PLACE_SPEC = P(Axis.DP, Axis.CP)
SAMPLES = np.arange(B, dtype=np.int32)
POSITIONS = np.arange(T, dtype=np.int32)
SEED = np.array([5, 6], np.uint32)


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
        lambda form: between_spec(form, 1, 0),
        moves(ends(1, rounds=3), product("D", "F")),
    ),
    Case(
        "column, gathered, no bias",
        lambda form, rngs: ColumnParallelLinear(
            D, (3, N, H), shard_dim=1, form=form, rngs=rngs, bias=False, gather_output=True
        ),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        token_spec,
        moves(
            ends(1, message(ALL_GATHER, Axis.TP, "3N"), rounds=3),
            product("D", "3N"),
            message(ALL_GATHER, Axis.COL, "3N"),
        ),
    ),
    Case(
        "row",
        lambda form, rngs: RowParallelLinear((F,), D, form=form, rngs=rngs),
        (array(B, T, F),),
        lambda form: (between_spec(form, 1, 0),),
        residual_spec,
        moves(ends(1, rounds=2), product("F", "D")),
    ),
    Case(
        "row, whole input, no bias",
        lambda form, rngs: RowParallelLinear(
            (N, H), D, form=form, rngs=rngs, bias=False, input_is_parallel=False
        ),
        (array(B, T, N, H),),
        lambda form: (token_spec(form),),
        residual_spec,
        moves(
            ends(1, message(ALL_GATHER, Axis.TP, "N"), rounds=2),
            product("N", "D"),
            message(ALL_GATHER, Axis.COL, "N"),
        ),
        lambda layer, h: layer(jnp.pad(h, [(0, 0)] * 2 + [(0, layer.form.padded(N) - N), (0, 0)])),
    ),
    Case(
        "norm",
        lambda form, rngs: Norm(D, options=GPT, form=form, rngs=rngs),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        residual_spec,
        moves(nothing, NORM),
    ),
    Case(
        "rms norm",
        lambda form, rngs: Norm(D, options=QWEN.block, form=form, rngs=rngs),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        residual_spec,
        moves(nothing, RMS_NORM),
    ),
    Case(
        "mlp, gated",
        lambda form, rngs: MLP(
            D, F, options=QWEN.block, form=form, rngs=rngs, init_out=normal(0.02)
        ),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        residual_spec,
        moves(ends(2, rounds=5), *GATED_MOVES),
    ),
    Case(
        "mlp",
        lambda form, rngs: MLP(D, F, options=GPT, form=form, rngs=rngs, init_out=normal(0.02)),
        (array(B, T, D),),
        lambda form: (residual_spec(form),),
        residual_spec,
        moves(ends(2, rounds=5), *MLP_MOVES),
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
            moves(ends(2, rounds=5), *ATTENTION_MOVES),
            run_attention,
        )
        for rate in (0.0, 0.3)
    ),
    *(
        Case(
            f"attention in groups, dropout {rate}",
            lambda form, rngs, rate=rate: SelfAttention(
                dataclasses.replace(QWEN, dropout=rate), form=form, rngs=rngs, init_out=normal(0.02)
            ),
            (array(B, T, D), SAMPLES, POSITIONS, SEED),
            place_specs,
            residual_spec,
            moves(both(ends(2, rounds=5), groups), *GROUPS_MOVES),
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
            moves(ends(4, rounds=10), NORM, *ATTENTION_MOVES, NORM, *MLP_MOVES),
            run_block,
        )
        for rate in (0.0, 0.3)
    ),
    Case(
        "embedding",
        lambda form, rngs: VocabParallelEmbedding(V, D, form=form, rngs=rngs),
        (TOKENS,),
        lambda form: (PLACE_SPEC,),
        residual_spec,
        moves(
            ends(1),
            message(ALL_TO_ALL, Axis.ROW, "D", times=2),
            message(REDUCE_SCATTER, Axis.COL, "D"),
            message(ALL_GATHER, Axis.COL, "D"),
        ),
        lambda layer, tokens: layer(tokens, layer.table.dtype),
    ),
    Case(
        "positions",
        lambda form, rngs: PositionEmbedding(T, D, form=form, rngs=rngs),
        (array(B, T, D), POSITIONS),
        lambda form: (residual_spec(form), P(Axis.CP)),
        residual_spec,
        moves(nothing, position_rows),
        lambda layer, x, positions: x * layer(positions, x.dtype),
    ),
    Case(
        "output layer and loss",
        lambda form, rngs: VocabParallelEmbedding(V, D, form=form, rngs=rngs),
        (array(B, T, D), TOKENS),
        lambda form: (residual_spec(form), PLACE_SPEC),
        token_spec,
        moves(
            ends(1, message(ALL_REDUCE, Axis.TP, "1", times=3, messages=2)),
            product("D", "V"),
            message(ALL_REDUCE, Axis.COL, "1", times=3, messages=2),
        ),
        lambda layer, x, targets: vocab_parallel_cross_entropy(
            layer.logits(x), layer.form.axes.local_logit_tokens(targets), layer.form.axes, V
        ),
    ),
]
(DROPPED_GROUPS,) = (case for case in CASES if case.name == "attention in groups, dropout 0.3")
CORE = [case for case in CASES if case.name in ("attention, dropout 0.3", "block, dropout 0.3")]


# Layouts that can tell a layer apart which treats each token by itself: sequences of a batch and
# blocks of a sequence are alike to it. A block has an attention inside; of the pairs with and
# without dropout one is held on every layout.
BY_TOKEN = {
    "column",
    "column, gathered, no bias",
    "row",
    "row, whole input, no bias",
    "norm",
    "rms norm",
    "mlp",
    "mlp, gated",
}
GROUPS = {"attention in groups, dropout 0.0", "attention in groups, dropout 0.3"}
REPEATED = {"attention, dropout 0.3", "block, dropout 0.0"}
IN_BLOCK = "attention, dropout 0.0"  # which the block with dropout has, too
TELLING = [LAYOUTS[1], LAYOUTS[-1], GRIDS[0], GRIDS[-1]]
DIFFERENT = [*LAYOUTS[4:8], *GRIDS[2:]]  # rings of every kind, and what others have one by one


def can(case: Case, layout: Layout) -> bool:
    """False for groups of heads that a grid would have to pad: `check_layout` refuses them."""
    return case.name not in GROUPS or layout != GRIDS[-1]


def by_default(case: Case, layout: Layout) -> bool:
    if case.name in GROUPS:
        return case.name.endswith("0.3") and layout in (LAYOUTS[1], LAYOUTS[6], GRIDS[0], GRIDS[2])
    if case.name in REPEATED:
        return layout == TELLING[2]
    if case.name == IN_BLOCK:
        return layout in (DIFFERENT[0], DIFFERENT[2], DIFFERENT[-1])
    return layout in (TELLING if case.name in BY_TOKEN else DIFFERENT)


PAIRS = [
    pytest.param(
        case,
        layout,
        id=f"{case.name}-{layout}",
        marks=[] if by_default(case, layout) else [pytest.mark.slow],
    )
    for case in CASES
    for layout in (*LAYOUTS, *GRIDS)
    if can(case, layout)
]


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_layer_is_the_layer_on_one_device(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.parametrize(("layout", "case"), by_turns(ALGORITHMS, [*CORE, DROPPED_GROUPS]), ids=str)
def test_with_every_algorithm_and_attention_in_blocks(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.parametrize(
    "case", [case if case == CORE[1] else slow(case) for case in CASES], ids=lambda case: case.name
)
def test_layer_is_the_layer_on_one_device_in_float32(case: Case) -> None:
    hold(case, LAYOUTS[-1], dtype="float32")


@pytest.mark.parametrize("case", [slow(CORE[0]), CORE[1]], ids=lambda case: case.name)
def test_on_a_grid_in_float32_too(case: Case) -> None:
    hold(case, GRIDS[-1], dtype="float32")
