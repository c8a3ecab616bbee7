"""Limits of accelerators, from data sheets and measurements."""

from typing import Any

# FLOP/s of dense bfloat16 products, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12}

# Bytes per second that kernels reach of an H200's 4.8e12.
BANDWIDTH = 4.3e12


def peak_flops(mesh: Any) -> float | None:
    """FLOP/s of all devices of a mesh together; None if `PEAK_FLOPS` lacks their kind."""
    peak = peak_of(mesh.devices.flat[0].device_kind)
    return peak * mesh.devices.size if peak else None


def peak_of(device_kind: str) -> float | None:
    """FLOP/s of one device of a kind as JAX names it, such as `NVIDIA H200`."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)
