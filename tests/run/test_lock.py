"""One run at a time uses a run directory, and stale locks are recognised."""

import dataclasses
import errno
import json
import os
import threading
from pathlib import Path

import pytest

from jaxptd.distributed import coordination
from jaxptd.errors import UserError
from jaxptd.run import holder as holder_module
from jaxptd.run import lock as lock_module
from jaxptd.run.holder import Holder
from jaxptd.run.lock import RunLock

NOBODY = 2**22 + 1  # above Linux's largest process id


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs" / "a"


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def lock(folder, lines) -> RunLock:
    return RunLock(folder, say=lines.append)


@pytest.fixture
def patient(monkeypatch) -> None:
    """Waits until a lock is written, however busy the machine is."""
    monkeypatch.setattr(lock_module, "PATIENCE", 120)


def left_behind(folder: Path, **changes) -> Path:
    """The lock of a process that has ended, with some fields changed."""
    folder.mkdir(parents=True)
    holder = dataclasses.replace(Holder.this_process(), **({"pid": NOBODY} | changes))
    path = folder / "lock.json"
    path.write_text(holder.to_json())
    return path


def refusal(lock: RunLock) -> str:
    """The line that refuses a lock, the same from `check` and `held`."""
    with pytest.raises(UserError) as first:
        lock.check()
    with pytest.raises(UserError) as second, lock.held():
        pytest.fail("taken")
    assert str(first.value) == str(second.value)
    return str(first.value)


def test_the_lock_names_its_process_and_is_removed_at_the_end(lock, folder):
    lock.check()
    assert not folder.exists()
    with lock.held():
        found = json.loads((folder / "lock.json").read_text())
        assert set(found) == {"host", "boot", "pid", "started", "since"}
        assert found["pid"] == os.getpid()
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("error", [ZeroDivisionError, UserError, KeyboardInterrupt, SystemExit])
def test_after_an_error_neither_the_lock_nor_its_folders_are_left(lock, tmp_path, error):
    with pytest.raises(error), lock.held():
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_is_refused_until_the_first_ends(lock, folder, lines):
    with lock.held():
        before = (folder / "lock.json").read_bytes()
        line = refusal(RunLock(folder, say=lines.append))
        assert line.startswith(f"train.run_dir={folder} is in use by process {os.getpid()} on ")
        assert line.endswith("UTC; wait until it ends, stop it, or use another directory")
        assert (folder / "lock.json").read_bytes() == before
    with RunLock(folder, say=lines.append).held():
        pass
    assert lines == []


def test_release_may_come_from_another_thread_and_twice(lock, tmp_path):
    with lock.held():
        thread = threading.Thread(target=lock.release)
        thread.start()
        thread.join()
        assert list(tmp_path.iterdir()) == []


def test_a_lock_that_another_run_made_meanwhile_is_left_alone(lock, folder):
    with lock.held():
        (folder / "lock.json").unlink()  # by a person
        (folder / "lock.json").write_text("another run's")
    assert (folder / "lock.json").read_text() == "another run's"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pid": os.getpid(), "started": 12345},  # another process reuses its id
        {"pid": os.getpid(), "boot": "before a restart"},
        {"pid": os.getppid(), "started": 0},
    ],
    ids=["ended", "number used again", "host restarted", "parent's number"],
)
def test_the_lock_of_a_dead_process_is_taken_over_with_a_line(lock, folder, lines, changes):
    left_behind(folder, **changes)
    lock.check()
    assert lines == []
    with lock.held():
        assert json.loads((folder / "lock.json").read_text())["pid"] == os.getpid()
    assert len(lines) == 1
    assert lines[0].startswith(f"took train.run_dir={folder} over from process ")
    assert list(folder.iterdir()) == []


def test_of_another_host_it_is_named_with_what_to_check_and_delete(lock, folder, lines):
    path = left_behind(folder, host="node07", pid=4242)
    before = path.read_bytes()
    line = refusal(lock)
    assert f"train.run_dir={folder} is locked by process 4242 on node07, since " in line
    assert line.endswith(f"if it is no longer running there (ssh node07 ps -p 4242), delete {path}")
    assert (path.read_bytes(), lines) == (before, [])


def test_a_live_process_in_another_container_is_known_by_its_flock(lock, folder):
    path = left_behind(folder)  # an id without meaning here
    file = os.open(path, os.O_RDWR)
    lock_module._flock(file)
    assert "is in use by process" in refusal(lock)
    os.close(file)
    with lock.held():
        pass


def test_without_flock_the_number_of_the_process_counts(lock, folder, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock_module.fcntl, "flock", unsupported)
    with lock.held():
        assert "is in use by process" in refusal(RunLock(folder, say=pytest.fail))
    left_behind(folder.parent / "b")
    with RunLock(folder.parent / "b", say=lambda line: None).held():
        pass


def test_without_proc_the_number_of_the_process_counts(lock, folder, monkeypatch):
    monkeypatch.setattr(holder_module, "_start_of", lambda pid: None)
    monkeypatch.setattr(holder_module, "_BOOT", folder / "none")
    path = left_behind(folder, pid=os.getpid())
    assert "is in use by process" in refusal(lock)
    path.write_text(dataclasses.replace(Holder.this_process(), pid=NOBODY).to_json())
    with RunLock(folder, say=lambda line: None).held():
        pass


GOOD = json.loads(Holder.this_process().to_json())
DAMAGED = {
    "empty": "",
    "cut": '{"host": "node',
    "no object": "[]",
    "text": "locked by me",
    "bytes": "\x00\x00",
    "nested": "[" * 4000,
    "huge number": '{"pid": ' + "9" * 4000,
    "field missing": json.dumps({key: x for key, x in GOOD.items() if key != "host"}),
    "field too many": json.dumps(GOOD | {"more": 1}),
    "pid of text": json.dumps(GOOD | {"pid": "1"}),
    "pid true": json.dumps(GOOD | {"pid": True}),
    "pid 0": json.dumps(GOOD | {"pid": 0}),
    "pid of all": json.dumps(GOOD | {"pid": -1}),
    "pid too large": json.dumps(GOOD | {"pid": 2**31}),
    "host of two lines": json.dumps(GOOD | {"host": "a\nb"}),
    "host a number": json.dumps(GOOD | {"host": 7}),
    "started text": json.dumps(GOOD | {"started": "now"}),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_lock_is_refused_with_the_file_to_delete(folder, lock, content, monkeypatch):
    monkeypatch.setattr(lock_module, "PATIENCE", 0)
    folder.mkdir(parents=True)
    (folder / "lock.json").write_text(content)
    line = refusal(lock)
    assert line == (
        f"train.run_dir={folder} is locked, but {folder}/lock.json does not name the process; "
        "if no run uses the directory, delete that file"
    )
    assert (folder / "lock.json").read_text() == content


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_lock_that_is_no_file_is_refused(folder, lock, make, monkeypatch):
    monkeypatch.setattr(lock_module, "PATIENCE", 0)
    folder.mkdir(parents=True)
    make(folder / "lock.json")
    assert "does not name the process" in refusal(lock)
    assert os.path.lexists(folder / "lock.json")


@pytest.mark.usefixtures("patient")
def test_a_process_that_has_just_made_its_lock_may_write_it_a_moment_later(folder, lock):
    folder.mkdir(parents=True)
    path = folder / "lock.json"
    path.touch()
    later = threading.Timer(0.1, path.write_text, [Holder.this_process().to_json()])
    later.start()
    with pytest.raises(UserError, match="is in use by process"):
        lock.check()
    later.join()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
@pytest.mark.parametrize("call", ["open", "write", "mkdir"])
def test_a_disk_that_refuses_is_one_line_and_leaves_nothing(
    lock, tmp_path, monkeypatch, number, call
):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr(os, call, refuse)
        with lock.held():
            pytest.fail("taken")
    assert f"{os.strerror(number)}; use a writable directory" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("patient")
def test_of_many_that_find_a_stale_lock_one_takes_it(folder, lines):
    left_behind(folder)
    start, end = threading.Barrier(8), threading.Barrier(8)
    outcomes = []

    def run():
        lock = RunLock(folder, say=lines.append)
        start.wait()
        try:
            with lock.held():
                outcomes.append("taken")
                end.wait()
        except UserError as error:
            outcomes.append(str(error))
            end.wait()

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("taken") == 1
    assert len([each for each in outcomes if "is in use by process" in each]) == 7
    assert list(folder.iterdir()) == []
    assert len(lines) == 1


def test_a_lock_that_another_run_took_over_first_is_not_removed(lock, folder, monkeypatch):
    path = left_behind(folder)
    found = RunLock._require_stale

    def late(self, file):
        holder = found(self, file)
        monkeypatch.setattr(RunLock, "_require_stale", found)
        path.unlink()
        path.write_text(dataclasses.replace(Holder.this_process(), host="node07").to_json())
        return holder

    monkeypatch.setattr(RunLock, "_require_stale", late)
    with pytest.raises(UserError, match="is locked by process .* on node07"), lock.held():
        pytest.fail("taken")
    assert "node07" in path.read_text()


def test_only_the_first_process_of_a_run_locks(lock, folder, monkeypatch):
    monkeypatch.setattr(coordination, "is_first", lambda: False)
    left_behind(folder, host="node07")
    lock.check()
    with lock.held():
        pass
    assert len(list(folder.iterdir())) == 1
