"""File systems that lack what runs rely on; each check cleans up."""

import collections
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from jaxptd.doctor import folder as place
from jaxptd.doctor.page import Row, Verdict
from jaxptd.layout import Layout

Usage = collections.namedtuple("Usage", ["total", "used", "free"])
MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 30 0:28 / /shared/run\\040s rw shared:1 - lustre x@tcp:/a rw
30 27 0:27 / /shared rw - nfs4 server:/a rw
29 27 254:1 / /share rw - ext4 /dev/vdb rw
32 27 0:29 / /share rw - tmpfs tmpfs rw
"""


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(place, "WRITTEN", 2**20)


def rows(path: Path, **options) -> dict[str, Row]:
    found = place.folder(path, **{"checkpoint": 1000, "keep": 2} | options)
    return {row.name: row for row in found}


def verdicts(path: Path, **options) -> dict[str, str]:
    found = rows(path, **options)
    return {name: str(row.verdict) for name, row in found.items() if row.verdict is not Verdict.OK}


def test_a_good_disk_and_nothing_is_left(tmp_path: Path) -> None:
    assert verdicts(tmp_path / "runs" / "new").keys() <= {"file system", "writing"}
    assert rows(tmp_path / "runs" / "new")["run directory"].finding.endswith(f"checked {tmp_path}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", ("ext4", "/")),
        ("/shared/a", ("nfs4", "/shared")),
        ("/shared/run s/a", ("lustre", "/shared/run s")),
        ("/share", ("tmpfs", "/share")),
        ("/sharedx", ("ext4", "/")),
    ],
)
def test_the_type_of_a_file_system(path, kind) -> None:
    assert place.mounted(Path(path), MOUNTS) == kind
    assert place.mounted(Path(path), "") == ("", "")


def test_memory_is_no_disk(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 2 0:1 / {tmp_path.resolve()} rw - tmpfs tmpfs rw\n")
    assert place._kind(tmp_path, mounts).verdict is Verdict.NOTE
    mounts.write_text(f"1 2 0:1 / {tmp_path.resolve()} rw - nfs4 a:/ rw\n")
    assert place._kind(tmp_path, mounts).finding.endswith(", a network's")
    assert place._kind(tmp_path, tmp_path / "none").finding == "unknown"


@pytest.mark.parametrize(
    ("free", "verdict"), [(1999, "problem"), (2999, "note"), (3000, None), (10**9, None)]
)
def test_space_beside_the_size_of_a_checkpoint(free, verdict, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(place.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    assert verdicts(tmp_path).get("space") == verdict
    assert "space" not in verdicts(tmp_path, checkpoint=None)


@pytest.mark.parametrize(("files", "left", "found"), [(10**6, 99, True), (0, 0, False)])
def test_few_more_files(files, left, found, tmp_path, monkeypatch) -> None:
    """Some file systems have no fixed number of files, and say 0."""
    limits = SimpleNamespace(f_files=files, f_favail=left)
    monkeypatch.setattr(place.os, "statvfs", lambda path: limits)
    monkeypatch.setattr(place.shutil, "disk_usage", lambda path: Usage(10**9, 0, 10**9))
    assert ("number of files" in verdicts(tmp_path)) == found


@pytest.mark.parametrize(
    ("answer", "verdict"), [("held", "ok"), ("taken", "problem"), ("error 37", "note")]
)
def test_locks_of_two_processes(answer, verdict, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(place, "other_takes", lambda path: answer)
    assert rows(tmp_path)["locks"].verdict == verdict


def test_a_file_system_without_locks(tmp_path, monkeypatch) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(place.fcntl, "flock", refuse)
    assert verdicts(tmp_path)["locks"] == "note"


def test_another_process_is_kept_out(tmp_path) -> None:
    path = tmp_path / "lock"
    path.touch()
    assert place.other_takes(path) == "taken"
    with path.open("r+") as file:
        place.fcntl.flock(file, place.fcntl.LOCK_EX)
        assert place.other_takes(path) == "held"


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch) -> None:
    stat = place.os.stat

    def refuse(path: object, **options: object) -> object:
        if Path(str(path)).parent.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(place.os, "stat", refuse)
    assert place.nearest(tmp_path / "closed" / "run") == tmp_path / "closed"


def test_renames_that_show_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(place.os, "replace", lambda old, new: None)
    assert verdicts(tmp_path)["renames"] == "problem"


def test_a_rename_that_loses_the_content(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(place.os, "replace", lambda old, new: old.unlink())
    assert verdicts(tmp_path)["renames"] == "problem"


def test_what_is_timed_has_reached_the_disk(tmp_path, monkeypatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(place.os, "fsync", lambda file: sizes.append(place.os.fstat(file).st_size))
    assert place.written_per_second(tmp_path) > 0
    assert sizes == [2**20]


def test_a_rename_that_fails(tmp_path, monkeypatch) -> None:
    def refuse(old: Path, new: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(place.os, "rename", refuse)
    row = rows(tmp_path)["renames"]
    assert (row.verdict, row.finding) == (Verdict.PROBLEM, "Invalid cross-device link")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_created_twice(tmp_path, monkeypatch) -> None:
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda self, exist_ok=True: touch(self))
    assert verdicts(tmp_path)["exclusive files"] == "problem"


def test_writing_that_is_slow_or_not_allowed(tmp_path, monkeypatch) -> None:
    assert place.speed_row(1e6, None).verdict is Verdict.NOTE
    assert place.speed_row(1e9, 10**12).verdict is Verdict.NOTE  # 1000 s for a checkpoint
    assert place.speed_row(1e9, 10**9).verdict is Verdict.OK
    monkeypatch.setattr(place.os, "access", lambda path, mode: False)
    assert verdicts(tmp_path)["writing"] == "problem"
    (tmp_path / "file").touch()
    assert verdicts(tmp_path / "file")["run directory"] == "problem"


def test_the_bytes_of_a_checkpoint() -> None:
    """The same on every layout, and those of the parameters and two moments."""
    config = tiny.config(Layout())
    size = place.checkpoint_bytes(config)
    assert size == place.checkpoint_bytes(tiny.config(Layout(dp=2, tp=2, zero=3)))
    assert place.checkpoint_bytes(None) is None
    assert size and size % 12 == 0
