"""Sequences that a layout does not divide are padded: a step equals one device's step."""

from typing import Any

import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis import memory_model
from jaxptd.analysis.count import count, formula
from jaxptd.analysis.memory_report import counted
from jaxptd.costs.collective import subtract
from jaxptd.mesh import Layout
from jaxptd.models.stages import parameter_infos
from jaxptd.step.batch import given_shapes

TEN, ODD = {"seq_length": 10}, {"seq_length": 13}
GROUPS = {"family": "llama", "num_kv_heads": 2}
WINDOW = {"window": 11, "documents": "apart"}  # longer than ten tokens, shorter than padded
T5 = tiny.T5 | {"seq_length": 11, "encoder_decoder.seq_length": 7}
BERT = {"family": "bert"}
SEQUENCE = Layout(tp=4, sequence_parallel=True)
GRID = Layout(row=2, col=2)
BLOCKS = Layout(row=2, col=2, attention2d="blocks")
FOUR = {"num_layers": 4, "micro_batches": 4}

CASES = [
    # A loop of one layer, and every axis that shards tokens.
    (Layout(cp=2, row=2, col=2), ODD | {"num_layers": 1, "micro_batches": 1}),
    slow(Layout(cp=4), TEN | GROUPS | WINDOW),
    slow(Layout(cp=2, ulysses=2, tp=2), TEN | GROUPS | WINDOW),
    slow(SEQUENCE, TEN),
    slow(SEQUENCE, ODD | T5),
    slow(Layout(tp=2, sequence_parallel=True, collective_matmul=True), ODD | GROUPS),
    slow(Layout(cp=2, tp=2, sequence_parallel=True), ODD | {"z_loss": 0.01}),
    slow(Layout(cp=3, ring="blockwise"), TEN | GROUPS | {"window": 5}),
    (Layout(cp=4), TEN | {"window": 11, "window_layers": (True, False)}),
    slow(Layout(cp=4, ring="blockwise"), TEN | {"family": "llama", "window": 10}),
    slow(Layout(cp=2, ring="rsa"), ODD | {"documents": "apart"}),
    slow(Layout(cp=3, ring="gather"), TEN | GROUPS | {"window": 5, "documents": "apart"}),
    slow(Layout(row=2, col=2, cp=2, ring="gather"), T5),
    slow(Layout(cp=2), T5),
    slow(Layout(cp=3), BERT | TEN),
    slow(Layout(row=3, col=2, ring="blockwise"), TEN),
    slow(GRID, BERT | ODD),
    slow(Layout(row=2, col=2, cp=2), T5),
    slow(BLOCKS, T5),
    slow(Layout(row=2, col=2, cp=2, attention2d="blocks"), ODD | GROUPS | WINDOW),
    slow(Layout(row=2, col=3, attention2d="blocks", matmul2d_slices=2), BERT | TEN),
    slow(Layout(row=2, col=2, matmul2d="cannon", attention2d="blocks"), ODD),
    slow(Layout(pp=2, cp=2), ODD | FOUR),
    slow(Layout(pp=2, cp=2, schedule="zb-v"), ODD | FOUR | {"max_positions": 13}),
    slow(Layout(pp=2, tp=2, sequence_parallel=True, schedule="interleaved"), T5 | FOUR),
    slow(Layout(dp=2, cp=2, zero=3), ODD | {"remat": "dots"}),
    slow(Layout(dp=2, row=2, col=2, zero=2), ODD | {"optimizer": "muon"}),
    slow(Layout(cp=2, offload="activations"), ODD | {"remat": "dots"}),
    slow(Layout(cp=2, offload="optimizer"), ODD | {"remat_layers": 1, "remat": "full"}),
]


@pytest.mark.parametrize(("layout", "choice"), CASES, ids=str)
def test_a_step_equals_one_devices(layout: Layout, choice: dict[str, Any]) -> None:
    """Uses dropout, whose masks depend on positions."""
    hold(layout, dropout=0.1, **choice)


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(cp=4), TEN | GROUPS | WINDOW),
        (SEQUENCE, ODD | T5 | {"remat": "dots"}),
        slow(Layout(cp=4, ring="blockwise"), TEN | {"family": "llama", "window": 5}),
        slow(Layout(cp=4, ring="blockwise"), TEN | {"family": "llama", "window": 10}),
        slow(Layout(cp=2, ring="rsa"), ODD | {"documents": "apart", "remat": "dots"}),
        slow(Layout(cp=2, tp=2, sequence_parallel=True), ODD | {"dropout": 0.1}),
        slow(Layout(row=3, col=2, ring="blockwise"), TEN | {"max_positions": 16}),
        slow(GRID, BERT | ODD),
        slow(BLOCKS, T5 | {"remat": "attention"}),
        slow(Layout(row=2, col=2, cp=2, attention2d="blocks"), ODD | GROUPS | WINDOW),
        slow(Layout(pp=2, cp=2), ODD | FOUR),
        slow(Layout(dp=2, cp=2, zero=3), ODD | {"remat": "dots"}),
    ],
    ids=str,
)
def test_the_formulas_have_the_padding(layout: Layout, choice: dict[str, Any]) -> None:
    program = tiny.program(layout, **choice)
    assert subtract(count(program), formula(program)) == []
    assert counted(program) == memory_model.activations(program.config, program.resolved.plan)
    both = (parameter_infos(program.config), program.infos)  # their names differ
    wanted, found = (sorted(info.stored_shape for info in infos.values()) for infos in both)
    assert found == wanted


def test_the_batch_is_padded_behind_each_sequence() -> None:
    program = tiny.program(Layout(cp=2, dp=2), **T5)
    order = program.batches.token_orders
    rng = np.random.default_rng(0)
    given = {
        name: rng.integers(0, 2, shape).astype(np.int32)
        for name, shape in given_shapes(program.config).items()
    }
    placed = {
        name: np.asarray(x)[:, np.argsort(order[name])]
        for name, x in program.batches.place(given).items()
    }
    for name, x in given.items():
        np.testing.assert_array_equal(placed[name][:, : x.shape[1]], x)
    assert np.all(placed["source_mask"][:, 11:] == 0) and placed["source"].shape[1] == 12
    assert np.all(placed["targets"][:, 7:] == -1) and np.all(placed["inputs"] >= 0)


@pytest.mark.parametrize(
    ("layout", "unit"),
    [
        (Layout(tp=4), 1),
        (SEQUENCE, 4),
        (Layout(cp=2), 4),
        (Layout(cp=2, ring="rsa"), 2),
        (Layout(cp=2, tp=3, sequence_parallel=True), 12),
        (Layout(row=2, col=3), 4),
        (Layout(row=2, col=3, matmul2d_slices=2, attention2d="blocks"), 12),
        (Layout(row=2, col=2, cp=2, attention2d="blocks"), 4),
    ],
    ids=str,
)
def test_the_unit_of_a_layout(layout: Layout, unit: int) -> None:
    assert layout.sequence_unit == unit
