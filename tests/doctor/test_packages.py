"""Versions: absent, out of range, of different releases, and known to be bad."""

import re
import tomllib
from pathlib import Path

import pytest

from jaxptd.doctor.known import BAD, Bad, number
from jaxptd.doctor.packages import (
    NEEDED,
    dangerous,
    known_bad,
    packages,
    ranges,
    versions,
    within,
)
from jaxptd.doctor.page import Verdict

ROOT = Path(__file__).parents[2]
GOOD = dict.fromkeys(NEEDED, "0.12.1") | {"numpy": "2.4", "optax": "0.2.8"}
RANGES = {"jax": ">=0.10.2,<0.13", "flax": ">=0.12,<0.13"}
H200 = {"NVIDIA H200"}


def found(changes: dict[str, str | None], gpus: int = 0) -> dict[str, str]:
    """Verdicts of the rows that are not ok, for some versions."""
    installed = {k: v for k, v in {**GOOD, **changes}.items() if v is not None}
    rows = packages(installed, RANGES, gpus=gpus)
    assert all(row.remedy for row in rows if row.verdict is not Verdict.OK)
    return {row.name: str(row.verdict) for row in rows if row.verdict is not Verdict.OK}


def test_what_fits_together_is_ok() -> None:
    plugins = {"jax-cuda13-plugin": "0.12.1", "jax-cuda13-pjrt": "0.12.1.2"}
    assert found({}) == found(plugins, gpus=8) == {}


@pytest.mark.parametrize(
    ("changes", "gpus", "names"),
    [
        ({"optax": None}, 0, {"optax"}),
        ({"flax": "0.11.2"}, 0, {"flax"}),
        ({"jax": "0.13.0", "jaxlib": "0.13.0"}, 0, {"jax"}),
        ({"jaxlib": "0.12.0"}, 0, {"jaxlib"}),
        ({}, 8, {"CUDA plugin"}),
        ({"jax-cuda13-plugin": "0.12.0"}, 8, {"jax-cuda13-plugin"}),
        ({"jax-cuda12-plugin": "0.12.1", "jax-cuda13-plugin": "0.12.1"}, 8, {"CUDA plugin"}),
    ],
)
def test_what_does_not_fit_is_a_problem(changes, gpus, names) -> None:
    assert found(changes, gpus) == dict.fromkeys(names, "problem")


def test_versions_compare_as_numbers() -> None:
    assert number("0.9") < number("0.10") == number("0.10.0") < number("0.10.0.1")
    assert within("0.10.2", RANGES["jax"])
    assert not within("0.10.1", RANGES["jax"])
    assert not within("0.13", RANGES["jax"])
    assert within("anything", "")


def test_this_environment() -> None:
    installed = versions()
    assert {*NEEDED} <= installed.keys()
    rows = packages(installed, ranges(), gpus=0)
    assert [row for row in rows if row.verdict is not Verdict.OK] == []
    if ranges():
        assert {*NEEDED} - {"jaxlib"} <= ranges().keys()


# ---- versions that are known to be bad -----------------------------------------------------------


def verdicts(installed: dict[str, str], kinds: set[str], *, on_gpus: bool) -> list[str]:
    rows = known_bad(installed, kinds, on_gpus=on_gpus)
    return [f"{row.verdict} {row.name}" for row in rows]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.packages[0]}<{bad.fixed}-{bad.on}")
def test_each_bad_version_is_found_and_only_there(bad: Bad) -> None:
    kinds = {"NVIDIA RTX A6000", "NVIDIA H200"} if bad.on == "gpu" else {"cpu"}
    name, on_gpus = bad.packages[-1], bad.on == "gpu"
    verdict = "problem" if bad.serious else "note"
    assert f"{verdict} {name} {bad.first}" in verdicts({name: bad.first}, kinds, on_gpus=on_gpus)
    (row,) = (
        r for r in known_bad({name: bad.first}, kinds, on_gpus=on_gpus) if r.finding == bad.symptom
    )
    assert bad.fixed in row.remedy
    assert bad.source in row.remedy
    for version, here in ((bad.fixed, on_gpus), ("0.1", on_gpus), (bad.first, not on_gpus)):
        rows = known_bad({name: version}, kinds, on_gpus=here)
        assert bad.symptom not in {row.finding for row in rows}
    if not bad.source.startswith("https://"):
        assert (ROOT / bad.source).is_file()


def test_a_bug_of_some_devices_is_not_said_of_others() -> None:
    installed = {"jaxlib": "0.11.1", "nvidia-cudnn-cu13": "9.20.0.48"}
    assert verdicts(installed, {"NVIDIA A100"}, on_gpus=True) == ["ok bad versions"]
    assert verdicts(installed, H200, on_gpus=True) == ["note nvidia-cudnn-cu13 9.20.0.48"]
    assert verdicts(installed, {"NVIDIA RTX A6000"}, on_gpus=True) == ["problem jaxlib 0.11.1"]


def test_devices_of_unknown_kind_have_the_bugs_of_all_kinds_only() -> None:
    installed = {"jaxlib": "0.11.0"}
    assert verdicts(installed, set(), on_gpus=True) == ["problem jaxlib 0.11.0"]
    assert len(verdicts(installed, {"NVIDIA RTX A6000"}, on_gpus=True)) == 2


def test_a_fix_that_needs_a_newer_python_says_so(monkeypatch) -> None:
    for version, words in (((3, 11), ", with Python 3.12 or newer"), ((3, 12), "or newer (")):
        monkeypatch.setattr("sys.version_info", version)
        row, *_ = known_bad({"jaxlib": "0.10.2"}, H200, on_gpus=True)
        assert f"use jaxlib 0.11.1 or newer{words.removeprefix('or newer')}" in row.remedy


def test_rows_of_versions_that_nobody_can_install_are_gone() -> None:
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = {m[1]: m[2] for m in (re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines) if m}
    for bad in BAD:
        for name in {*bad.packages} & {*oldest, "jaxlib"}:
            assert number(bad.fixed) > number(oldest["jax" if name == "jaxlib" else name])


def test_training_warns_only_of_what_may_make_a_step_wrong():
    (line,) = dangerous({"jaxlib": "0.10.2", "jax": "0.10.2"}, H200, on_gpus=True)
    assert line.startswith("jaxlib 0.10.2: a kernel into which XLA fuses two concatenations")
    assert "use jaxlib 0.11.1 or newer" in line
    assert dangerous({"jaxlib": "0.10.2"}, {"cpu"}, on_gpus=False) == []
    assert dangerous({"jaxlib": "0.12.0"}, H200, on_gpus=True) == []
