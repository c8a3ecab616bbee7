"""Files that a source names, and their order."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from jaxptd.data import sources
from jaxptd.data.sources import find_files, stdlib_files
from jaxptd.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working folder, with a few files in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a.txt", "c.jsonl", "deep/er/d.txt", "m.bin", "m.idx", "odd[1].txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


def names(source):
    return [path.as_posix() for path in find_files(source)]


def test_paths_keep_their_order(folder):
    assert names(["b.txt", "a.txt"]) == ["b.txt", "a.txt"]
    assert names("b.txt") == ["b.txt"]


def test_globs_are_sorted_and_recursive(folder, monkeypatch):
    listing = sources.glob.glob
    monkeypatch.setattr(sources.glob, "glob", lambda *a, **k: sorted(listing(*a, **k))[::-1])
    assert names("[ab].txt") == ["a.txt", "b.txt"]
    assert names("**/*.txt") == ["a.txt", "b.txt", "deep/er/d.txt", "odd[1].txt"]
    assert names(["*.jsonl", "?.txt"]) == ["c.jsonl", "a.txt", "b.txt"]


def test_globs_leave_folders_out(folder):
    (folder / "x.txt").mkdir()
    assert names("?.txt") == ["a.txt", "b.txt"]


def test_a_path_that_exists_is_no_glob(folder):
    assert names("odd[1].txt") == ["odd[1].txt"]


@pytest.mark.parametrize("source", ["m", "m.bin", "m.idx", "m.*"])
def test_a_megatron_pair_is_one_source(folder, source):
    assert names(source) == ["m.bin"]


@pytest.mark.parametrize("source", ["missing.txt", "*.parquet", "", "a\0b", "x" * 5000])
def test_no_match_is_an_error(folder, source):
    with pytest.raises(UserError, match=r"data\.source=.* matches no file; use stdlib"):
        find_files(["a.txt", source])


def test_a_folder_is_an_error_that_suggests_a_glob(folder):
    with pytest.raises(UserError, match=r"'deep' is a folder; .*'deep/\*\*/\*\.txt'"):
        find_files("deep")


def test_an_index_without_tokens_is_an_error(folder):
    (folder / "m.bin").unlink()
    with pytest.raises(UserError, match=r"m\.idx is a Megatron index but m\.bin is missing"):
        find_files("m.idx")


def test_a_pipe_is_an_error(folder):
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt is not a regular file"):
        find_files("pipe.txt")


@pytest.mark.parametrize("again", ["a.txt", "./a.txt", "a.*", "link.txt"])
def test_a_file_named_twice_is_an_error(folder, again):
    (folder / "link.txt").symlink_to("a.txt")
    with pytest.raises(UserError, match=r"named twice, by 'a\.txt' and "):
        find_files(["a.txt", again])


def test_stdlib_is_large_and_has_no_tests_or_packages():
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files()
    parts = {part for path in files for part in path.relative_to(root).parts}
    assert find_files("stdlib") == files
    assert sum(path.stat().st_size for path in files) > 5_000_000
    assert {"argparse.py", "asyncio", "unittest"} <= parts
    assert not parts & {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    assert not [part for part in parts if part.startswith(("_sysconfigdata", "config-"))]


def test_stdlib_order_is_the_same_in_another_process_and_file_system(monkeypatch):
    code = "from jaxptd.data.sources import stdlib_files; print(*stdlib_files(), sep='\\n')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    walk = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(walk(self, pattern))))
    assert other.stdout.split("\n")[:-1] == [str(path) for path in stdlib_files()]


def test_stdlib_validation_tail_is_from_many_packages():
    root = Path(sysconfig.get_path("stdlib"))
    tail = stdlib_files()[-30:]
    assert len({path.relative_to(root).parts[0] for path in tail}) > 10


def test_stdlib_without_files_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="this Python has no source files"):
        stdlib_files()
