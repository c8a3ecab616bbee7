"""The machine's rows, with what is wrong injected."""

import collections
from pathlib import Path

import pytest

from jaxptd.doctor import system
from jaxptd.doctor.page import Row, Verdict

Usage = collections.namedtuple("Usage", ["total", "used", "free"])


def row(name: str) -> Row:
    return next(each for each in system.system() if each.name == name)


def test_this_machine_has_every_row() -> None:
    names = [each.name for each in system.system()]
    assert [name for name in names if name != "shared memory"] == [
        "system",
        "Python",
        "CPU cores",
        "memory",
        "open files",
    ]


@pytest.mark.parametrize(
    ("version", "verdict"),
    [((3, 10, 1), "problem"), ((3, 11, 0), "ok"), ((3, 13, 9), "ok"), ((3, 15, 0), "note")],
)
def test_the_version_of_python(version, verdict, monkeypatch) -> None:
    monkeypatch.setattr(system.sys, "version_info", version)
    assert row("Python").verdict == verdict


def test_another_system(monkeypatch) -> None:
    monkeypatch.setattr(system.platform, "system", lambda: "Darwin")
    assert row("system").verdict is Verdict.NOTE


@pytest.mark.parametrize(
    ("files", "cores"),
    [({"max": "150000 100000\n"}, 1.5), ({"max": "max 100000\n"}, None), ({}, None)],
)
def test_the_quota_of_a_container(files, cores, tmp_path: Path, monkeypatch) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(system, "QUOTAS", ((str(tmp_path / "max"),),))
    assert system.quota() == cores
    monkeypatch.setattr(system, "_allowed", lambda: 8)
    monkeypatch.setattr(system.os, "cpu_count", lambda: 64)
    found = row("CPU cores")
    assert found.finding == f"{cores or 8:g} usable of 64"
    assert found.verdict == ("note" if cores else "ok")


def test_the_quota_of_an_older_container(tmp_path: Path, monkeypatch) -> None:
    paths = [str(tmp_path / name) for name in ("quota", "period")]
    Path(paths[0]).write_text("400000\n")
    Path(paths[1]).write_text("100000\n")
    monkeypatch.setattr(system, "QUOTAS", (("no",), tuple(paths)))
    assert system.quota() == 4
    Path(paths[0]).write_text("-1\n")
    assert system.quota() is None


@pytest.mark.parametrize(
    ("limit", "free", "verdict"),
    [(64e9, 1e9, "note"), (1e9, None, "note"), (64e9, 60e9, "ok"), (None, None, "ok")],
)
def test_little_memory(limit, free, verdict, monkeypatch) -> None:
    monkeypatch.setattr(system, "host_memory", lambda: limit)
    monkeypatch.setattr(system, "_available", lambda: free)
    assert row("memory").verdict == verdict


def test_available_memory_is_in_bytes(monkeypatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "MemTotal: 9 kB\nMemAvailable: 1024 kB\n")
    assert system._available() == 2**20


@pytest.mark.parametrize(
    ("size", "gpus", "verdict"), [(2**26, 8, "problem"), (2**26, 1, "note"), (2**31, 8, "ok")]
)
def test_shared_memory_of_a_container(size, gpus, verdict, monkeypatch) -> None:
    monkeypatch.setattr(system.shutil, "disk_usage", lambda path: Usage(size, 0, size))
    monkeypatch.setattr(system, "nvidia_gpus", lambda: gpus)
    assert row("shared memory").verdict == verdict


@pytest.mark.parametrize(("limit", "verdict"), [(1024, "note"), (65536, "ok"), (-1, "ok")])
def test_few_open_files(limit, verdict, monkeypatch) -> None:
    monkeypatch.setattr(system.resource, "getrlimit", lambda which: (limit, 2**20))
    assert row("open files").verdict == verdict
