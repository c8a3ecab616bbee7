"""Training continues when its output cannot be written."""

import sys

import pytest
from runs import STEPS, numbers

from jaxptd.run import metrics
from jaxptd.train import main

# A shorter run with the learning rates, and therefore the programs, of a whole one.
SAME_RATES = f"--optimizer.decay_steps={STEPS}"


def test_a_full_log_disk_is_said_once_and_the_training_goes_on(train, whole, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        outcome = train()
    assert outcome.code == 0
    assert outcome.err == (
        "warning: cannot write the output (No space left on device); the run continues\n"
    )
    assert numbers(train.run_dir.metrics()) == whole
    assert train.steps == [10, 12]


@pytest.mark.slow
def test_a_closed_stdout_is_no_reason_to_stop(train, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main([*train.options, "--train.steps=2", SAME_RATES, "--checkpoint.every=0"]) == 0
    assert [row["step"] for row in train.run_dir.metrics()] == [1, 2]


@pytest.mark.slow
def test_metrics_that_cannot_be_written_for_a_while_are_written_later(train, monkeypatch):
    append = metrics.append_whole

    def full(path, data):
        if b'"step": 2' in data and b'"step": 3' not in data:
            raise OSError(28, "No space left on device")
        append(path, data)

    monkeypatch.setattr(metrics, "append_whole", full)
    outcome = train("--train.steps=4", SAME_RATES, "--checkpoint.every=0")
    assert outcome.code == 0
    line = f"warning: cannot write {train.run_dir.path}/metrics.jsonl: No space left on device; "
    assert f"{line}the run continues\n" in outcome.out
    assert [row["step"] for row in train.run_dir.metrics()] == [1, 2, 3, 4]
