"""Eight simulated CPU devices for every test, and a cache of what was compiled before.

`pytest --gpu` runs the tests marked gpu instead, on the accelerators that JAX finds.
`pytest --share 3/100` runs the third hundredth of the tests that it would run.
"""

import gc
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import pytest

from jaxptd import params
from jaxptd.config.xla import KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME, PATIENCE

# They need torch, which tests do without.
collect_ignore_glob = ["tests/golden/make_*.py"]

# What JAX keeps of compiled programs: everything that took 0.1 s or more.
CACHE = {
    "jax_compilation_cache_dir": str(Path(__file__).parent / ".jax_cache"),
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}

# Tracing makes millions of objects that live on; collecting at every 700 of them, as Python does,
# takes a tenth of the time and frees little.
COLLECT_AFTER = 100_000, 20, 50

# Tests compile much and compute little. LLVM's optimisations change no pass of XLA, so no test sees
# them; without them initial parameters compile in an eighth of the time, a step in two thirds.
NO_LLVM_OPTIMISATION = "--xla_backend_optimization_level=0"

# XLA's fusion emitters take half of the time of compiling; without them a program sends and keeps
# the same. Only jaxlib 0.10 has the flag, and XLA ends the process for one that it does not know.
NO_FUSION_EMITTERS = "--xla_cpu_use_fusion_emitters=false" if jax.__version_info__ < (0, 11) else ""

# Linux allows a process 65,530; each compiled program has several. Without any left XLA crashes.
MAPPINGS = 20_000

# The same examples each time, however slow the machine.
hypothesis.settings.register_profile("jaxptd", derandomize=True, deadline=None)
hypothesis.settings.load_profile("jaxptd")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--gpu` and `--share`."""
    parser.addoption("--gpu", action="store_true", help="run the tests marked gpu, on accelerators")
    parser.addoption("--share", metavar="I/N", help="run every Nth test only, from the Ith on")


def pytest_configure(config: pytest.Config) -> None:
    """Settles, before JAX starts, which devices this process and the commands it starts see."""
    gc.set_threshold(*COLLECT_AFTER)
    # What a shell or nohup has started may ignore interrupts or the end of a terminal, and so would
    # the commands that are tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for name, value in CACHE.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)
    if config.getoption("--gpu"):
        config.option.markexpr = "gpu"
        if jax.default_backend() == "cpu":
            raise pytest.UsageError("--gpu: JAX finds no accelerator; install an extra, cuda13 say")
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_traceback_in_locations_limit", 0)  # lowering is faster without
    os.environ["JAX_PLATFORMS"] = "cpu"
    # XLA reads this when the first device is asked for.
    given = os.environ.get("XLA_FLAGS", "")
    flags = (given, PATIENCE, KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME, NO_LLVM_OPTIMISATION)
    flags = (*flags, NO_FUSION_EMITTERS)
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    params.CPU_OPTIONS = None  # initial parameters compile faster without LLVM's optimisations, too
    jax.devices()  # now, before a command under test could ask for another number


@pytest.hookimpl(trylast=True)  # after tests were deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of `--share`; all shares together are all tests."""
    given = config.getoption("--share")
    if given is None:
        return
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", given)
    first, step = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= step:
        raise pytest.UsageError(f"--share {given}: use I/N, as 3/100, with I from 1 to N")
    chosen = items[first - 1 :: step]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Has Python look for garbage only among what tests make, not in all that was imported."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def few_programs() -> Iterator[None]:
    """Forgets compiled programs after a file, before they fill the mappings of the process."""
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_bytes().splitlines()) > MAPPINGS:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def folder_of_a_doctest(request: pytest.FixtureRequest) -> None:
    """Runs the example of a docstring in a folder of its own, since it may write files."""
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)
