"""Runs a mutation's detectors, each in a process of its own, in a copy of the repository."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.mutations.table import ROOT, Mutation

Finding = dict[str, Any]  # word, seconds, found

# In the order of a table's columns. The probed ones share a process; slow tests look for what the
# default ones miss.
PROBED, TESTED = ("tracing", "verify", "comms"), ("default", "slow")
DETECTORS = (*PROBED, "reference", *TESTED)
REFERENCE, ON_ONE_DEVICE = "tests/reference", "one_device_steps"
TIMEOUT = 1800  # seconds; a step that takes longer, even on shared cores, is a finding

CAUGHT, MISSED, NO_RESULT = "caught", "not caught", "no result"
NOT_THERE, NOT_RUN = "not there", "-"
NOTHING: Finding = {"word": NOT_RUN, "seconds": 0.0, "found": ""}
FAILED, NO_TEST = 1, 5  # pytest's exit codes if tests fail, and if none has the marks


def run(row: Mutation, detectors: Collection[str]) -> dict[str, Finding]:
    """What each detector finds: `word`, `seconds` until it was done, and `found`, a line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_repository(folder)
        path = folder / row.file
        path.write_text(row.made(path.read_text()))
        return look(row, detectors, folder)


def copy_repository(target: Path) -> None:
    """Copies the files that git tracks, and symlinks the cache of compiled programs."""
    cache = ROOT / ".jax_cache"
    cache.mkdir(exist_ok=True)
    (target / cache.name).symlink_to(cache)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in tracked.stdout.splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def look(row: Mutation, detectors: Collection[str], folder: Path) -> dict[str, Finding]:
    """Does what `run` does, in a copy that contains the bug."""
    found: dict[str, Finding] = {}
    if set(PROBED) & set(detectors):
        found |= probe(row.cases, folder)
    if "reference" in detectors:
        found["reference"] = _reference(folder)
    if set(TESTED) & set(detectors):
        found |= suite(row, folder, slow="slow" in detectors)
    return found


def probe(cases: Collection[str], folder: Path) -> dict[str, Finding]:
    """The findings of tracing, verify and comms, which look at these cases."""
    if not cases:
        return dict.fromkeys(PROBED, NOTHING)
    command = [sys.executable, "-m", "benchmarks.mutations.probe", str(time.time()), *cases]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors = f"the step did not end in {TIMEOUT} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    start = lines[0]["ready"] if lines else 0.0
    ended = process.returncode == 0
    return _findings(lines, start, "" if ended else errors, time.perf_counter() - begin)


def _findings(lines: list[dict], start: float, crash: str, seconds: float) -> dict[str, Finding]:
    """Findings from the probe's lines; a crash counts as verify's, which was to run the step."""
    found: dict[str, Finding] = {}
    for name in PROBED:
        own = [line for line in lines if line.get("detector") == name]
        said = next((line["found"] for line in own if line["found"]), "")
        word = CAUGHT if said else MISSED if own else NOT_RUN
        spent = sum(line["seconds"] for line in own)
        found[name] = {"word": word, "seconds": round(start + spent, 1), "found": said}
        if precisions := [line["dtype"] for line in own if line["found"] and "dtype" in line]:
            found[name]["dtype"] = precisions[0]
    if crash:
        last = crash.strip().splitlines()[-1:] or ["the process died"]
        found["verify"] = {"word": CAUGHT, "seconds": round(seconds, 1), "found": last[0][:160]}
    return found


def _environment(folder: Path) -> dict[str, str]:
    """The tests' environment: a cache of compiled programs, which are not optimised."""
    own = {
        "PYTHONPATH": str(folder),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    return {**os.environ, **own}


def _reference(folder: Path) -> Finding:
    if not (folder / REFERENCE).is_dir():
        return {"word": NOT_THERE, "seconds": 0.0, "found": ""}
    return _tests([REFERENCE, "-k", ON_ONE_DEVICE], folder, "not gpu")


def suite(row: Mutation, folder: Path, *, slow: bool = True) -> dict[str, Finding]:
    """The findings of the tests that a row names: the default ones, then the slow ones."""
    tests = [*row.tests.split(), *(["-k", row.select] if row.select else [])]
    found = {"default": _tests(tests, folder, "not slow and not gpu")}
    if slow:
        missed = found["default"]["word"] == MISSED
        found["slow"] = _tests(tests, folder, "slow and not gpu") if missed else NOTHING
    return found


def _tests(tests: list[str], folder: Path, marks: str) -> Finding:
    """Runs the tests with these marks until one fails, and returns its line."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-m", marks, *tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        late = f"the tests did not end in {2 * TIMEOUT} s"
        return {"word": CAUGHT, "seconds": 2.0 * TIMEOUT, "found": late}
    word = {0: MISSED, NO_TEST: MISSED, FAILED: CAUGHT}.get(done.returncode, NO_RESULT)
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    said = (failed or lines[-1:] or [done.stderr[-160:]])[0] if word != MISSED else ""
    return {"word": word, "seconds": round(time.perf_counter() - begin, 1), "found": said[:160]}
