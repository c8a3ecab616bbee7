"""The update on the host's CPUs: its results, its copies, and what it refuses."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd.analysis.jaxprs import equations, traced
from jaxptd.config import Config, OptimizerConfig
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.step import Program

HOST = Layout(offload="optimizer", update_on="host")
EVERY = ("optimizer", "parameters", "activations")


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow({"dp": 2, "zero": 1}, {"num_layers": 1, "micro_batches": 1}),
        slow({"dp": 2, "tp": 2, "zero": 1}, {"remat": "full"}),
        slow({"dp": 2, "zero": 3, "offload": EVERY}, {"remat": "dots", "dtype": "bfloat16"}),
        slow({"row": 2, "col": 2, "dp": 2, "zero": 2}, {"optimizer": "lion"}),
        slow({"pp": 2, "dp": 2, "offload": ("optimizer", "parameters")}, {"optimizer": "sgd"}),
        slow({"tp": 2}, {"dtype": "float16", "scan_layers": False}),
    ],
    ids=str,
)
def test_numbers_are_those_of_an_update_on_the_device(layout: dict, choice: dict) -> None:
    """Runs two steps, the second of which reads what the first has written."""
    found = []
    for update_on in ("host", "device"):
        program = tiny.program(dataclasses.replace(HOST, update_on=update_on, **layout), **choice)
        state = program.init_state()
        for step in range(2):
            state, metrics = program.train_step(state, program.place(tiny.batch(step)))
        memories = jax.tree.map(lambda x: x.sharding.memory_kind, state)
        assert memories == program.states.kinds
        found.append((float(metrics["loss"]), jax.tree.map(np.asarray, state["params"])))
    (loss, params), (expected, others) = found
    assert loss == pytest.approx(expected, rel=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), params, others
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2, "zero": 1}, {"tp": 2, "offload": EVERY}], ids=str)
def test_a_step_equals_one_device(layout: dict) -> None:
    hold(dataclasses.replace(HOST, **layout), remat="dots", dropout=0.1)


def copies(program: Program, space: Any) -> int:
    """Number of copies of arrays to this kind of memory in a step."""
    return sum(
        each.primitive.name == "device_put"
        and each.outvars[0].aval.memory_space == space
        and each.invars[0].aval.memory_space != space
        and each.outvars[0].aval.ndim > 0
        for each in equations(traced(program).jaxpr)
    )


def test_gradients_go_down_and_masters_come_up_once() -> None:
    """An update on the device moves masters and moments both ways; passes always need masters."""
    device, host = (
        tiny.program(dataclasses.replace(HOST, tp=2, update_on=where))
        for where in ("device", "host")
    )
    count, space = len(host.infos), jax.memory.Space
    assert [copies(each, space.Device) for each in (device, host)] == [4 * count, count]
    assert [copies(each, space.Host) for each in (device, host)] == [3 * count, count]
    computed = [
        x for x in equations(traced(host).jaxpr) if x.primitive.name.startswith("compute_on")
    ]
    assert len(computed) == count


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_of_whole_matrices_are_refused(name: Any) -> None:
    with pytest.raises(
        UserError, match=f"update_on=host with optimizer.name={name}: it needs whole"
    ):
        Config(layout=HOST, optimizer=OptimizerConfig(name=name))


@pytest.mark.parametrize("offload", ["none", "parameters", "activations"])
def test_only_an_offloaded_optimizer_is_updated_there(offload: Any) -> None:
    with pytest.raises(UserError, match="update_on=host has no effect without layout.offload=opt"):
        tiny.config(dataclasses.replace(HOST, offload=offload), remat="dots")
