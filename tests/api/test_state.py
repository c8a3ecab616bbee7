"""A run's state can be replaced, is refused if it does not fit, and never changes silently."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxptd
from jaxptd import Layout, UserError
from jaxptd.api import Run, ShownState


@pytest.fixture(scope="module")
def run(interrupted) -> Run:
    return jaxptd.load(interrupted.run.path, Layout(dp=2, tp=2))


@pytest.fixture(scope="module")
def name(run: Run) -> str:
    """Name of a parameter that tp shards."""
    return next(name for name, x in run.state["params"].items() if "tp" in str(x.sharding.spec))


def batch_of(run: Run) -> Any:
    return run.read(run.data.train, 0)


def with_param(run: Run, name: str, x: Any) -> dict[str, Any]:
    return {**run.state, "params": {**run.state["params"], name: x}}


def test_a_state_that_was_mapped_replaces_the_old_one(run: Run) -> None:
    before = run.state
    halved = jax.tree.map(lambda x: x * 0.5, run.state["params"])
    run.state = {**run.state, "params": halved}
    assert all(type(value) is not ShownState for value in run.arrays.values())
    assert jax.tree.structure(run.arrays) == jax.tree.structure(run.program.abstract_state)
    run.state = jax.tree.map(lambda x: x, before)
    assert jax.tree.leaves(run.arrays) == jax.tree.leaves(before)


@pytest.mark.slow
def test_a_run_goes_on_with_a_state_that_was_mapped(run: Run) -> None:
    before = run.state
    halved = jax.tree.map(lambda x: x * 0.5, run.state["params"])
    run.state = {**run.state, "params": halved}
    assert run.sample("def ", tokens=2).startswith("def ")
    _, metrics, _ = run.program.step_with_gradients(run.state, batch_of(run))
    assert np.isfinite(metrics["loss"])
    run.state = before


def test_arrays_from_elsewhere_are_put_where_the_old_ones_are(run: Run, name: str) -> None:
    old = run.state["params"][name]
    x = jax.device_put(np.asarray(old), old.sharding)
    run.state = with_param(run, name, x)
    assert run.state["params"][name] is x


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "run.state is of type NoneType; use a dict of arrays"),
        (3, "run.state is of type int; use a dict of arrays"),
        ([], "run.state is of type list; use a dict of arrays"),
        ({}, "is missing; use every entry of program.abstract_state"),
        ({"params": {}}, "is missing; use every entry"),
        ({"params": 1, 3: 2}, "run.state has keys of several types"),
    ],
)
def test_anything_but_a_state_is_refused(run: Run, state: Any, words: str) -> None:
    before = run.arrays
    with pytest.raises(UserError) as caught:
        run.state = state
    assert words in str(caught.value)
    assert run.arrays is before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:1], "'] is float32[1"),
        (lambda x: x.astype(jnp.bfloat16), "'] is bfloat16["),
        (np.asarray, "'] is of type ndarray; use a JAX array: jax.device_put(x, old.sharding)"),
        (lambda x: jnp.asarray(np.asarray(x)), "is on other devices, or sharded in another way"),
        (lambda x: None, "'] is missing"),
        (lambda x: {"a": x}, "'] is missing"),
        (lambda x: "x", "'] is of type str; use a JAX array"),
    ],
)
def test_the_first_wrong_entry_is_named(run: Run, name: str, change: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        run.state = with_param(run, name, change(run.state["params"][name]))
    assert str(caught.value).startswith(f"run.state['params']['{name}']")
    assert words in str(caught.value)


def test_unknown_entries_and_other_layouts_are_refused(run: Run, interrupted) -> None:
    with pytest.raises(UserError, match=r"run.state\['more'\] is no entry of this program's state"):
        run.state = {**run.state, "more": run.state["step"]}
    with pytest.raises(UserError, match="is on other devices, or sharded in another way"):
        run.state = interrupted.run.state


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.__setitem__("params", 3),
        lambda state: state["params"].__setitem__("x", 3),
        lambda state: state.__delitem__("params"),
        lambda state: state.update(params=3),
        lambda state: state.__ior__({"params": 3}),
        lambda state: state.setdefault("more", 3),
        lambda state: state.pop("params"),
        lambda state: state.popitem(),
        lambda state: state.clear(),
    ],
)
def test_an_entry_cannot_be_set(run: Run, change: Any) -> None:
    with pytest.raises(UserError, match=r'run.state = {\*\*run.state, "params": params}'):
        change(run.state)


def test_a_copy_of_a_state_is_one(run: Run) -> None:
    for found in (copy.copy(run.state), copy.deepcopy(ShownState(a={"b": 1}))):
        assert type(found) is ShownState
    assert type(run.state | {"step": 3}) is dict


def test_a_step_names_what_is_wrong_with_its_state(run: Run) -> None:
    batch, program = batch_of(run), run.program
    with pytest.raises(UserError, match=r"state is of type NoneType; use a dict of arrays"):
        program.step_with_gradients(None, batch)
    with pytest.raises(UserError, match=r"state\['guard'\].* is missing"):
        program.step_with_gradients({"params": run.state["params"]}, batch)
    with pytest.raises(UserError, match=r"params\['.*'\] is missing"):
        program.eval_step({}, batch)


def test_a_state_whose_memory_was_used_again_is_named(interrupted) -> None:
    run = jaxptd.load(interrupted.run.path)
    old, step, batch = run.state, run.step, batch_of(run)
    stream = run.stream("def ")
    assert next(stream) == "def "
    new, _ = run.program.train_step(old, batch)
    with pytest.raises(UserError, match="was given to train_step"):
        next(stream)
    uses = (run.sample, run.stream, run.evaluate, run.save, lambda: run.step, lambda: repr(run))
    for use in (*uses, lambda: run.program.train_step(old, batch)):
        with pytest.raises(UserError, match="set run.state to the state that train_step returns"):
            use()
    with pytest.raises(UserError, match="was given to train_step"):
        run.state = old
    run.state = new
    assert run.step == step + 1
