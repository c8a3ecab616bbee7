"""Cases of the layers' contract, see `contract.py`."""

import jax.numpy as jnp
from contract import Case, between_spec, residual_spec, token_spec
from jax.sharding import PartitionSpec as P
from moves import (
    ATTENTION_MOVES,
    GATED_MOVES,
    MLP_MOVES,
    NORM,
    RMS_NORM,
    B,
    D,
    F,
    H,
    N,
    T,
    V,
    ends,
    message,
    moves,
    nothing,
    position_rows,
    product,
)

from jaxptd.config import ModelConfig
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from jaxptd.layers.block import Block
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import (
    ColumnParallelLinear,
    PositionEmbedding,
    RowParallelLinear,
    SquareLinear,
    VocabParallelEmbedding,
)
from jaxptd.layers.loss import vocab_parallel_cross_entropy
from jaxptd.layers.mlp import MLP
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import block_along
from jaxptd.mesh import Axis
from jaxptd.models.decoder import architecture
from jaxptd.params import normal
from jaxptd.parts.architecture import Stack
from jaxptd.parts.mlp import MLPShape
from tests.layers.attention_cases import ATTENTION
from tests.layers.inputs import (
    GPT,
    MODEL,
    PLACE_SPEC,
    POSITIONS,
    POST,
    QWEN,
    SAMPLES,
    SEED,
    TOKENS,
    array,
    dropping,
    place_specs,
)


def stack_of(model: ModelConfig) -> Stack:
    """The only stack of a decoder."""
    (stack,) = architecture(model).stacks
    return stack


def run_block(layer, x, samples, positions, seed):
    return layer(x, TokenInfo(samples, positions, seed), 0, None)[0]


CASES = [
    Case(
        "column",
        lambda tensor_parallel, rngs: ColumnParallelLinear(
            D, (F,), tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        lambda tensor_parallel: between_spec(tensor_parallel, 1, 0),
        moves(ends(1, rounds=3), product("D", "F")),
    ),
    Case(
        "column, gathered, no bias",
        lambda tensor_parallel, rngs: ColumnParallelLinear(
            D,
            (3, N, H),
            shard_dim=1,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            bias=False,
            gather_output=True,
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        token_spec,
        moves(
            ends(1, message(ALL_GATHER, Axis.TP, "3N"), rounds=3),
            product("D", "3N"),
            message(ALL_GATHER, Axis.COL, "3N"),
        ),
    ),
    Case(
        "row",
        lambda tensor_parallel, rngs: RowParallelLinear(
            (F,), D, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, F),),
        lambda tensor_parallel: (between_spec(tensor_parallel, 1, 0),),
        residual_spec,
        moves(ends(1, rounds=2), product("F", "D")),
    ),
    Case(
        "row, whole input, no bias",
        lambda tensor_parallel, rngs: RowParallelLinear(
            (N, H),
            D,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            bias=False,
            input_is_parallel=False,
        ),
        (array(B, T, N, H),),
        lambda tensor_parallel: (token_spec(tensor_parallel),),
        residual_spec,
        moves(
            ends(1, message(ALL_GATHER, Axis.TP, "N"), rounds=2),
            product("N", "D"),
            message(ALL_GATHER, Axis.COL, "N"),
        ),
        lambda layer, h: layer(
            jnp.pad(h, [(0, 0)] * 2 + [(0, layer.tensor_parallel.padded(N) - N), (0, 0)])
        ),
    ),
    Case(
        "square",
        lambda tensor_parallel, rngs: SquareLinear(
            D, D, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        residual_spec,
        moves(nothing, product("D", "D")),
    ),
    Case(
        "norm",
        lambda tensor_parallel, rngs: Norm(
            D, options=GPT, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        residual_spec,
        moves(nothing, NORM),
    ),
    Case(
        "rms norm",
        lambda tensor_parallel, rngs: Norm(
            D, options=QWEN.block, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        residual_spec,
        moves(nothing, RMS_NORM),
    ),
    Case(
        "mlp, gated",
        lambda tensor_parallel, rngs: MLP(
            MLPShape.of(QWEN),
            QWEN,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            init_out=normal(0.02),
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        residual_spec,
        moves(ends(2, rounds=5), *GATED_MOVES),
    ),
    Case(
        "mlp",
        lambda tensor_parallel, rngs: MLP(
            MLPShape.of(MODEL),
            MODEL,
            tensor_parallel=tensor_parallel,
            rngs=rngs,
            init_out=normal(0.02),
        ),
        (array(B, T, D),),
        lambda tensor_parallel: (residual_spec(tensor_parallel),),
        residual_spec,
        moves(ends(2, rounds=5), *MLP_MOVES),
    ),
    *ATTENTION,
    *(
        Case(
            f"block, dropout {rate}",
            lambda tensor_parallel, rngs, rate=rate: Block(
                stack_of(dropping(rate)), dropping(rate), tensor_parallel=tensor_parallel, rngs=rngs
            ),
            (array(B, T, D), SAMPLES, POSITIONS, SEED),
            place_specs,
            residual_spec,
            moves(ends(4, rounds=10), NORM, *ATTENTION_MOVES, NORM, *MLP_MOVES),
            run_block,
        )
        for rate in (0.0, 0.3)
    ),
    Case(
        "block, norms of sums",
        lambda tensor_parallel, rngs: Block(
            stack_of(POST), POST, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D), SAMPLES, POSITIONS, SEED),
        place_specs,
        residual_spec,
        moves(ends(4, rounds=10), *ATTENTION_MOVES, NORM, *MLP_MOVES, NORM),
        run_block,
    ),
    Case(
        "embedding",
        lambda tensor_parallel, rngs: VocabParallelEmbedding(
            V, D, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (TOKENS,),
        lambda tensor_parallel: (PLACE_SPEC,),
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
        lambda tensor_parallel, rngs: PositionEmbedding(
            T, D, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D), POSITIONS),
        lambda tensor_parallel: (residual_spec(tensor_parallel), P(Axis.CP)),
        residual_spec,
        moves(nothing, position_rows),
        lambda layer, x, positions: x * layer(positions, x.dtype),
    ),
    Case(
        "output layer and loss",
        lambda tensor_parallel, rngs: VocabParallelEmbedding(
            V, D, tensor_parallel=tensor_parallel, rngs=rngs
        ),
        (array(B, T, D), TOKENS),
        lambda tensor_parallel: (residual_spec(tensor_parallel), PLACE_SPEC),
        token_spec,
        moves(
            ends(1, message(ALL_REDUCE, Axis.TP, "1", times=3, messages=2)),
            product("D", "V"),
            message(ALL_REDUCE, Axis.COL, "1", times=3, messages=2),
        ),
        lambda layer, x, targets: vocab_parallel_cross_entropy(
            layer.logits(x),
            block_along(targets, layer.tensor_parallel.axes.logit_tokens, 1),
            layer.tensor_parallel.axes,
            V,
        )[0],
    ),
]
