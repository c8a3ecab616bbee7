"""Cases of attention, see `cases.py`."""

import dataclasses

import numpy as np
from contract import Case, residual_spec
from flax import nnx
from jax.sharding import PartitionSpec as P
from moves import (
    ATTENTION_MOVES,
    CROSS_MOVES,
    GROUPS_MOVES,
    WHOLE_NORM,
    WHOLE_NORM_MOVES,
    B,
    D,
    S,
    T,
    both,
    ends,
    groups,
    latent,
    moves,
)

from jaxptd.layers.attention import CrossAttention, LatentAttention, SelfAttention, Source
from jaxptd.layers.dropout import TokenInfo
from jaxptd.mesh import SAMPLE_AXES
from jaxptd.params import normal, param
from jaxptd.parts.attention import AttentionShape
from jaxptd.parts.cross_attention import CrossAttentionShape
from jaxptd.parts.latent_attention import LatentAttentionShape
from jaxptd.parts.parameters import by_head
from tests.layers.inputs import (
    FULL,
    LATENT,
    MODEL,
    OLMO,
    PLAIN_QUERIES,
    POSITIONS,
    QWEN,
    SAMPLES,
    SEED,
    array,
    dropping,
    place_specs,
)

# Padding at the end of a source, and a source of padding alone.
SEGMENTS = np.where(np.arange(S) < np.array([[S], [S - 3], [2], [0]]), 0, -1).astype(np.int32)


CROSS = CrossAttentionShape.of(MODEL, source=S, causal=False)


def self_attention(model):
    """Makes a model's self-attention."""

    def make(tensor_parallel, rngs):
        shape = AttentionShape.of(model)
        own = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        return SelfAttention(shape, model, init_out=normal(0.02), **own)

    return make


def run_attention(layer, x, samples, positions, seed):
    return layer(x, TokenInfo(samples, positions, seed), None)[0]


class BiasedAttention(nnx.Module):
    """Attention to all tokens with a bias by distance, a table `[2T - 1, N]`."""

    def __init__(self, tensor_parallel, rngs) -> None:
        self.attention = self_attention(FULL)(tensor_parallel, rngs)
        table = by_head(tensor_parallel, 2 * T - 1, AttentionShape.of(FULL).head_shape)
        table = dataclasses.replace(table, over=tensor_parallel.axes.score_axes)
        self.table = param(rngs(), table, normal(0.02))

    def __call__(self, x, samples, positions, seed):
        token_info = TokenInfo(samples, positions, seed)
        return self.attention(x, token_info, None, bias_NR=self.table[...].T)[0]


def run_cross(layer, x, samples, positions, seed, source, segments):
    segment_BCS = layer.tensor_parallel.ring.by_device(segments)
    return layer(x, TokenInfo(samples, positions, seed), Source(source, segment_BCS))


ATTENTION = [
    *(
        Case(
            f"attention, dropout {rate}",
            self_attention(dropping(rate)),
            (array(B, T, D), SAMPLES, POSITIONS, SEED),
            place_specs,
            residual_spec,
            moves(ends(2, rounds=5), *ATTENTION_MOVES),
            run_attention,
        )
        for rate in (0.0, 0.3)
    ),
    Case(
        "attention to all tokens, biased",
        BiasedAttention,
        (array(B, T, D), SAMPLES, POSITIONS, SEED),
        place_specs,
        residual_spec,
        moves(ends(2, rounds=5), *ATTENTION_MOVES),
    ),
    *(
        Case(
            f"cross-attention, dropout {rate}",
            lambda tensor_parallel, rngs, rate=rate: CrossAttention(
                CROSS,
                dropping(rate),
                tensor_parallel=tensor_parallel,
                rngs=rngs,
                init_out=normal(0.02),
            ),
            (array(B, T, D), SAMPLES, POSITIONS, SEED, array(B, S, D, seed=1), SEGMENTS),
            lambda tensor_parallel: (
                *place_specs(tensor_parallel),
                residual_spec(tensor_parallel),
                P(SAMPLE_AXES),
            ),
            residual_spec,
            moves(both(ends(2, rounds=5), ends(1, rounds=3, length=S)), *CROSS_MOVES),
            run_cross,
        )
        for rate in (0.0, 0.3)
    ),
    *(
        Case(
            f"attention in groups, dropout {rate}",
            self_attention(dataclasses.replace(QWEN, dropout=rate)),
            # With seed 0 k_norm's gradient nearly cancels, and float32 rounds it by more.
            (array(B, T, D, seed=2), SAMPLES, POSITIONS, SEED),
            place_specs,
            residual_spec,
            moves(both(ends(2, rounds=5), groups), *GROUPS_MOVES),
            run_attention,
        )
        for rate in (0.0, 0.3)
    ),
    Case(
        "attention in groups, all heads normalised",
        self_attention(OLMO),
        (array(B, T, D, seed=2), SAMPLES, POSITIONS, SEED),
        place_specs,
        residual_spec,
        moves(both(ends(2, rounds=5), WHOLE_NORM), *WHOLE_NORM_MOVES),
        run_attention,
    ),
]


def latent_attention(model):
    """Makes a model's latent attention."""

    def make(tensor_parallel, rngs):
        shape = LatentAttentionShape.of(model)
        own = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        return LatentAttention(shape, model, init_out=normal(0.02), **own)

    return make


LATENTS = [  # without the cases of grids, which have none
    Case(
        f"latent attention, {name}",
        latent_attention(model),
        (array(B, T, D), SAMPLES, POSITIONS, SEED),
        place_specs,
        residual_spec,
        latent(ranks, model.latent.rope_size),
        run_attention,
    )
    for name, model, ranks in (
        ("dropout 0.3", dataclasses.replace(LATENT, dropout=0.3), (6, 10)),
        ("plain queries", PLAIN_QUERIES, (6, D)),
    )
]
