"""Formulas of attention to another sequence: what it adds to a layer of self-attention.

The contract of layers (`tests/layers/test_contract.py`) counts the same things in programs.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from moves import CROSS_MOVES, NORM, B, D, H, K, N, S, T, both, ends, moves

from jaxptd.analysis.memory_model import layer
from jaxptd.analysis.traffic import expected, step
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.costs.collective import PERMUTE, Collective, subtract
from jaxptd.mesh import Axis, Layout
from jaxptd.models import families
from jaxptd.models.families import architecture_of
from jaxptd.parts.architecture import Architecture
from jaxptd.parts.attention import AttentionShape
from jaxptd.parts.cross_attention import CrossAttentionShape
from jaxptd.parts.part import Part

MODEL = ModelConfig(
    num_layers=1, hidden_size=D, num_heads=N, seq_length=T, vocab_size=13, dtype="float64"
)


def ring(layout: Layout, dtype: str) -> Iterable[Collective]:
    """Sends the source's keys and values round three times; on a grid, `attention` counts them."""
    hops, size = 3 * (layout.cp - 1), B * S * N * H // (layout.dp * layout.cp * layout.tp)
    yield Collective(PERMUTE, (Axis.CP,), hops, hops * 2 * size * np.dtype(dtype).itemsize)


PRODUCTS = both(ends(2, rounds=5), ends(1, rounds=3, length=S))
PER_LAYER = moves(both(PRODUCTS, ring), *CROSS_MOVES, NORM)
CROSS = CrossAttentionShape(D, N, N, H, 1, T, (S,), has_norm=False, source=S)
LAYOUTS = [
    Layout(tp=2),
    Layout(dp=2, cp=2, tp=2, sequence_parallel=True, keep_gathered=True, ring="blockwise"),
    Layout(tp=4, sequence_parallel=True, collective_matmul=True),
    Layout(cp=4),
    Layout(row=2, col=4, ring="blockwise"),
    Layout(dp=2, row=2, col=2, ring="blockwise", matmul2d_slices=3),
    Layout(row=2, col=4, attention2d="blocks", matmul2d="summa"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d_slices=2),
    Layout(dp=2, row=2, col=2, attention2d="blocks", matmul2d="cannon"),
]


def config(layout: Layout) -> Config:
    return Config(MODEL, layout, train=TrainConfig(global_batch_size=B))


def with_cross_attention(architecture: Architecture, cross: Part = CROSS) -> Architecture:
    """Adds a part between attention and MLP to the architecture."""
    (stack,) = architecture.stacks
    first, last = stack.parts
    more = dataclasses.replace(stack, parts=(first, cross, last))
    return dataclasses.replace(architecture, stacks=(more,))


def along(layout: Layout, collectives: Iterable[Collective]) -> list[Collective]:
    """Drops axes of size 1 from collectives."""
    found = []
    for each in collectives:
        axes = tuple(str(axis) for axis in each.axes if layout.sizes[Axis(axis)] > 1)
        found += [dataclasses.replace(each, axes=axes)] if axes else []
    return found


def replace(monkeypatch: pytest.MonkeyPatch, architecture: Architecture) -> None:
    for module in (step, families):
        monkeypatch.setattr(module, "architecture_of", lambda model: architecture)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_moves_what_the_layer_moves(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [*expected(config(layout), {})]
    replace(monkeypatch, with_cross_attention(architecture_of(MODEL)))
    found = subtract([*expected(config(layout), {})], plain)
    assert subtract(found, along(layout, PER_LAYER(layout, "float64"))) == []


def test_it_keeps_keys_of_the_source_beside_queries() -> None:
    """Attention to the same sequence saves T keys and values instead of S."""
    kept = []
    start = config(Layout(cp=2, tp=2))
    for cross in (CROSS, dataclasses.replace(CROSS, source=T)):
        (stack,) = with_cross_attention(architecture_of(MODEL), cross).stacks
        kept.append(layer(start, stack, "dots"))
    assert kept[0] - kept[1] == 2 * B * (S - T) * N * H * 8 // 4


@pytest.mark.parametrize(
    ("part", "keys"),
    [(AttentionShape(D, N, K, H, 1, T, (T,), has_norm=False), T), (CROSS, S)],
    ids=["itself", "source"],
)
def test_tokens_that_have_keys(part: AttentionShape, keys: int) -> None:
    assert part.key_tokens == keys
