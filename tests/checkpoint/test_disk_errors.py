"""Full disks and failing writes give one line and leave earlier checkpoints unchanged."""

import os
from pathlib import Path

import pytest
from checkpointing import disk_full, make_state, newest, refuse, run_python, save

from jaxptd.checkpoint import CheckpointError
from jaxptd.checkpoint import saving as save_module


@pytest.mark.parametrize("place", ["before", "arrays", "files", "manifest", "rename"])
def test_a_full_disk_leaves_the_previous_ones(tmp_path, monkeypatch, place):
    checkpoints = save(tmp_path, 1, 2)

    owner, name = {
        "before": (Path, "mkdir"),
        "arrays": (save_module, "PendingWrite"),
        "files": (os, "fsync"),
        "manifest": (Path, "write_text"),
        "rename": (Path, "rename"),
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, disk_full)
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 3)
    assert str(caught.value) == (
        f"could not save step 3 in {tmp_path}: No space left on device; "
        "the last good checkpoint is step 2"
    )
    assert checkpoints.steps() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]
    assert newest(tmp_path) == 2
    assert save(tmp_path, 3).steps() == [1, 2, 3]


@pytest.mark.slow
def test_a_real_write_that_fails_is_one_line(tmp_path):
    """Limits file sizes, from small to large, so that orbax fails in different places."""
    code = """
        import resource
        save(directory, 1)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (0, 100, 200, 500, 1000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            try:
                save(directory, 2)
            except CheckpointError as error:
                print(error)
            assert os.listdir(directory) == ["00000001"], os.listdir(directory)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert newest(directory) == 1
    """
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    line = (
        f"could not save step 2 in {tmp_path}: File too large; the last good checkpoint is step 1"
    )
    assert done.stdout.splitlines() == [line] * 5
    assert done.stderr == ""
    assert newest(tmp_path) == 1


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"file.*: Not a directory"):
            save(directory, 1)
    monkeypatch.setattr(Path, "mkdir", refuse)
    words = "could not save step 1 in .*: Permission denied; the last good checkpoint is none"
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path / "c", 1)


def test_old_checkpoints_that_cannot_be_deleted(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1, keep=1)
    monkeypatch.setattr(Path, "rename", refuse_to_move("00000001"))
    with pytest.raises(
        CheckpointError, match=r"saved step 2 .*could not delete the old step 1: Permission denied"
    ):
        checkpoints.save(2, make_state(2), description={})
    assert checkpoints.steps() == [1, 2]
    assert newest(tmp_path) == 2


def refuse_to_move(name):
    """Makes `Path.rename` fail for `name`."""
    rename = Path.rename

    def guarded(self, to):
        if self.name == name:
            refuse()
        return rename(self, to)

    return guarded
