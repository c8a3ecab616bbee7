"""Which devices a command runs on: the accelerators there are, or simulated ones on the CPU."""

import os
from typing import Any

import jax

from jaxptd.config import Config
from jaxptd.errors import UserError

# A slow or busy machine brings the simulated devices to a collective one after the other. XLA warns
# after 20 s and ends the process after 40. A name it does not know would end the process at once:
# these are known to the jaxlib of every version of jax in pyproject.toml.
PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    " --xla_cpu_collective_timeout_seconds=1200"
)

# Dense bfloat16 products per second, from the makers' data sheets.
PEAK_FLOPS = {"H200": 989.5e12, "H100": 989.5e12, "A100": 312e12}


def peak_flops(mesh: Any) -> float | None:
    """Of all devices of the mesh together; None where no data sheet is at hand."""
    kind = mesh.devices.flat[0].device_kind
    peaks = [peak for name, peak in PEAK_FLOPS.items() if name in kind]
    return peaks[0] * mesh.devices.size if peaks else None


def prepare(config: Config, *, double: bool = False) -> str:
    """Sets JAX up for a config, before anything has run; says in a line what it runs on.

    Args:
        config: its layout says how many devices, train.platform which.
        double: allow float64.

    Raises:
        UserError: an accelerator machine has fewer devices than the layout needs.
    """
    needed = config.layout.num_devices
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {PATIENCE}".strip()
    if config.train.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", needed)
    jax.config.update("jax_enable_x64", double or config.model.dtype == "float64")
    devices = jax.devices()
    if len(devices) < needed:
        raise UserError(
            f"layout ({config.layout}) needs {needed} devices, this machine has {len(devices)} "
            f"({devices[0].device_kind}); use smaller axes, or train.platform=cpu to simulate devices"
        )
    if devices[0].platform == "cpu":
        return f"{needed} simulated CPU device{'s' if needed > 1 else ''}"
    return f"{needed} of {len(devices)} x {devices[0].device_kind}"
