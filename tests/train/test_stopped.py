"""A signal ends the step, saves and stops the run; the same command resumes it."""

import signal

import pytest
from runs import (
    EVALUATION,
    numbers,
    signal_in,
)
from turns import slow

from jaxptd.distributed.stop import Stop


@pytest.mark.parametrize("number", [signal.SIGUSR1, slow(signal.SIGINT), slow(signal.SIGTERM)])
def test_a_signal_ends_the_step_saves_and_the_same_command_goes_on(
    train, whole, number, monkeypatch
):
    with monkeypatch.context() as patch:
        signal_in("log", number, step=7, monkeypatch=patch)
        outcome = train()
    assert (outcome.code, outcome.err) == (128 + number, "")
    assert "stopped at step 8: saved; repeat the command to continue" in outcome.out
    assert train.steps == [5, 8]
    train()
    rows = numbers(train.run_dir.metrics())
    stopped = rows.pop(7)
    assert set(EVALUATION) < set(stopped)  # a last step is evaluated
    assert rows == [row for row in whole if row["step"] != 8]
    assert {key: stopped[key] for key in whole[7]} == whole[7]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_what_it_did_before(number, monkeypatch):
    taken = []
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        for each in before:
            signal.signal(each, lambda number, _: taken.append(number))
        for signals in (0, 1, 2, 3):
            stop = Stop()
            with stop.listening():
                for _ in range(signals):
                    signal.raise_signal(number)
            assert stop.asked == bool(signals)
            assert stop.exit_code == (128 + number if signals else 0)
            assert taken == [number] * max(0, signals - 1)
            taken.clear()
            signal.raise_signal(number)
            assert taken.pop() == number  # outside, signals request nothing
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "step"), [("evaluate", 10), ("save", 5)])
def test_whenever_the_signal_comes_the_run_saves_before_it_stops(train, method, step, monkeypatch):
    signal_in(method, signal.SIGTERM, step=step, monkeypatch=monkeypatch)
    outcome = train()
    assert f"stopped at step {step + 1}: saved" in outcome.out
    assert train.steps[-1] == step + 1


@pytest.mark.slow
def test_a_run_that_never_saves_says_so_when_it_is_stopped(train, monkeypatch):
    signal_in("log", signal.SIGTERM, step=7, monkeypatch=monkeypatch)
    outcome = train("--checkpoint.every=0")
    assert outcome.code == 143
    assert "nothing was saved, because checkpoint.every is 0" in outcome.out
    assert train.steps == []


@pytest.mark.slow
def test_a_run_resumed_by_path_says_how_to_go_on(train, monkeypatch):
    train("--train.steps=1")
    path = train.run_dir.checkpoints / "00000001"
    signal_in("log", signal.SIGTERM, step=3, monkeypatch=monkeypatch)
    outcome = train(f"--checkpoint.resume={path}", f"--train.run_dir={train.folder / 'other'}")
    assert "stopped at step 4: saved; use checkpoint.resume=auto to continue" in outcome.out
