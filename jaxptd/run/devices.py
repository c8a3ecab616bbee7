"""Starts the devices of a command: accelerators, or simulated ones on the CPU."""

import contextlib
import os
from typing import Any

import jax

from jaxptd.config import Config
from jaxptd.distributed.launchers import World
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

# For simulated devices. XLA ends the process at once for a flag that it does not know; the jaxlib
# of every version of jax in pyproject.toml knows these.
# On a slow or busy machine simulated devices reach a collective at very different times: by default
# XLA warns after 20 s and ends the process after 40.
PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    " --xla_cpu_collective_timeout_seconds=1200"
)
# With XLA's scheduler for concurrency, jaxlib 0.10 runs independent permutes at the same time (the
# two rings of `layout.ring: rsa`, those of a grid, blocks and sums of `layout.collective_matmul`),
# and the process hangs or aborts.
# Without that scheduler rings need less memory; unrolled layers without a ring need more.
ONE_PERMUTE_AT_A_TIME = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def _set_flags(layout: Layout) -> None:
    """Adds the flags to XLA_FLAGS in the environment, unless they are there already."""
    # True where rings or a pipeline may run; on every grid, to keep the rule short.
    permutes = layout.pp * layout.cp * layout.row * layout.col > 1 or layout.collective_matmul
    for flag in (PATIENCE, *((ONE_PERMUTE_AT_A_TIME,) if permutes else ())):
        flags = os.environ.get("XLA_FLAGS", "")
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


def prepare(config: Config, *, double: bool = False, world: World | None = None) -> str:
    """Sets JAX up for a config, before anything has run; describes the devices in a line.

    Where JAX has started already, as in a test or a notebook, its devices and XLA's flags stay as
    they are: see `ONE_PERMUTE_AT_A_TIME` for what can go wrong with a ring then.

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
