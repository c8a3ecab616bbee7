"""Checks of the operating system and of what this process may use of the machine."""

import contextlib
import glob
import math
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxptd.analysis.hardware import host_memory
from jaxptd.display import gib_text
from jaxptd.doctor.page import Row, judged

GIB = 2**30
OLDEST, NEWEST = (3, 11), (3, 13)  # versions of Python that are tested
FEWEST_FILES = 4096
LEAST_SHARED = GIB  # bytes of /dev/shm for the NCCL of several GPUs
# Limits of processor time of a container: quota and period in microseconds, by the version of
# control groups.
QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def system() -> list[Row]:
    """The rows of this section."""
    return [_operating_system(), _python(), _cores(), _memory(), *_shared_memory(), _open_files()]


def nvidia_gpus() -> int:
    """Number of NVIDIA GPUs that the system shows, with or without a working JAX."""
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _operating_system() -> Row:
    name = ""
    with contextlib.suppress(OSError):
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    system, kernel = platform.system(), platform.release()
    other = "use Linux: no other system is tested" if system != "Linux" else ""
    shown = ", ".join(filter(None, (name, f"{system} {kernel}", platform.machine())))
    return judged("system", shown, remark=other)


def _python() -> Row:
    version, shown = sys.version_info[:2], platform.python_version()
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    old = f"use Python {oldest} to {newest}" if version < OLDEST else ""
    new = f"use Python {newest} or older: newer ones are not tested" if version > NEWEST else ""
    return judged("Python", shown, bad=old, remark=new)


def _cores() -> Row:
    total, allowed = os.cpu_count() or 1, _allowed()
    limits = [float(allowed), *filter(None, [quota()])]
    usable = min(limits)
    few = (
        "give the process at least 2 cores: reading data and starting steps compete for one"
        if usable < 2
        else ""
    )
    return judged("CPU cores", f"{usable:g} usable of {total}", remark=few)


def _allowed() -> int:
    """Cores that this process may run on."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota() -> float | None:
    """Cores' worth of time that a container may use; None: no limit."""
    for paths in QUOTAS:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            allowed, period = map(int, " ".join(Path(path).read_text() for path in paths).split())
            if allowed > 0:
                return allowed / period
    return None


def _memory() -> Row:
    limit, free = host_memory(), _available()
    if limit is None:
        return Row("memory", "unknown")
    shown = gib_text(limit) + (f", {gib_text(min(free, limit))} available" if free else "")
    little = (
        "end other programs or use a larger host: starting JAX and compiling a step take some GiB"
        if min(limit, free or math.inf) < 2 * GIB
        else ""
    )
    return judged("memory", shown, remark=little)


def _available() -> int | None:
    """Bytes of memory that programs can still get; None: unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = {line.partition(":")[0]: line.split()[1] for line in lines}
        return int(values["MemAvailable"]) * 1024
    return None


def _shared_memory() -> Iterator[Row]:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return
    remedy = "give the container 1 GiB or more (docker run --shm-size=8g): NCCL needs it"
    small = remedy if size < LEAST_SHARED else ""
    several = nvidia_gpus() > 1
    yield judged(
        "shared memory",
        gib_text(size),
        bad=small if several else "",
        remark="" if several else small and f"{remedy} where a host has several GPUs",
    )


def _open_files() -> Row:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEWEST_FILES
    remedy = "raise it (ulimit -n 65536): checkpoints and connections need many files"
    shown = ["unlimited" if n == resource.RLIM_INFINITY else f"{n:,}" for n in (soft, hard)]
    finding = f"{shown[0]} (up to {shown[1]})" if soft != hard else shown[0]
    return judged("open files", finding, remark=remedy if few else "")
