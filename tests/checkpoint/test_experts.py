"""Continues a run with experts on another number of devices along ep, with other options."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program, State
from jaxptd.step.expert_load import LOAD

STEPS = 4
EACH = ("loss", "grad_norm", "balance_loss", LOAD)  # metrics
CHOICE: dict[str, Any] = tiny.MOE | {"moe.bias_rate": 0.125, "moe.balance_loss": 0.1}


@functools.cache
def program(layout: Layout, layers: int) -> tiny.FromZeros:
    config = tiny.config(layout, micro_batches=layout.pp, num_layers=layers, **CHOICE)
    return tiny.FromZeros(config, make_mesh(layout))


def beginning(layers: int) -> State:
    """One-device state with random parameters."""
    state, draw = program(Layout(), layers).init_state(), np.random.default_rng(3).normal
    params = {name: 0.2 * draw(size=p.shape).astype(p.dtype) for name, p in state["params"].items()}
    drawn = {name: jax.device_put(x, state["params"][name].sharding) for name, x in params.items()}
    return jax.tree.map(jnp.copy, {**state, "params": drawn})  # a step donates each array once


def step(made: Program, state: State, number: int) -> tuple[State, list[np.ndarray]]:
    """State after step `number` (counted from 0), and the step's metrics."""
    state, metrics = made.train_step(state, tiny.batch(number))
    return state, [np.asarray(metrics[name]) for name in EACH]


@functools.cache
def uninterrupted(layers: int) -> tuple[Any, list[list[np.ndarray]]]:
    """Canonical state of one device after all steps, and each step's metrics."""
    made, state, found = program(Layout(), layers), beginning(layers), []
    for number in range(STEPS):
        state, metrics = step(made, state, number)
        found.append(metrics)
    return jax.tree.map(np.asarray, to_canonical(made, state)), found


@pytest.mark.parametrize(
    ("second", "third"),
    [
        (Layout(ep=4, zero=1), Layout(dp=2, ep=2, zero=3)),
        slow(Layout(ep=4, zero=3), Layout(pp=2, dp=2, ep=2, zero=2)),
        slow(Layout(pp=2, ep=4), Layout(ep=2, tp=2, experts="whole", zero=1)),
    ],
    ids=str,
)
def test_from_ep_1_to_4_to_2_it_goes_on_as_if_nothing_had_been(
    second: Layout, third: Layout, tmp_path: Path
) -> None:
    """Biases that choose experts move by signs only, so their bits are equal."""
    layers = max(second.pp, third.pp)
    expected, metrics = uninterrupted(layers)
    checkpoints, state = Checkpoints(tmp_path, keep=STEPS), beginning(layers)
    made = program(Layout(), layers)
    for number, there in enumerate((Layout(), second, third, third)):
        if (other := program(there, layers)) is not made:
            checkpoints.save(number, to_canonical(made, state), description={})
            restored = checkpoints.restore(number, abstract_canonical(other))
            state, made = from_canonical(other, restored), other
        state, found = step(made, state, number)
        for name, x, wanted in zip(EACH, found, metrics[number], strict=True):
            np.testing.assert_allclose(x, wanted, rtol=1e-5, err_msg=f"{name} of step {number}")
    params = jax.tree.map(np.asarray, to_canonical(made, state)["params"])
    biases = [name for name in params if name.endswith("load_bias")]
    assert biases
    for name in biases:
        assert params[name].tobytes() == expected["params"][name].tobytes()
