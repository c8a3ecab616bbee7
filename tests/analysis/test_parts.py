"""Parts of a step's collectives: those of each layer, each micro-batch, and once per step."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import tiny

from jaxptd.analysis.traffic import StepPart, parts
from jaxptd.config import Config
from jaxptd.costs.collective import ALL_GATHER, Collective, add_up
from jaxptd.layout import Layout
from jaxptd.models.stages import make_plan, parameter_infos
from jaxptd.zero.plan import layers_plan

IN_LAYERS, IN_MICRO_BATCHES = {"tensor", "ring", "zero"}, {"tensor", "ring", "zero", "ends"}
GROUPS = {"family": "qwen3", "num_kv_heads": 2}
CASES = [
    (Layout(dp=2, cp=2, tp=4, zero=3), GROUPS),
    (Layout(dp=2, cp=2, row=2, col=2, zero=2), {}),
    (Layout(row=2, col=2, attention2d="blocks", matmul2d="summa"), {"family": "bert"}),
    (Layout(cp=2, tp=2, sequence_parallel=True, collective_matmul=True, ring="rsa"), tiny.T5),
    (Layout(pp=2, dp=2, tp=2, cp=2, zero=3), {"num_layers": 4}),
]


def found(config: Config) -> dict[StepPart, list[Collective]]:
    """Collectives of each part, by kind and axes."""
    plan = make_plan(config) if config.layout.pp > 1 else None
    each: dict[StepPart, list[Collective]] = {}
    for part, collective in parts(config, parameter_infos(config), plan):
        each.setdefault(part, []).append(collective)
    return {part: add_up(collectives) for part, collectives in each.items()}


def times(factor: int, collectives: Iterable[Collective]) -> list[Collective]:
    return [
        dataclasses.replace(c, count=factor * c.count, bytes=factor * c.bytes) for c in collectives
    ]


@pytest.mark.parametrize(("layout", "model"), CASES, ids=str)
def test_twice_the_layers_move_twice_what_layers_move(layout: Layout, model: Any) -> None:
    shallow = tiny.config(layout, **model)
    sizes = shallow.model
    deep = tiny.config(
        layout,
        **model
        | {"num_layers": 2 * sizes.num_layers}
        | (
            {"encoder_decoder.num_layers": 2 * sizes.decoder_layers}
            if sizes.encoder_decoder
            else {}
        ),
    )
    once, twice = found(shallow), found(deep)
    assert {part.what for part in once} >= {"tensor", "ends", "step"}
    assert once.keys() == twice.keys()
    for part, collectives in once.items():
        assert (part.stack is not None) == (part.what in IN_LAYERS)
        if part.what != "step":
            assert twice[part] == times(2 if part.stack else 1, collectives)


@pytest.mark.parametrize(("layout", "model"), CASES, ids=str)
def test_twice_the_micro_batches_move_twice_what_each_moves(layout: Layout, model: Any) -> None:
    """Layers that the first micro-batch gathers for all are the exception."""
    config = tiny.config(layout, **model)
    once, twice = found(config), found(tiny.config(layout, batch=16, micro_batches=4, **model))
    assert once.keys() == twice.keys()
    for part, collectives in once.items():
        held = part.what == "zero" and layers_plan(config).gather == "first_microbatch"
        if part.what in IN_MICRO_BATCHES:
            factors = [1 if held and c.kind == ALL_GATHER else 2 for c in collectives]
            pairs = zip(factors, collectives, strict=True)
            assert twice[part] == [each for n, c in pairs for each in times(n, [c])]
        if part.what == "step":
            counts = [[(c.kind, c.axes, c.count) for c in each[part]] for each in (once, twice)]
            assert sorted(counts[0]) == sorted(counts[1])


def test_only_layers_of_rings_and_shards_have_such_parts() -> None:
    whats = {part.what for part in found(tiny.config(Layout(dp=2, tp=4)))}
    assert whats == {"tensor", "ends", "step"}
    whats = {part.what for part in found(tiny.config(Layout(pp=2, cp=2, dp=2, zero=2)))}
    assert whats == {"ring", "zero", "stages", "step"}
