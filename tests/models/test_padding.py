"""Sizes that tp does not divide are padded: a step equals one device's, and the formulas hold."""

from collections.abc import Mapping
from typing import Any

import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis import memory_model
from jaxptd.analysis.collective import subtract
from jaxptd.analysis.count import count, formula
from jaxptd.analysis.memory_report import counted
from jaxptd.mesh import Layout
from jaxptd.models.parameters import parameter_infos

UNITS = {"ffn_hidden_size": 23}
FEWER = {"ffn_hidden_size": 5}  # of tp=4 one device has no unit
RING_STEPS = Layout(tp=4, sequence_parallel=True, collective_matmul=True)
SHARDED = Layout(dp=2, tp=4, sequence_parallel=True, zero=3)


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(tp=2), UNITS),
        slow(RING_STEPS, FEWER | {"family": "llama"}),
        slow(Layout(tp=4, cp=2), UNITS),
        slow(SHARDED, UNITS | {"remat": "dots"}),
        slow(Layout(tp=2, dp=2, zero=1), UNITS | {"optimizer": "muon"}),
        slow(Layout(tp=4, offload="optimizer"), FEWER | {"optimizer": "adafactor"}),
        slow(Layout(tp=2, pp=2, schedule="zb-h1"), UNITS | {"num_layers": 4, "micro_batches": 4}),
        slow(Layout(tp=4), UNITS | tiny.T5 | {"gated": True}),
    ],
    ids=str,
)
def test_hidden_units_that_do_not_divide_are_padded(layout: Layout, choice: dict[str, Any]) -> None:
    hold(layout, dropout=0.1, **choice)


def shapes(infos: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return sorted(info.stored_shape for info in infos.values())


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (SHARDED, FEWER | {"remat": "dots"}),
        slow(RING_STEPS, UNITS | {"family": "llama"}),
        slow(Layout(tp=2, dp=2), UNITS | {"optimizer": "muon"}),
    ],
    ids=str,
)
def test_the_formulas_have_the_padding(layout: Layout, choice: dict[str, Any]) -> None:
    program = tiny.program(layout, **choice)
    assert subtract(count(program), formula(program)) == []
    assert counted(program) == memory_model.activations(program.config, program.resolved.plan)
    assert shapes(parameter_infos(program.config)) == shapes(program.infos)
