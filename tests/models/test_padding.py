"""Sizes that tp does not divide are padded: a step equals one device's, and the formulas hold."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis import memory_model
from jaxptd.analysis.count import count, formula
from jaxptd.analysis.memory_report import counted
from jaxptd.costs.collective import subtract
from jaxptd.matmul.padding import HeadCounts, heads_for
from jaxptd.mesh import Layout
from jaxptd.models.stages import parameter_infos

UNITS = {"ffn_hidden_size": 23}
FEWER = {"ffn_hidden_size": 5}  # with tp=4, one device has no unit
RING_STEPS = Layout(tp=4, sequence_parallel=True, collective_matmul=True)
SHARDED = Layout(dp=2, tp=4, sequence_parallel=True, zero=3)
FOUR = {"num_layers": 4, "micro_batches": 4}

# The tiny model's 4 heads are padded to 6 on three devices; the last device has only padding.
THREE = Layout(tp=3, sequence_parallel=True)
TWELVE = {"seq_length": 12}
SIX = {"num_heads": 6, "hidden_size": 24}
QWEN = {"family": "qwen3", "num_kv_heads": 2}  # 3 groups of 2 on three devices
MANY = {"family": "llama", "num_kv_heads": 1}  # 3 groups of 4
COLUMNS = Layout(row=2, col=3)


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(tp=2), UNITS),
        slow(RING_STEPS, FEWER | {"family": "llama"}),
        slow(Layout(tp=4, cp=2), UNITS),
        slow(SHARDED, UNITS | {"remat": "dots"}),
        slow(Layout(tp=2, dp=2, zero=1), UNITS | {"optimizer": "muon"}),
        slow(Layout(tp=4, offload="optimizer"), FEWER | {"optimizer": "adafactor"}),
        slow(Layout(tp=2, pp=2, schedule="zb-h1"), UNITS | FOUR),
        slow(Layout(tp=4), UNITS | tiny.T5 | {"gated": True}),
    ],
    ids=str,
)
def test_hidden_units_that_do_not_divide_are_padded(layout: Layout, choice: dict[str, Any]) -> None:
    hold(layout, dropout=0.1, **choice)


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(THREE, TWELVE | QWEN | FEWER),
        slow(Layout(tp=4, dp=2, zero=3), {"num_heads": 3, "hidden_size": 15}),
        slow(Layout(tp=3, sequence_parallel=True, collective_matmul=True), TWELVE | MANY),
        slow(Layout(tp=4, pp=2, schedule="zb-v"), SIX | QWEN | FOUR),
        slow(Layout(tp=3, dp=2, zero=2), QWEN | {"optimizer": "muon"}),
        slow(Layout(tp=3, offload="optimizer"), QWEN | {"optimizer": "adafactor"}),
        slow(Layout(tp=3, cp=2, ring="rsa"), QWEN),
        slow(Layout(tp=3, cp=2, ring="gather"), QWEN),
        slow(Layout(tp=3, cp=2), {"documents": "apart", "linear_bias": "all"}),
        slow(Layout(tp=3, dp=2), tiny.T5 | {"remat": "full"}),
        slow(Layout(tp=3), {"family": "bert", "scan_layers": False}),
        slow(COLUMNS, {}),
        slow(COLUMNS, tiny.T5),
        slow(Layout(row=2, col=3, matmul2d_slices=3), QWEN),
        slow(Layout(row=2, col=4, matmul2d="summa"), SIX | QWEN | {"num_kv_heads": 3}),
    ],
    ids=str,
)
def test_heads_that_do_not_divide_are_padded(layout: Layout, choice: dict[str, Any]) -> None:
    """Uses dropout by global head; the gradient norm includes the padding, which must be zero."""
    hold(layout, dropout=0.1, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [(THREE, TWELVE | QWEN | FEWER), (Layout(tp=3), tiny.T5), (COLUMNS, MANY | UNITS)],
    ids=str,
)
def test_padding_stays_zero_in_training(layout: Layout, choice: dict[str, Any]) -> None:
    program = tiny.program(layout, **choice)
    state = program.init_state()
    for number in range(3):
        rng = np.random.default_rng(number)
        batch = {
            name: rng.integers(0, 2, x.shape).astype(x.dtype)
            for name, x in program.abstract_batch.items()
            if name != "inputs"  # T5 derives them from its targets
        }
        state, _ = program.train_step(state, batch)
    for name, x in state["params"].items():
        info = program.infos[name]
        stored, plain = np.asarray(x), jax.device_get(info.to_canonical(x))
        assert np.any(plain != 0)
        np.testing.assert_array_equal(stored, info.from_canonical(plain))


@pytest.mark.parametrize(
    ("layout", "heads", "wanted"),
    [
        (Layout(tp=4), (6, 6), HeadCounts(8, 8)),
        (Layout(tp=6), (12, 4), HeadCounts(18, 6)),
        (Layout(tp=4), (12, 2), HeadCounts(12, 2, gathered=True)),
        (Layout(tp=4), (6, 2), HeadCounts(12, 4)),
        (Layout(tp=4), (6, 1), HeadCounts(24, 4)),
        (Layout(row=2, col=3), (6, 2), HeadCounts(18, 6)),
        (Layout(row=4, col=2), (6, 2), HeadCounts(12, 4)),
        (Layout(row=4, col=2), (8, 2), HeadCounts(8, 2, gathered=True)),
        (Layout(row=2, col=2, matmul2d_slices=3), (4, 2), HeadCounts(12, 6)),
    ],
    ids=str,
)
def test_groups_are_padded_whole(layout: Layout, heads: tuple, wanted: HeadCounts) -> None:
    assert heads_for(layout, *heads, 4) == wanted


def shapes(infos: Mapping[str, Any]) -> list[tuple[int, ...]]:
    return sorted(info.stored_shape for info in infos.values())


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (SHARDED, FEWER | {"remat": "dots"}),
        (THREE, TWELVE | QWEN | {"remat": "attention"}),
        slow(RING_STEPS, UNITS | {"family": "llama"}),
        slow(Layout(tp=2, dp=2), UNITS | {"optimizer": "muon"}),
        slow(Layout(tp=3, cp=2, ring="rsa"), MANY | {"remat": "dots"}),
        slow(Layout(tp=3, dp=2), tiny.T5 | {"remat": "dots"}),
        slow(Layout(tp=3, pp=2), QWEN | FOUR | UNITS),
        slow(COLUMNS, QWEN),
        slow(COLUMNS, tiny.T5 | {"remat": "dots"}),
        slow(Layout(row=2, col=4, matmul2d="summa"), SIX | QWEN | {"num_kv_heads": 3}),
    ],
    ids=str,
)
def test_the_formulas_have_the_padding(layout: Layout, choice: dict[str, Any]) -> None:
    program = tiny.program(layout, **choice)
    assert subtract(count(program), formula(program)) == []
    assert counted(program) == memory_model.activations(program.config, program.resolved.plan)
    assert shapes(parameter_infos(program.config)) == shapes(program.infos)
