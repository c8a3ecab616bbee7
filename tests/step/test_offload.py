"""State and activations in host memory: memory kinds of arrays, and unchanged results."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis.count import count, formula
from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.commands.command_line import load_config
from jaxptd.costs.collective import subtract
from jaxptd.errors import UserError
from jaxptd.generate import Generator, Sampling
from jaxptd.mesh import Layout
from jaxptd.step.state import DEVICE, HOST

GRID = Layout(dp=2, row=2, col=2)
SHARDED = Layout(dp=2, tp=2, zero=3)
PIPELINE = Layout(dp=2, pp=2, zero=1, schedule="zb-h1")
RING = Layout(dp=2, cp=2, zero=2)
REPLICAS = Layout(replicas=2, dp=2, zero=1)


def run(program, steps: int = 2):
    """The state after some steps, and their losses."""
    state, losses = program.init_state(), []
    for step in range(steps):
        state, metrics = program.train_step(state, program.place(tiny.batch(step)))
        losses.append(float(metrics["loss"]))
    return state, losses


def memories(tree) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


def equal(one, other) -> bool:
    return jax.tree.all(
        jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), one, other)
    )


def moves(program, kind: str) -> int:
    """The number of transfers to a kind of memory in the step's program."""
    jaxpr = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
    return str(jaxpr).count(f"devices=(MemorySpace.{kind}")


@pytest.mark.parametrize(
    "layout", [Layout(), *map(slow, (SHARDED, GRID, Layout(dp=2, zero=1), PIPELINE))], ids=str
)
def test_the_state_in_host_memory_changes_no_number(layout: Layout) -> None:
    there = tiny.program(dataclasses.replace(layout, offload="optimizer"), dropout=0.1)
    here = tiny.program(layout, dropout=0.1)
    (state, losses), (plain, expected) = run(there), run(here)
    assert losses == expected
    assert memories(state["params"]) == {HOST} and memories(plain) == {DEVICE}
    assert memories(there.states.abstract["optimizer"]) == memories(state["optimizer"])
    assert HOST in memories(state["optimizer"]) and memories(state["step"]) == {DEVICE}
    assert equal(to_canonical(there, state), to_canonical(here, plain))


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), slow(REPLICAS)], ids=str)
def test_layers_send_gradients_of_shards_that_are_on_the_host(layout: Layout) -> None:
    """With one micro-batch they do it beside the layers, and the gradients are on the device."""
    away = tiny.program(dataclasses.replace(layout, offload="optimizer"), micro_batches=1)
    assert subtract(count(away), formula(away)) == []


def test_a_run_starts_without_a_whole_state_on_the_devices() -> None:
    """The program that creates each array also moves it to host memory."""
    program = tiny.program(Layout(dp=2, offload="optimizer"))
    made = jax.make_jaxpr(program.states.new)(program.abstract_state["params"])
    (call,) = made.eqns
    inside = call.params["jaxpr"].out_avals
    assert {x.memory_space for x in inside if x.ndim} == {jax.memory.Space.Host}


@pytest.mark.slow
def test_in_bfloat16_layers_get_copies_and_the_masters_stay_wide() -> None:
    there = tiny.program(Layout(dp=2, offload="optimizer"), dtype="bfloat16")
    (state, losses), (plain, expected) = (
        run(there),
        run(tiny.program(Layout(dp=2), dtype="bfloat16")),
    )
    assert losses == expected
    assert {str(x.dtype) for x in state["params"].values()} == {"float32"}
    copies = jax.eval_shape(there.resolved.zero.begin_step, plain["params"])
    assert str(copies["blocks.mlp.up.w"].block.dtype) == "bfloat16"
    assert str(copies["tokens.table"].dtype) == "bfloat16"  # as it is read
    assert str(copies["norm.w"].dtype) == "float32"


@pytest.mark.slow
def test_evaluation_and_sampling_read_the_state_from_host_memory() -> None:
    found = []
    for offload in ("none", "optimizer"):
        program = tiny.program(dataclasses.replace(GRID, offload=offload))
        params = program.init_state()["params"]
        assert memories(params) == {DEVICE if offload == "none" else HOST}
        loss = program.eval_step(params, program.place(tiny.batch()))["cross_entropy"]["sum"]
        write = Generator(program, tiny.VOCAB, Sampling(seed=1))
        found.append((float(loss), write(params, [1, 2], 4)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_sampling_needs_no_activations_in_host_memory() -> None:
    away = tiny.program(Layout(offload="activations"), remat="dots")
    here = tiny.program(Layout(), remat="dots")
    ids = [
        Generator(each, tiny.VOCAB, Sampling(seed=1))(each.init_state()["params"], [1, 2], 4)
        for each in (away, here)
    ]
    assert ids[0] == ids[1]


@pytest.mark.slow
@pytest.mark.parametrize("before, after", [("none", "optimizer"), ("optimizer", "none")])
def test_a_checkpoint_is_restored_into_the_other_memory(before, after, tmp_path) -> None:
    one = tiny.program(dataclasses.replace(SHARDED, offload=before))
    other = tiny.program(dataclasses.replace(GRID, offload=after))
    state, _ = run(one, steps=1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, to_canonical(one, state), description={})
    found = from_canonical(other, checkpoints.restore(1, abstract_canonical(other)))
    want = memories(other.init_state())
    assert memories(found) == want == ({HOST, DEVICE} if after == "optimizer" else {DEVICE})
    assert equal(to_canonical(other, found), to_canonical(one, state))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
def test_activations_go_to_host_memory_and_come_back(layout: Layout) -> None:
    there = tiny.program(dataclasses.replace(layout, offload="activations"), remat="dots")
    assert moves(there, "Host") > 0 and moves(there, "Device") > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp=2), GRID, Layout(), SHARDED, RING], ids=str)
def test_activations_in_host_memory_change_no_number(layout: Layout) -> None:
    away = dataclasses.replace(layout, offload="activations")
    there, here = (tiny.program(each, dropout=0.1, remat="dots") for each in (away, layout))
    (state, losses), (plain, expected) = run(there), run(here)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert memories(state) == memories(plain) == {DEVICE}
    assert moves(there, "Host") > 0 and moves(there, "Device") > 0
    assert moves(here, "Host") == moves(here, "Device") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(pp=2, dp=2, zero=1), {"remat_layers": 1}),
        (Layout(pp=2, tp=2, schedule="zb-h1"), {}),
        (Layout(pp=2, schedule="interleaved"), {"num_layers": 4, "scan_layers": False}),
        (Layout(pp=2, schedule="zb-v", dp=2, zero=2), {"num_layers": 4, "dtype": "bfloat16"}),
        (Layout(pp=2, stage_layers=(2, 1), row=2, col=2), {}),
        (Layout(pp=2), tiny.T5),
    ],
    ids=str,
)
def test_pools_in_host_memory_change_no_number(layout: Layout, choice: dict) -> None:
    away = dataclasses.replace(layout, offload="activations")
    choice = {"num_layers": 3, "dropout": 0.1, "remat": "dots", "micro_batches": 2, **choice}
    there, here = (tiny.program(each, **choice) for each in (away, layout))
    assert moves(there, "Host") > 0 and moves(there, "Device") > 0
    assert moves(here, "Host") == moves(here, "Device") == 0
    if choice.get("dtype") is None:
        hold(away, **choice)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, zero=3), GRID, Layout(), Layout(dp=2, zero=2)], ids=str
)
def test_state_and_activations_in_host_memory_change_no_number(layout: Layout) -> None:
    both = dataclasses.replace(layout, offload=("activations", "optimizer"))
    assert str(both).endswith("offload=optimizer,activations")
    there, here = (tiny.program(each, dropout=0.1, remat="dots") for each in (both, layout))
    (state, losses), (plain, expected) = run(there), run(here)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert memories(state["params"]) == {HOST} and memories(plain) == {DEVICE}
    state_only = tiny.program(
        dataclasses.replace(layout, offload="optimizer"), dropout=0.1, remat="dots"
    )
    assert moves(there, "Host") > moves(state_only, "Host") > 0


def test_a_list_of_one_or_none_is_that_name() -> None:
    assert Layout(offload=["optimizer"]) == Layout(offload="optimizer")
    assert Layout(offload=()) == Layout()
    options = ["--layout.offload=[activations,optimizer]", "--model.remat=dots"]
    config = load_config("test-tiny", options)
    assert config.layout.offload == ("optimizer", "activations")


@pytest.mark.parametrize(
    "layout, remat",
    [(Layout(), "none"), (Layout(), "full"), (Layout(pp=2), "full")],
)
def test_activations_that_cannot_be_offloaded_are_refused(layout: Layout, remat: str) -> None:
    with pytest.raises(UserError, match="layout.offload=activations with model.remat"):
        tiny.config(dataclasses.replace(layout, offload="activations"), remat=remat)


def test_an_unknown_memory_is_refused() -> None:
    with pytest.raises(UserError, match="layout.offload='disk': use one of none, optimizer"):
        Layout(offload="disk")  # type: ignore[arg-type]
