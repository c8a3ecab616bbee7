"""Which devices a command runs on: the accelerators there are, or simulated ones on the CPU."""

import jax

from jaxptd.config import Config
from jaxptd.errors import UserError


def prepare(config: Config, *, double: bool = False) -> str:
    """Sets JAX up for a config, before anything has run; says in a line what it runs on.

    Args:
        config: its layout says how many devices, train.platform which.
        double: allow float64.

    Raises:
        UserError: an accelerator machine has fewer devices than the layout needs.
    """
    needed = config.layout.num_devices
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
