"""A run's files and lines, and the steps at which it evaluates and saves."""

import collections
import dataclasses
import json
import math

import pytest
import yaml
from runs import (
    CONFIG,
    DP2_TP2,
    EVALUATION,
    STEPS,
    numbers,
)
from turns import slow

from jaxptd.api import Run
from jaxptd.checkpoint import Checkpoints
from jaxptd.commands.command_line import load_config
from jaxptd.data import Windows
from jaxptd.distributed.stop import Stop
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.generate import Writer
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.train import Training, main

FIELDS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "skipped",
    "tokens",
    "tokens_per_second",
    "step_time",
    "mfu",
]


@pytest.mark.parametrize(
    ("layout", "described"),
    [
        ((), "1 simulated CPU device, layout one device"),
        slow(DP2_TP2, "4 simulated CPU devices, layout dp=2 tp=2"),
    ],
)
def test_what_a_run_writes(train, layout, described):
    outcome = train("--train.sample_tokens=20", *layout)
    assert (outcome.code, outcome.err) == (0, "")
    lines = (train.run_dir.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        evaluated = EVALUATION if row["step"] in (10, STEPS) else []
        assert list(row) == FIELDS + evaluated
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["mfu"] is None  # simulated devices have no data sheet
        assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_time"])
        if evaluated:
            assert row["perplexity"] == pytest.approx(math.exp(row["validation_loss"]))
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert train.steps == [10, 12]  # checkpoint.keep is 2
    resolved = load_config(train.run_dir.path / "config.yaml")
    asked = load_config(CONFIG, train.options[2:])
    assert resolved.model.vocab_size == 257  # the tokenizer's
    assert dataclasses.replace(resolved.model, vocab_size=None) == asked.model
    assert (resolved.data, resolved.optimizer) == (asked.data, asked.optimizer)
    assert described in outcome.out
    assert f"step 10/{STEPS}  loss {rows[9]['loss']:.4f}" in outcome.out
    assert f"validation {rows[-1]['validation_loss']:.4f}" in outcome.out
    rule, sample = outcome.out.rstrip().rpartition("\n")[2], outcome.out.split("-" * 72)[1]
    assert rule == "-" * 72
    prompt = "\n_380(a, b):"  # the beginning of the held-out text, without its last word
    assert sample.startswith(prompt)
    assert len(sample) > len(prompt)
    assert "\n\n" not in sample


@pytest.mark.slow
def test_the_watchdog_knows_what_a_run_is_in(train, monkeypatch):
    """A long evaluation, or the final wait for a save, would otherwise look like a hang."""
    dogs, found = [], collections.defaultdict(list)

    def made(*args):
        dogs.append(Watchdog(*args))
        return dogs[0]

    def note(owner, name):
        plain = getattr(owner, name)

        def noting(*args, **kwargs):
            found[name].append(dogs[0].beat().phase)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    monkeypatch.setattr("jaxptd.train.Watchdog", made)
    for owner, name in (
        (RunCheckpoints, "start"),
        (Windows, "rows"),
        (Run, "evaluate"),
        (RunCheckpoints, "save"),
        (Training, "_log"),
        (Checkpoints, "wait"),
        (Stop, "asked_anywhere"),
        (Writer, "__call__"),
    ):
        note(owner, name)
    assert main([*train.options, "--train.sample_tokens=2"]) == 0
    assert found["wait"][-2:] == [Phase.SAVING, Phase.STARTING]  # nothing left to wait for
    assert {name: {*phases} for name, phases in found.items()} == {
        "start": {Phase.STARTING},
        "rows": {Phase.READING},
        "evaluate": {Phase.EVALUATING},
        "save": {Phase.SAVING},
        "_log": {Phase.LOOP},
        "wait": {Phase.SAVING, Phase.STARTING},
        "asked_anywhere": {Phase.WAITING},
        "__call__": {Phase.SAMPLING},
    }


@pytest.mark.slow
def test_the_resolved_config_alone_is_the_same_run(train):
    train()
    before = numbers(train.run_dir.metrics())
    config = train.run_dir.path / "config.yaml"
    assert main(["--config", str(config), "--train.steps=14"]) == 0
    assert numbers(train.run_dir.metrics())[:STEPS] == before
    assert yaml.safe_load(config.read_text())["train"]["steps"] == 14
    assert train.steps == [12, 14]


@pytest.mark.slow
def test_zero_means_never(train):
    outcome = train("--train.log_every=0", "--train.eval_every=0", "--checkpoint.every=0")
    assert (outcome.code, outcome.err) == (0, "")
    assert train.run_dir.metrics() == []
    assert train.steps == []
    assert "loss" not in outcome.out


@pytest.mark.slow
def test_evaluations_are_logged_even_if_steps_are_not(train):
    train("--train.log_every=0", "--train.eval_every=4", "--checkpoint.every=0")
    rows = train.run_dir.metrics()
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert all(list(row) == FIELDS + EVALUATION for row in rows)


@pytest.mark.slow
def test_without_a_validation_part_nothing_is_evaluated(train):
    train("--train.log_every=5", "--train.eval_every=4", "--data.validation_fraction=0")
    rows = train.run_dir.metrics()
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert all(list(row) == FIELDS for row in rows)


@pytest.mark.slow
def test_a_run_saves_once_when_it_ends(train):
    train("--checkpoint.every=1000")
    assert train.steps == [STEPS]


@pytest.mark.slow
def test_the_seed_decides(train, whole):
    train("--train.steps=3", "--train.seed=1")
    assert [row["loss"] for row in train.run_dir.metrics()] != [row["loss"] for row in whole[:3]]
