"""Limits of accelerators, from data sheets and measurements, and the available memory."""

import contextlib
import os
from pathlib import Path
from typing import Any

from jaxptd.hardware import accelerators

_TABLE = accelerators()
# FLOP/s of dense bfloat16 matmuls, by a part of the device's name in JAX.
PEAK_FLOPS = {name.upper(): _TABLE[name].bf16_flops for name in ("h200", "h100", "a100")}

# Bytes per second, out of 4.8e12, that an H200's copies and best kernels reach.
BANDWIDTH = 4.3e12


def peak_flops(mesh: Any) -> float | None:
    """FLOP/s of all devices of a mesh together; None if `PEAK_FLOPS` lacks their kind."""
    peak = peak_of(mesh.devices.flat[0].device_kind)
    return peak * mesh.devices.size if peak else None


def peak_of(device_kind: str) -> float | None:
    """FLOP/s of one device by its JAX name, such as `NVIDIA H200`."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def memory_limit(device: Any) -> int | None:
    """Bytes that this process may use of an accelerator's memory; None: unknown, or a CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


# Where Linux stores a container's memory limit, by the version of control groups.
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_memory() -> int | None:
    """Bytes of this machine's memory, or of this container's; None: unknown."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return None
    for path in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number
            limits.append(int(Path(path).read_text()))
    return min(limits)
