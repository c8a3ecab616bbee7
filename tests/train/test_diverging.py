"""Steps that are not finite are skipped, and such a state is never saved."""

import functools
import math

import numpy as np
import pytest
from runs import (
    STEPS,
    Killed,
    kill_after,
    numbers,
)
from turns import slow

from jaxptd.run.folder import RunDir
from jaxptd.step import Program
from jaxptd.train import main


def poison(monkeypatch: pytest.MonkeyPatch, *, step: int) -> None:
    """Turns parameters into NaN in `step`, like gradients that overflow."""
    original = Program.train_step.func

    def train_step(program):
        healthy = original(program)

        def poisoned(state, batch):
            if int(state["step"]) + 1 == step:
                params = {name: p * math.nan for name, p in state["params"].items()}
                state = {**state, "params": params}
            return healthy(state, batch)

        return poisoned

    poisoned = functools.cached_property(train_step)
    poisoned.__set_name__(Program, "train_step")
    monkeypatch.setattr(Program, "train_step", poisoned)


@pytest.mark.parametrize(
    ("log", "evaluate", "save", "good"),
    [
        (1, 10, 5, [5]),
        slow(5, 0, 7, []),
        slow(0, 0, 7, []),
        slow(0, 7, 7, []),
        slow(0, 0, 3, [3, 6]),
        slow(0, 0, 0, []),
    ],
)
def test_a_state_that_is_not_finite_is_never_saved(train, log, evaluate, save, good, monkeypatch):
    poison(monkeypatch, step=7)
    every = {"train.log_every": log, "train.eval_every": evaluate, "checkpoint.every": save}
    strict = "--train.max_skipped=1"
    line = train.refused(strict, *(f"--{key}={value}" for key, value in every.items()))
    last = f"the last good checkpoint is step {good[-1]}" if good else "there is no checkpoint"
    assert "loss is nan at step 7, the last of 1 skipped steps in a row (" in line
    assert last in line
    assert train.steps == good
    assert all(row["step"] < 7 for row in train.run_dir.metrics())


@pytest.mark.slow
def test_the_last_step_is_looked_at_too(train, monkeypatch):
    poison(monkeypatch, step=STEPS)
    never = ("--train.log_every=0", "--train.eval_every=0", "--checkpoint.every=0")
    assert "parameter blocks." in train.refused(*never)
    again = ("--train.max_skipped=1", f"--train.run_dir={train.folder / 'again'}")
    assert f"loss is nan at step {STEPS}" in train.refused(*never, *again)


@pytest.mark.slow
def test_parameters_that_are_no_numbers_are_not_saved_however_many_steps_may_be_skipped(
    train, monkeypatch
):
    poison(monkeypatch, step=7)
    line = train.refused("--train.eval_every=0")
    assert f" is not finite after step {STEPS}, which is not saved; start again in another" in line
    assert train.steps == [5]  # not 10: that is no time to replace an older one
    rows = train.run_dir.metrics()
    assert [row["skipped"] for row in rows] == [0] * 6 + [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows[6:]] == [None] * 6


@pytest.mark.slow
def test_explosions_are_skipped_and_a_killed_run_remembers_them(train, whole, monkeypatch):
    limit = float(np.median([row["grad_norm"] for row in whole]))
    skip = f"--optimizer.skip_above={limit}"
    with monkeypatch.context() as patch:
        kill_after(9, patch)
        with pytest.raises(Killed):
            main([*train.options, skip])
    train(skip)
    rows = train.run_dir.metrics()
    steps = np.diff([0] + [row["skipped"] for row in rows])
    assert steps.tolist() == [int(row["grad_norm"] > limit) for row in rows]
    assert 0 < steps.sum() < STEPS
    other = f"--train.run_dir={train.folder / 'other'}"
    outcome = train(skip, other)
    assert f" {steps.sum()} skipped" in outcome.out
    assert numbers(RunDir(train.folder / "other").metrics()) == numbers(rows)


@pytest.mark.slow
def test_a_learning_rate_that_is_too_large_says_so(train):
    options = ("--checkpoint.every=1", "--train.eval_every=0", "--train.max_skipped=4")
    line = train.refused("--optimizer.learning_rate=2e9", *options)
    assert " is nan at step 6, the last of 4 skipped steps in a row " in line
    assert "the last good checkpoint is step 2; " in line
    assert "with a smaller optimizer.learning_rate" in line
    assert train.steps == [1, 2]
