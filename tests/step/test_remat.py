"""Recomputation under each policy, counted in the step's jaxpr; and layers with mixed policies."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from contract import relative
from one_device import hold
from turns import slow

from jaxptd.analysis.jaxprs import executed, is_product
from jaxptd.config import ModelConfig, Remat
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.step import resolved

REMATS: tuple[Remat, ...] = ("none", "attention", "dots", "full")
FOUR = {"num_layers": 4, "micro_batches": 4}
LAYERS = tiny.MODEL.num_layers


def again(layout: Layout, weigh: Any = is_product, **choice: Any) -> dict[str, float]:
    """Executions that each policy adds to those of `none`, per layer and micro-batch."""
    runs = LAYERS * choice.setdefault("micro_batches", 1)
    found = {r: executed(tiny.program(layout, remat=r, **choice), weigh) for r in REMATS}
    return {remat: (count - found["none"]) / runs for remat, count in found.items()}


CASES = [
    # Matmuls of attention in forward; the number of them that dots also recomputes.
    slow(Layout(tp=2), {}, 2, 0),
    slow(Layout(tp=2), {"scan_layers": False}, 2, 0),
    slow(tiny.SEQUENCE_PARALLEL, {}, 2, 0),
    # A zigzag of two: the three visible quarters of the local block, and two of the other.
    slow(Layout(cp=2), {}, 10, 0),
    slow(Layout(cp=2, ring="rsa"), {}, 4, 2),
    slow(Layout(row=2, col=2), {}, 10, 0),
    (Layout(row=2, col=2, attention2d="blocks"), {}, 2, 1),
]


@pytest.mark.parametrize(("layout", "choice", "core", "scores"), CASES, ids=str)
def test_backward_recomputes_what_the_policy_says(layout, choice, core, scores) -> None:
    """The core is the scores, if whole rows are computed; full skips the last matmul."""
    attention = scores or core
    first = 1 if layout.has_grid else 3  # matmuls for queries, keys and values
    want = {"none": 0, "attention": attention, "dots": scores, "full": first + 2 + core}
    assert again(layout, **choice) == want


@pytest.mark.slow
def test_a_pipeline_recomputes_whole_parts_and_a_mix_only_their_first_layers() -> None:
    layout, choice = Layout(pp=2), {"micro_batches": 2, "num_layers": 4}
    none, full, mixed = (
        executed(tiny.program(layout, **choice, **how), is_product)
        for how in ({}, {"remat": "full"}, {"remat": "full", "remat_layers": 1})
    )
    assert full - none == 4 * 2 * (6 + 2)
    assert mixed - none == 2 * 2 * (5 + 2)  # one layer of each part, two parts, two micro-batches


@pytest.mark.slow
def test_cudnn_is_recomputed_only_where_the_core_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved, "choose_kernel", lambda *_, **__: ("cudnn", None))
    choice = {"dtype": "bfloat16", "hidden_size": 32}

    def is_forward(equation: Any) -> int:
        return int(equation.primitive.name == "dot_product_attention_fwd_wrapper")

    found = again(Layout(), is_forward, **choice)
    assert found == {"none": 0, "attention": 1, "dots": 0, "full": 1}
    assert executed(tiny.program(Layout(), micro_batches=1, **choice), is_forward) == LAYERS


# ---- mixed layers -------------------------------------------------------------------------------


def gradients(layout: Layout, **choice: Any) -> dict[str, np.ndarray]:
    program = tiny.program(layout, num_layers=3, dropout=0.1, **choice)
    state = program.init_state()
    _, _, found = program.step_with_gradients(state, program.place(tiny.batch()))
    return jax.tree.map(np.asarray, program.canonical(found))


MIXES: list[Any] = [
    slow(Layout(tp=2), {"remat": "dots", "remat_layers": 1}),
    # three layers on one stage, so that the second kind has two
    slow(Layout(pp=2, tp=2, stage_layers=(3, 0)), {"remat": "full", "remat_layers": 1}),
    *(
        slow(*each)
        for each in (
            (Layout(tp=2), {"remat": "full", "remat_layers": 2, "scan_layers": False}),
            (Layout(row=2, col=2), {"remat": "attention", "remat_layers": 2}),
            (Layout(pp=2, schedule="zb-h1"), {"remat": "dots", "remat_layers": 1}),
            (
                Layout(pp=2, schedule="zb-v", stage_layers=(0, 2, 0, 1)),
                {"remat": "attention", "remat_layers": 1, "scan_layers": False},
            ),
        )
    ),
]


@pytest.mark.parametrize(("layout", "choice"), MIXES, ids=str)
def test_mixed_policies_compute_the_same(layout: Layout, choice: dict[str, Any]) -> None:
    want, found = gradients(Layout()), gradients(layout, **choice)
    assert {name: relative(found[name], x) for name, x in want.items()} == {
        name: pytest.approx(0, abs=1e-6) for name in want
    }


# ---- inputs of matmuls that are gathered again --------------------------------------------------

KEEPING = dataclasses.replace(tiny.SEQUENCE_PARALLEL, keep_gathered=True)
GATHERED = [
    (tiny.SEQUENCE_PARALLEL, {"scan_layers": False}),
    (KEEPING, {}),
    (tiny.SEQUENCE_PARALLEL, {"num_layers": 3, "remat": "full", "remat_layers": 1}),
    (tiny.SEQUENCE_PARALLEL, {"remat": "attention", "family": "bert"}),
    (tiny.SEQUENCE_PARALLEL, {"family": "qwen3", "num_kv_heads": 2}),
    (tiny.SEQUENCE_PARALLEL, tiny.T5),
    (dataclasses.replace(tiny.CONTEXT_PARALLEL, zero=3), {"norm_order": "post"}),
    (dataclasses.replace(tiny.CONTEXT_PARALLEL, dp=1, pp=2, schedule="zb-v"), FOUR),
    (dataclasses.replace(KEEPING, dp=1, pp=2, schedule="zb-h1"), FOUR),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), GATHERED, ids=str)
def test_sequence_parallelism_equals_one_device_whatever_it_keeps(layout, choice) -> None:
    hold(layout, dropout=0.1, **choice)


def test_which_layers_of_a_stack_are_recomputed() -> None:
    model = ModelConfig(num_layers=4, remat="dots", remat_layers=3)
    assert model.remats(4) == (("dots", 3), ("none", 1))
    assert model.remats(2) == (("dots", 2),)
    assert ModelConfig(num_layers=4, remat="dots", remat_layers=0).remats(4) == (("none", 4),)
    assert ModelConfig(num_layers=4, remat="full").remats(4) == (("full", 4),)


@pytest.mark.parametrize(
    ("layers", "words"), [(-1, "a number, 0 or more"), (5, "more than model.num_layers=4")]
)
def test_more_layers_than_there_are_are_refused(layers: int, words: str) -> None:
    with pytest.raises(UserError, match=f"model.remat_layers={layers}.*{words}"):
        ModelConfig(num_layers=4, remat_layers=layers)
