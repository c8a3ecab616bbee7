"""Starts the devices of a command: accelerators, or simulated ones on the CPU."""

import contextlib
import os
from typing import Any

import jax

from jaxptd.config import Config
from jaxptd.config.xla import process_flags
from jaxptd.distributed.launchers import World
from jaxptd.errors import UserError
from jaxptd.mesh import Layout


def _set_flags(layout: Layout) -> None:
    """Adds flags to XLA_FLAGS in the environment, unless they are there already."""
    for flag in process_flags(layout):
        flags = os.environ.get("XLA_FLAGS", "")
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def prepare(config: Config, *, double: bool = False, world: World | None = None) -> str:
    """Sets JAX up for a config, before anything has run; describes the devices in a line.

    Where JAX has started already, as in a test or a notebook, its devices and XLA's flags stay as
    they are: see `config.xla` for what can go wrong with a ring then.

    Args:
        config: its layout has the number of devices, train.platform their kind.
        double: allow float64.
        world: the processes of the run, which have joined; None: only this one.

    Raises:
        UserError: there are fewer devices than the layout needs, they do not start, or a process
            does not have its share of them.
    """
    world = world or World()
    needed = config.layout.num_devices
    _set_flags(config.layout)
    if config.train.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # JAX has started already, with devices of its own
        jax.config.update("jax_num_cpu_devices", world.share(needed))
    jax.config.update("jax_enable_x64", double or config.model.dtype == "float64")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise UserError(
            f"JAX cannot start its devices: {error}; use train.platform=cpu to simulate them"
        ) from error
    if len(devices) < needed:
        raise UserError(
            f"layout ({config.layout}) needs {needed} devices, "
            f"{'this machine has' if world.alone else 'all processes have'} {len(devices)} "
            f"({devices[0].device_kind}); use smaller axes, or train.platform=cpu to simulate them"
        )
    if not world.alone and len(jax.local_devices()) != world.share(needed):
        raise UserError(
            f"{world.name} has {len(jax.local_devices())} devices, its share of the layout "
            f"({config.layout}) is {world.share(needed)}; use a layout of {len(devices)} devices, "
            "or let each process see its share only (CUDA_VISIBLE_DEVICES)"
        )
    return _description(devices, needed) + (f" of {world.count} processes" * (not world.alone))


def _description(devices: list[Any], needed: int) -> str:
    if devices[0].platform == "cpu":
        return f"{needed} simulated CPU device{'s' if needed > 1 else ''}"
    return f"{needed} of {len(devices)} x {devices[0].device_kind}"
