"""The moving average of parameters: by its formula, on every layout, over skipped steps too."""

import dataclasses
from typing import Any, get_args

import jax
import numpy as np
import pytest
import tiny
from one_device import case, hold
from turns import by_turns, slow

from jaxptd import comms
from jaxptd.analysis.memory_model import hosted
from jaxptd.analysis.memory_model import state as bytes_of
from jaxptd.config import OptimizerName
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program, State

DECAY = 0.75
Tensors = dict[str, np.ndarray]


def canonical(program: Program, params: Any) -> Tensors:
    return {name: np.asarray(x) for name, x in program.canonical(params).items()}


def averages(program: Program, steps: int) -> tuple[Tensors, list[Tensors], State]:
    """The average of a run of some steps, the parameters after each of them, and the state."""
    state, after = program.init_state(), []
    for step in range(steps):
        state, _ = program.train_step(state, tiny.batch(step))
        after.append(canonical(program, state["params"]))
    return canonical(program, program.states.averaged(state)), after, state


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(), {}),
        (Layout(dp=2, tp=2, zero=2), {"optimizer": "muon"}),
        (Layout(pp=2, dp=2, zero=3, offload="optimizer"), {"optimizer": "lion"}),
        slow(Layout(dp=2, zero=1), {"optimizer": "adafactor"}),
        slow(Layout(dp=2, offload="parameters"), {"optimizer": "sgd"}),
        slow(Layout(replicas=2, dp=2, zero=1, replica_state="split"), {}),
        slow(Layout(dp=2, zero=2, offload="optimizer", update_on="host"), {}),
        slow(Layout(dp=2, ep=2, zero=1), {**tiny.MOE, "moe.bias_rate": 0.1}),
    ],
    ids=str,
)
def test_an_average_weighs_parameters_by_their_age(layout: Layout, choice: dict) -> None:
    with jax.enable_x64(True):
        program = tiny.program(layout, ema_decay=DECAY, dtype="float64", **choice)
        found, after, _ = averages(program, 3)
    weights = DECAY ** np.arange(len(after))[::-1]
    for name, average in found.items():
        each = [params[name] for params in after]
        expected = np.average(each, axis=0, weights=weights)
        if program.infos[name].counts:
            expected = each[-1]
        np.testing.assert_allclose(average, expected, rtol=1e-12, atol=1e-14, err_msg=name)


AVERAGED = {"ema_decay": DECAY, "dropout": 0.1}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(AVERAGED, 2, dp=2, tp=2, sequence_parallel=True, zero=3),
        *(
            slow(*each.values)
            for each in (
                case(AVERAGED, 2, pp=2, dp=2, zero=2),
                case(AVERAGED | {"optimizer": "muon"}, 2, dp=2, tp=2, zero=1),
                case(AVERAGED | {"optimizer": "adafactor"}, 1, row=2, col=2),
                case(AVERAGED, 2, pp=2, tp=2, offload="optimizer"),
                case(AVERAGED | {"optimizer": "sgd"}, 2, replicas=2, dp=2, zero=1),
            )
        ),
    ],
)
def test_averages_after_two_steps_equal_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), slow(Layout(offload="optimizer"))])
def test_a_skipped_step_leaves_every_bit_of_the_average(layout: Layout) -> None:
    program = tiny.program(layout, ema_decay=DECAY)
    rule = dataclasses.replace(program.config.optimizer, skip_above=1e-9)
    config = dataclasses.replace(program.config, optimizer=rule)
    _, _, state = averages(program, 2)
    before = jax.tree.map(np.asarray, state["optimizer"])
    state, metrics = Program(config, make_mesh(layout)).train_step(state, tiny.batch(2))
    assert int(metrics["skipped"]) == 1
    assert before[-1].steps == 2
    jax.tree.map(np.testing.assert_array_equal, before, state["optimizer"])


def test_a_new_run_averages_from_its_first_parameters() -> None:
    """A state that no step has moved has its parameters as their average, in every memory."""
    program = Program(tiny.config(Layout(dp=2), ema_decay=DECAY), make_mesh(Layout(dp=2)))
    state = program.init_state()
    jax.tree.map(np.testing.assert_array_equal, state["params"], program.states.averaged(state))


LAYOUTS = [
    Layout(dp=2, tp=2, zero=1),
    Layout(dp=2, zero=3, offload="optimizer"),
    Layout(pp=2, dp=2, zero=2),
    Layout(replicas=2, dp=2, zero=1, replica_state="split"),
    Layout(row=2, col=2, offload="parameters"),
]


@pytest.mark.parametrize(("layout", "optimizer"), by_turns(LAYOUTS, get_args(OptimizerName)))
def test_an_average_costs_its_bytes_and_no_message(
    layout: Layout, optimizer: OptimizerName
) -> None:
    program = tiny.program(layout, ema_decay=DECAY, optimizer=optimizer)
    kept = [x for x in jax.tree.leaves(program.abstract_state["optimizer"]) if x.shape]
    found = bytes_of(program.config, program.resolved.zero)
    assert found["optimizer"] == sum(map(_on_device, kept))
    without = tiny.program(layout, optimizer=optimizer)
    less = bytes_of(without.config, without.resolved.zero)
    assert found["optimizer"] - less["optimizer"] == found["parameters"]
    assert all(x.sharding.memory_kind == kept[0].sharding.memory_kind for x in kept)
    assert (hosted(layout, found) >= found["optimizer"]) == ("optimizer" in layout.offloaded)
    assert comms.count(program) == comms.count(without)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


def _on_device(x: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
