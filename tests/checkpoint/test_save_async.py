"""Saves in the background: the step may change the state, and a failure is raised once."""

import os
import threading

import jax
import numpy as np
import pytest
from checkpointing import (
    abstract,
    assert_same,
    disk_full,
    make_mesh,
    make_state,
    put,
    run_python,
    save,
)
from turns import slow

from jaxptd.checkpoint import CheckpointError, Checkpoints, manifest
from jaxptd.checkpoint.checkpoints import GRACE, Background


class Held:
    """Replaces a function with one that waits for `let_go` before it calls the original."""

    def __init__(self, monkeypatch, owner, name):
        self.called, self.let_go, self.times = threading.Event(), threading.Event(), 0
        self._function = getattr(owner, name)
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args, **kwargs):
        self.times += 1
        self.called.set()
        assert self.let_go.wait(60)
        return self._function(*args, **kwargs)


@pytest.fixture
def sealing(monkeypatch):
    held = Held(monkeypatch, manifest, "seal")
    yield held
    held.let_go.set()


def test_the_caller_goes_on_while_files_are_written(tmp_path, sealing):
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.save_async(1, make_state(1), description={})
    assert sealing.called.wait(60)  # while this thread goes on
    assert checkpoints.steps() == []
    sealing.let_go.set()
    checkpoints.wait()
    assert checkpoints.steps() == [1]
    assert_same(checkpoints.restore(1, abstract(make_state())), make_state(1))
    checkpoints.wait()  # nothing is left to wait for


def test_what_the_step_donates_is_saved_as_it_was(tmp_path):
    sharding = make_mesh(2, 4)
    step = jax.jit(lambda state: jax.tree.map(lambda x: -x, state), donate_argnums=0)
    state = {"w": put(sharding, np.arange(2.0**18, dtype=np.float32).reshape(512, 512), "dp", "tp")}
    before, state = state, jax.block_until_ready(step(step(state)))
    assert before["w"].is_deleted()
    checkpoints = Checkpoints(tmp_path, keep=9)
    for number in range(1, 6):
        state = jax.block_until_ready(step(state))
        checkpoints.save_async(number, state, description={})
        state = jax.block_until_ready(step(step(step(step(state)))))  # reuses its buffers
    checkpoints.wait()
    for number in range(1, 6):
        expected = np.arange(2.0**18, dtype=np.float32).reshape(512, 512) * (-1) ** number
        assert_same(checkpoints.restore(number, abstract(state)), {"w": expected})


def test_a_second_save_waits_for_the_first(tmp_path, sealing):
    checkpoints = Checkpoints(tmp_path, keep=9)
    checkpoints.save_async(1, make_state(1), description={})
    assert sealing.called.wait(60)
    second = Background(lambda: checkpoints.save_async(2, make_state(2), description={}))
    assert not second.wait(0.3)
    assert sealing.times == 1
    sealing.let_go.set()
    second.wait()
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]


def fail_once(monkeypatch):
    """Makes the disk full for the next save only."""
    seal = manifest.seal

    def full(*_):
        monkeypatch.setattr(manifest, "seal", seal)
        disk_full()

    monkeypatch.setattr(manifest, "seal", full)


@pytest.mark.parametrize("end", ["save", "wait", "with"])
def test_a_failure_is_raised_once_at_the_next_save_or_at_the_end(tmp_path, monkeypatch, end):
    checkpoints = save(tmp_path, 1)
    fail_once(monkeypatch)
    checkpoints.save_async(2, make_state(2), description={})
    with pytest.raises(CheckpointError) as caught:
        if end == "save":
            checkpoints.save_async(3, make_state(3), description={})
        elif end == "wait":
            checkpoints.wait()
        else:
            with checkpoints:
                pass
    assert str(caught.value) == (
        f"could not save step 2 in {tmp_path}: No space left on device; "
        "the last good checkpoint is step 1"
    )
    assert os.listdir(tmp_path) == ["00000001"]
    checkpoints.save(3, make_state(3), description={})
    assert checkpoints.steps() == [1, 3]


def test_an_error_of_the_run_is_not_hidden_by_one_of_the_writer(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    fail_once(monkeypatch)
    with pytest.raises(ZeroDivisionError), checkpoints:
        checkpoints.save_async(1, make_state(1), description={})
        _ = 1 / 0
    with pytest.raises(ZeroDivisionError), checkpoints:
        checkpoints.save_async(2, make_state(2), description={})
        _ = 1 / 0
    assert checkpoints.steps() == [2]  # leaving the context waited for the save


def test_nothing_is_left_running(tmp_path):
    before = set(threading.enumerate())
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save_async(step, make_state(step), description={})
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("error", [slow(""), "KeyboardInterrupt"])
def test_the_process_ends_quietly(tmp_path, error):
    """Ctrl-C during a save also ends quietly, after the save completes."""
    code = """
        with Checkpoints(directory, keep=9) as checkpoints:
            checkpoints.save_async(1, make_state(1), description={})
            checkpoints.save_async(2, make_state(2), description={})
            if sys.argv[2]:
                raise KeyboardInterrupt
    """
    done = run_python(code, tmp_path, error)
    assert done.stderr.splitlines()[-1:] == ([error] if error else [])
    assert done.stderr.count("Traceback") == bool(error)
    assert Checkpoints(tmp_path, keep=9).steps() == [1, 2]


def test_ctrl_c_does_not_wait_for_ever(tmp_path, monkeypatch, sealing):
    monkeypatch.setattr("jaxptd.checkpoint.checkpoints.GRACE", 0.1)
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save_async(1, make_state(1), description={})
        raise KeyboardInterrupt
    assert checkpoints.steps() == []
    sealing.let_go.set()
    checkpoints.wait()


def test_ctrl_c_while_it_waits_leaves_the_save_its_time(tmp_path, monkeypatch, sealing):
    """A second Ctrl-C usually comes while the run waits for its last save."""
    waits = []

    def interrupted(self, seconds=None):
        waits.append(seconds)
        if len(waits) == 1:
            raise KeyboardInterrupt
        sealing.let_go.set()
        return wait(self, seconds)

    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save_async(1, make_state(1), description={})
        wait = Background.wait
        monkeypatch.setattr(Background, "wait", interrupted)
        checkpoints.wait()
    assert waits[:2] == [None, GRACE]
    assert checkpoints.steps() == [1]


@pytest.mark.slow
def test_sigkill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    code = """
        from jaxptd.checkpoint import manifest
        save(directory, 1)
        manifest.seal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        checkpoints = Checkpoints(directory, keep=9)
        checkpoints.save_async(2, make_state(2), description={})
        while True:
            pass
    """
    assert run_python(code, tmp_path).returncode == -9
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert checkpoints.steps() == [1]
    found = checkpoints.restore_newest(abstract(make_state()), report=pytest.fail)
    assert found[0] == 1


def test_a_failed_start_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxptd.checkpoint.saving.PendingWrite", disk_full)
    with pytest.raises(CheckpointError, match="No space left on device; .* none: this was the"):
        Checkpoints(tmp_path, keep=1).save_async(1, make_state(1), description={})
    assert os.listdir(tmp_path) == []
