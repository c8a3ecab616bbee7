"""Saves killed at any moment: either the previous or the new checkpoint restores."""

import os
import shutil
from pathlib import Path

import pytest
from checkpointing import newest, refuse, run_python, save
from turns import slow

from jaxptd.checkpoint import CheckpointError, arrays, folders


class Watcher:
    """Copies a directory before every change in it: what a kill at that moment would leave."""

    def __init__(self, monkeypatch, directory, copies):
        self.directory, self.copies = directory, copies
        for owner, name in [(os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "write_text")]:
            monkeypatch.setattr(owner, name, self.first(getattr(owner, name)))
        for owner, name in [(arrays.ocp, "save_async"), (folders, "remove")]:
            monkeypatch.setattr(owner, name, self.first(getattr(owner, name)))

    def first(self, function):
        def watched(*args, **kwargs):
            self.copy()
            return function(*args, **kwargs)

        return watched

    def copy(self):
        if self.directory.exists():
            shutil.copytree(self.directory, self.copies / f"{len(os.listdir(self.copies)):04d}")


@pytest.mark.parametrize(
    ("steps", "saved"), [slow((1,), 2), slow((1, 2), 2), slow((2,), 2), slow((1, 2), 3)]
)
def test_killed_anywhere_the_previous_or_the_new_one_restores(tmp_path, monkeypatch, steps, saved):
    save(tmp_path / "run", *steps)
    (tmp_path / "copies").mkdir()
    with monkeypatch.context() as patch:
        watcher = Watcher(patch, tmp_path / "run", tmp_path / "copies")
        save(tmp_path / "run", saved, keep=2)
        watcher.copy()
    found = []
    for copy in sorted((tmp_path / "copies").iterdir()):
        found.append(newest(copy))
        assert found[-1] in (steps[-1], saved)
    assert len(found) > 15
    assert found == sorted(found)
    assert found[-1] == saved
    for copy in sorted((tmp_path / "copies").iterdir())[::3]:  # and a run can resume there
        after = save(copy, 4, keep=2).steps()
        assert after[-1] == 4
        assert sorted(os.listdir(copy)) == [f"{step:08d}" for step in after]
        assert newest(copy) == 4


def test_a_step_killed_while_it_was_replaced_outlives_a_failing_save(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 2)
    (tmp_path / "00000002").rename(tmp_path / ".00000002.replaced")
    assert checkpoints.steps() == [2]
    assert newest(tmp_path) == 2
    with monkeypatch.context() as patch:
        patch.setattr("jaxptd.checkpoint.saving.PendingWrite", refuse)
        with pytest.raises(CheckpointError, match="the last good checkpoint is step 2"):
            save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["00000002"]
    assert newest(tmp_path) == 2


@pytest.mark.parametrize(
    "moment", [slow("arrays.ocp.save_async"), "manifest.seal", slow("folders.sync_folder")]
)
def test_sigkill(tmp_path, moment):
    """Kills a process before, inside and at the end of saving step 2."""
    code = """
        import operator, threading
        from jaxptd import checkpoint
        save(directory, 1)
        *owner, name = sys.argv[2].split(".")
        owner = operator.attrgetter(".".join(owner))(checkpoint)
        function = getattr(owner, name)
        def killed(*args):
            threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
            return function(*args)
        setattr(owner, name, killed)
        while True:
            save(directory, 2)
    """
    done = run_python(code, tmp_path, moment, 0.005)
    assert done.returncode == -9, done.stderr
    assert newest(tmp_path) in (1, 2)
    after = save(tmp_path, 3)
    assert after.steps() in ([1, 3], [1, 2, 3])
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
