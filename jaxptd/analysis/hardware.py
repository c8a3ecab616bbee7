"""What accelerators can do at most, from their data sheets and from measurements."""

from typing import Any

# Dense bfloat16 products per second, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12}

# Bytes per second that kernels reach of an H200's 4.8e12.
BANDWIDTH = 4.3e12


def peak_flops(mesh: Any) -> float | None:
    """Of all devices of the mesh together; None where no data sheet is at hand."""
    kind = mesh.devices.flat[0].device_kind
    peaks = [peak for name, peak in PEAK_FLOPS.items() if name in kind]
    return peaks[0] * mesh.devices.size if peaks else None
