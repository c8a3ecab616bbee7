"""Verification detects broken layouts and names the first wrong tensor."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
import tiny
from jax import lax
from one_device import verified
from turns import slow

from jaxptd import collectives
from jaxptd.analysis import verification
from jaxptd.analysis.comparison import Choices, FirstSteps, Outcome, Row, compare
from jaxptd.analysis.verification import OneStep, Report, with_precision
from jaxptd.collectives import varying_axes
from jaxptd.layers import for_layout, fp8
from jaxptd.matmul import ring
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.params import ParamInfo
from jaxptd.step import Program, body, resolved
from jaxptd.step import state as step_state
from jaxptd.step.state import HOST
from jaxptd.zero.zero import Zero

RING_STEPS = dataclasses.replace(tiny.SEQUENCE_PARALLEL, collective_matmul=True)
FAST = {"scan_layers": False, "vocab_multiple": 32}


@pytest.mark.slow
def test_bfloat16_leaves_no_room_for_a_lost_part(monkeypatch) -> None:
    """A ring that runs backwards mixes in blocks of the wrong tokens."""
    monkeypatch.setattr(ring, "shift", lambda x, axis: collectives.shift(x, axis, -1))
    wrong = verified(RING_STEPS, "bfloat16", **FAST).wrong
    assert wrong[0].name == "loss" or wrong[0].what == "gradient"
    assert max(row.error / row.allowed for row in wrong) > 3


def test_wider_precisions_take_another_kernel_than_cudnn() -> None:
    config = tiny.config(Layout(), dtype="bfloat16", attention="cudnn")
    wide = {dtype: with_precision(dtype, config).model for dtype in ("float64", "float32")}
    assert {dtype: model.attention for dtype, model in wide.items()} == dict.fromkeys(wide, "auto")
    assert with_precision("bfloat16", config).model.attention == "cudnn"


def test_64_bits_take_other_kernels_than_triton_s() -> None:
    config = tiny.config(Layout(), kernels="triton")
    found = {each: with_precision(each, config).model.kernels for each in ("float64", "float32")}
    assert found == {"float64": "auto", "float32": "triton"}


def test_kernels_of_our_own_are_not_their_own_reference(monkeypatch) -> None:
    seen = []

    def noted(config, *_):
        seen.append(config)
        raise InterruptedError

    monkeypatch.setattr(verification, "_one_step", noted)
    with pytest.raises(InterruptedError):
        verification.one_device(tiny.config(Layout(dp=2), kernels="triton"), dtype="bfloat16")
    assert [(c.layout, c.model.kernels, c.model.dtype) for c in seen] == [
        (Layout(), "xla", "float32")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2, tp=2), Layout(pp=2, dp=2, schedule="zb-h1"), Layout(cp=2, row=1, col=2)],
    ids=str,
)
@pytest.mark.parametrize("family", ["gpt", "qwen3"])
def test_float16_is_verified_with_its_scale(layout, family) -> None:
    found = verified(layout, "float16", family=family, micro_batches=2)
    assert found.wrong == []
    assert found.worst_gradient < 0.02


@pytest.mark.slow
def test_a_scale_that_overflows_is_halved_until_a_step_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(step_state, "FIRST_SCALE", 2.0**30)
    assert verified(Layout(dp=2), "float16", num_layers=1).wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2),
        Layout(pp=2, dp=2, schedule="zb-h1"),
        tiny.SEQUENCE_PARALLEL,
        RING_STEPS,
        Layout(row=2, col=2, dp=2, zero=2),
        Layout(row=2, col=2, matmul2d="cannon", attention2d="blocks"),
    ],
    ids=str,
)
def test_8_bit_products_are_verified(layout) -> None:
    found = verified(layout, "fp8", products="fp8", micro_batches=2)
    assert found.wrong == []
    assert 0.02 < found.worst_gradient < 0.25  # the error of 8 bits, and no larger


@pytest.mark.slow
def test_8_bit_products_with_a_scale_that_is_not_undone_are_found(monkeypatch) -> None:
    double = fp8.quantised
    monkeypatch.setattr(
        fp8, "quantised", lambda x, to: (scaled := double(x, to))._replace(scale=2 * scaled.scale)
    )
    wrong = verified(Layout(), "fp8", products="fp8", num_layers=1).wrong
    assert any(row.what == "gradient" for row in wrong)


def form(layout: Layout, **changes):
    return dataclasses.replace(for_layout.make_tensor_parallel(layout), **changes)


def wrong_block(x, axis, dim=1):
    """Reduce-scatter that gives each device its neighbour's block."""
    size = lax.axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    return lax.ppermute(collectives.reduce_scatter(x, axis, dim), axis, ring)


def summed_twice(x, axis):
    return 2 * collectives.reduce_from(x, axis)


@pytest.mark.parametrize("ring", [slow("zigzag"), slow("rsa"), slow("blockwise")])
def test_a_ring_that_turns_the_wrong_way_is_found(monkeypatch, ring) -> None:
    def backwards(x, axis, by=1):
        size = lax.axis_size(axis)
        return lax.ppermute(x, axis, [((i + 1) % size, i) for i in range(size)])

    monkeypatch.setattr("jaxptd.attention.attend.shift", backwards)
    assert verified(Layout(cp=4, ring=ring)).wrong


BROKEN = [
    pytest.param(Layout(tp=2), {"reduce_output": summed_twice}, "loss", id="all-reduced twice"),
    slow(
        tiny.SEQUENCE_PARALLEL,
        {"reduce_output": wrong_block},
        "loss",
        id="scattered to the neighbour",
    ),
]


@pytest.mark.parametrize(("layout", "changes", "first"), BROKEN)
def test_a_broken_collective_is_found(monkeypatch, layout, changes, first) -> None:
    broken = partial(lambda cut, **_: form(cut, **changes) if cut.tp > 1 else form(cut))
    monkeypatch.setattr(resolved, "make_tensor_parallel", broken)
    found = verified(layout, num_layers=1, dropout=0.0)
    assert found.wrong[0].name == first
    assert "NOT equal" in found.verdict


def test_where_all_experts_are_chosen_rounding_tips_no_choice() -> None:
    """Of three layers the first is dense, with margins of zero; the last has one expert."""
    margins = np.broadcast_to([0.0, 0.5, np.inf], (2, 4, 3))
    choose = {"start": margins, "changed": margins + np.array([0, 0.25, 0])}
    found = Choices.of(
        lambda tensors: (np.zeros((2, 4, 3, 1), int), choose[tensors]), "start", ["changed"]
    )
    np.testing.assert_array_equal(found.noise, [0, 0.25, 0])
    assert found.smallest == 0.5
    row = Row("blocks.mlp.up.w", "gradient", 1e-8, 1e-6)
    for margin, words in ((0.5, "smallest margin 5.0e-01"), (np.inf, "every token passes all ex")):
        verdict = Report(Layout(), "float32", [row], margin).verdict
        assert f"given its choices ({words}" in verdict
    only = dataclasses.replace(found, margins=margins[..., 2:])
    assert only.smallest == np.inf


def test_an_owed_sum_that_is_not_made_cannot_even_be_traced(monkeypatch) -> None:
    monkeypatch.setattr(Zero, "end_step", lambda self, grads, owed: grads)
    with pytest.raises(ValueError, match="varying|replicat"):
        verified(Layout(dp=2))


@pytest.mark.slow
def test_a_gradient_scaled_wrongly_is_named(monkeypatch) -> None:
    """Only one tensor is wrong, and only on the layout under test; the report names it first."""
    end_step = Zero.end_step

    def scaled(self, grads, owed):
        done = end_step(self, grads, owed)
        return {**done, "norm.b": done["norm.b"] * (1 + 1e-9 * (self.sizes[Axis.DP] > 1))}

    monkeypatch.setattr(Zero, "end_step", scaled)
    found = verified(Layout(dp=2))
    assert [row.name for row in found.wrong if row.what == "gradient"] == ["norm.b"]


@pytest.mark.slow
def test_an_update_that_its_gradient_does_not_explain_is_named(monkeypatch) -> None:
    clip = body.clip

    def lossy(grads, norm, limit):
        done = clip(grads, norm, limit)
        cut = lax.axis_size(Axis.DP) > 1
        return {**done, "norm.w": -done["norm.w"]} if cut else done

    monkeypatch.setattr(body, "clip", lossy)
    found = verified(Layout(dp=2))
    assert [(row.name, row.what) for row in found.wrong] == [("norm.w", "parameter")]


@pytest.mark.slow
def test_moments_on_another_device_are_found(monkeypatch) -> None:
    """Moments start at zero, so the first step cannot show it."""
    updated = body.updated

    def misplaced(*args):
        new = updated(*args)
        ring = [(i, (i + 1) % lax.axis_size(Axis.DP)) for i in range(lax.axis_size(Axis.DP))]
        moved = jax.tree.map(
            lambda m: lax.ppermute(m, Axis.DP, ring) if Axis.DP in varying_axes(m) else m,
            new["optimizer"],
        )
        return {**new, "optimizer": moved}

    monkeypatch.setattr(body, "updated", misplaced)
    wrong = verified(Layout(dp=2, zero=1)).wrong
    assert wrong
    assert {row.what for row in wrong} == {"parameter"}


def test_the_tensor_that_differs_is_named() -> None:
    """Two outcomes in float64 differ by more than rounding explains."""
    draw = np.random.default_rng(0)
    tensors = {name: draw.normal(size=6) for name in ("norm.w", "blocks.0.mlp.up.w")}
    right = Outcome(2.0, 1.0, 0.1, tensors, tensors, tensors)
    steps = FirstSteps(tiny.OPTIMIZER, {}, float(np.finfo(np.float64).eps))
    assert all(row.equal for row in compare(right, [(right, right)], right, steps=steps))
    for what, field in (("gradient", "gradients"), ("parameter", "parameters")):
        other = {"norm.w": tensors["norm.w"] * (1 + 1e-9)}
        wrong = dataclasses.replace(right, **{field: tensors | other})
        rows = compare(right, [(right, right)], wrong, steps=steps)
        assert ("norm.w", what) in [(row.name, row.what) for row in rows if not row.equal]
        assert all(row.equal for row in rows if row.name != "norm.w")
    rows = compare(
        right, [(right, right)], dataclasses.replace(right, loss=2.0 + 1e-9), steps=steps
    )
    assert [row.name for row in rows if not row.equal] == ["loss"]


def test_the_norm_of_all_gradients_may_differ_as_sums_of_so_many_squares_do() -> None:
    """Two orders of adding n squares in 32 bits: their roots differ, but both are right."""
    n, one = 96 * 96, np.ones(1)
    info = ParamInfo((1, 96, 96), (1, 96, 96), (None,) * 3, False)
    squares = np.random.default_rng(2).normal(size=n).astype(np.float32) ** 2
    one_by_one = np.sqrt(np.add.accumulate(squares)[-1])
    by_rows = np.sqrt(np.add.accumulate(squares.reshape(96, 96), axis=1)[:, -1].sum())

    def equal(norm: float, infos: dict[str, ParamInfo]) -> bool:
        right = Outcome(2.0, float(by_rows), 0.1, {"w": one}, {"w": one}, {"w": one})
        steps = FirstSteps(tiny.OPTIMIZER, infos, float(np.finfo(np.float32).eps))
        found = dataclasses.replace(right, grad_norm=float(norm))
        return all(row.equal for row in compare(right, [(right, right)], found, steps=steps))

    assert equal(one_by_one, {"w": info})
    assert not equal(one_by_one, {})  # too much for a model without so many elements
    assert not equal(by_rows * np.sqrt(1 + 1 / n), {"w": info})  # a mean element counted twice


def test_of_a_gradient_that_is_noise_only_the_size_is_compared() -> None:
    """A router with one choice: its gradient vanishes, and each program rounds it otherwise."""
    steps = FirstSteps(tiny.OPTIMIZER, {}, 1e-16)
    other, p = np.array([1.0, 2.0]), {"v": np.ones(2), "w": np.ones(3)}

    def outcome(noise: list[float]) -> Outcome:
        return Outcome(2.0, 2.0, 0.1, {"v": other, "w": np.array(noise)}, p, p)

    right, rounded = outcome([1e-17, -2e-17, 3e-17]), outcome([-1e-17, 1e-17, 2e-17])

    def worst(noise: list[float]) -> Row:
        rows = compare(right, [(rounded, right)], outcome(noise), steps=steps)
        return max((x for x in rows if x.name == "w"), key=lambda x: x.error / x.allowed)

    assert worst([2e-16, 1e-16, -3e-16]).equal  # far larger than here, but still a rounding error
    assert not worst([2e-15, 1e-16, -3e-16]).equal
    rows = compare(right, [(right, right)], outcome([2e-17, -2e-17, 3e-17]), steps=steps)
    assert not all(row.equal for row in rows)  # not noise: a rounding error does not change it


@pytest.mark.parametrize("size", [1e-3, 1e-5])
def test_a_small_gradient_that_16_bits_round_off_is_not_noise(size: float) -> None:
    """Its one device computes in 32 bits, of which it is many. So the update must follow it."""
    steps, other = FirstSteps(tiny.OPTIMIZER, {}, 2.0**-8), np.float32([1, 2])
    small = size * np.float32([1, -2, 3])

    def outcome(g: np.ndarray, moved: float = 0.0) -> Outcome:
        p = {"v": np.ones(2, np.float32), "w": np.float32([1 + moved, 1, 1])}
        return Outcome(2.0, 2.0, 1e-3, {"v": other, "w": g}, p, p)

    def wrong(found: Outcome) -> list[str]:
        rows = compare(outcome(small), [(outcome(0.5 * small), outcome(small))], found, steps=steps)
        return [row.what for row in rows if not row.equal]

    assert wrong(outcome(1.9 * small)) == []
    assert wrong(outcome(4 * small)) == ["gradient"]
    assert wrong(outcome(small, moved=0.02)) == ["parameter"]


def test_not_a_number_is_not_equal() -> None:
    assert not Row("x", "gradient", float("nan"), 1.0).equal


@pytest.mark.slow
def test_rows_come_in_the_order_of_backward() -> None:
    names = [row.name for row in verified(Layout(dp=2)).rows if row.what == "gradient"]
    assert names[0].startswith("norm")
    assert names[-1] in ("tokens.table", "positions.table")
    layers = [int(name.split(".")[1]) for name in names if name.startswith("blocks")]
    assert layers == sorted(layers, reverse=True)
    assert np.unique(layers).tolist() == [0, 1]


def test_a_step_is_verified_from_parameters_in_the_memory_that_training_has(monkeypatch) -> None:
    """Replaces the step by one that changes nothing, so only verify's work is compiled."""
    found = []

    def unchanged(state, batch):
        found.append({x.sharding.memory_kind for x in state["params"].values()})
        metrics = dict.fromkeys(("loss", "grad_norm", "learning_rate"), 0.0)
        return state, metrics, state["params"]

    monkeypatch.setattr(Program, "step_with_gradients", property(lambda _: unchanged))
    layout = Layout(pp=2, offload="optimizer", stage_layers=(2, 1))
    program = tiny.FromZeros(tiny.config(layout, num_layers=3), make_mesh(layout))
    draw = np.random.default_rng(0)
    start = {n: draw.normal(size=info.shape).astype("f4") for n, info in program.infos.items()}
    outcome = OneStep(program).run(start)
    assert found == [{HOST}] * 2
    assert np.array_equal(outcome.parameters["blocks.2.mlp.up.w"], start["blocks.mlp.up.w"][2])
