"""Checks of NVIDIA's driver and of the GPUs it reports; devices, without importing JAX."""

import collections
import contextlib
import dataclasses
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

from jaxptd.display import gib_text
from jaxptd.doctor.known import Versions, number
from jaxptd.doctor.page import Row, judged, note, problem

MIB = 2**20
# The oldest driver for each version of CUDA (docs/howto/gpu_host.md).
DRIVERS = {"13": "580", "12": "525"}
FIELDS = (
    *("name", "driver_version", "memory.total", "memory.used", "compute_mode"),
    "ecc.errors.uncorrected.volatile.total",
)
LITTLE, MUCH = 0.02, 0.1  # shares of a GPU's memory that others use: a note, a problem


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it, before JAX starts.

    Args:
        name: of its kind.
        driver: the version.
        total, used: bytes of memory. None: not reported.
        mode: compute mode, such as `Default`.
        errors: memory errors since the driver started that were not corrected. None: unknown.
    """

    name: str
    driver: str
    total: int | None
    used: int | None
    mode: str
    errors: int | None


def ask_driver() -> str:
    """The answer of `nvidia-smi`, a line per GPU; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60
        )
        if answer.returncode == 0:
            return answer.stdout
    return ""


def gpus_of(answer: str) -> list[Gpu]:
    """The GPUs in an answer of `nvidia-smi`."""
    lines = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    return [
        Gpu(name, driver, _whole(total, MIB), _whole(used, MIB), mode, _whole(errors))
        for name, driver, total, used, mode, errors in (x for x in lines if len(x) == len(FIELDS))
    ]


def _whole(text: str, unit: int = 1) -> int | None:
    return int(text) * unit if text.isdecimal() else None  # else `[N/A]`


def driver(answer: str, found: Versions) -> Iterator[Row]:
    """Rows on the driver and on what it reports of each GPU.

    Args:
        answer: of `ask_driver`.
        found: installed packages.
    """
    gpus = gpus_of(answer)
    if not gpus:
        yield note("driver", "nvidia-smi gives no answer", "see whether the driver is loaded")
    for version in sorted({gpu.driver for gpu in gpus}):
        needs = [DRIVERS[n] for n in DRIVERS if f"jax-cuda{n}-plugin" in found]
        old = [each for each in needs if number(version) < number(each)]
        newest = max(old, default="")
        remedy = f"update the driver to {newest} or newer, or install an extra for an older CUDA"
        yield judged("driver", version, bad=remedy if old else "")
    for index, gpu in enumerate(gpus):
        yield from _reported(f"GPU {index}", gpu)


def _reported(name: str, gpu: Gpu) -> Iterator[Row]:
    """Rows on what is wrong with a GPU."""
    if gpu.mode == "Prohibited":
        yield problem(name, f"compute mode {gpu.mode}", f"{_set_mode(name)} DEFAULT")
    if gpu.mode == "Exclusive_Process":
        remedy = f"let no two processes use it, or {_set_mode(name)} DEFAULT"
        yield note(name, f"compute mode {gpu.mode}", remedy)
    if gpu.errors:
        remedy = "take it out of service: it has computed with wrong numbers"
        yield problem(name, f"{gpu.errors} memory errors that were not corrected", remedy)
    if gpu.used and gpu.total and gpu.used > LITTLE * gpu.total:
        remedy = "end the other programs (nvidia-smi lists them)"
        finding = f"others use {gib_text(gpu.used)} of {gib_text(gpu.total)}"
        make = problem if gpu.used > MUCH * gpu.total else note
        yield make(name, finding, remedy)


def _set_mode(name: str) -> str:
    return f"nvidia-smi -i {name.removeprefix('GPU ')} -c"


# ---- the devices of an examination ---------------------------------------------------------------


@dataclasses.dataclass
class Found:
    """The devices once they have started; empty if they have not."""

    devices: Sequence[Any] = ()
    local: Sequence[Any] = ()

    @property
    def kinds(self) -> set[str]:
        return {device.device_kind for device in self.devices}

    @property
    def on_gpus(self) -> bool:
        return any(device.platform not in ("cpu", "tpu") for device in self.devices)

    @property
    def counts(self) -> list[list[Any]]:
        """Kinds and numbers of this process's devices, as JSON."""
        kinds = collections.Counter(device.device_kind for device in self.local)
        return [[kind, count] for kind, count in sorted(kinds.items())]
