"""Starts the devices of a command: accelerators, or simulated ones on the CPU."""

import contextlib
import functools
import os
import re
import subprocess
import sys
from typing import Any

import jax

from jaxptd.analysis.hardware import memory_limit
from jaxptd.config import Config
from jaxptd.config.xla import GPU_MEMORY, process_flags
from jaxptd.display import bytes_text
from jaxptd.distributed.launchers import World
from jaxptd.errors import QUOTED, UserError, quoted
from jaxptd.fields import checked
from jaxptd.mesh import Layout, jax_option
from jaxptd.models.families import with_vocabulary

MOST = 512  # simulated devices; each has its own threads

_FLAG_ERROR = re.compile("Unknown flags? .*|Couldn't interpret value .*|Could not open file .*")

# Variables that set the share of a GPU's memory that JAX takes for this process.
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@checked("jaxptd.simulate")
def simulate(devices: int) -> None:
    """Simulates devices on the CPU, to try layouts without GPUs. Call it before anything uses JAX.

    >>> import jaxptd
    >>> jaxptd.simulate(8)
    >>> jaxptd.make_mesh(jaxptd.Layout(dp=2, tp=4)).size
    8

    Args:
        devices: how many.

    Raises:
        UserError: JAX has started with fewer devices, or others.
    """
    if not 1 <= devices <= MOST:
        raise UserError(f"simulate({devices}): use 1 to {MOST} devices")
    _set_flags(Layout(pp=devices))
    with contextlib.suppress(RuntimeError):  # JAX has started already
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_platforms", "cpu")
    started = _started()
    if started[0].platform != "cpu" or len(started) < devices:
        raise UserError(
            f"simulate({devices}): JAX has started already, with {len(started)} x "
            f"{started[0].device_kind}; restart Python (in a notebook its kernel), and call "
            f"jaxptd.simulate({devices}) before anything else that uses JAX"
        )


@checked("jaxptd.use_devices")
def use_devices(number: int) -> str:
    """Uses this machine's accelerators, or simulates CPU devices if there are none.

    The same notebook then runs on a GPU host and on a laptop. Call it before anything uses JAX.

    >>> import jaxptd
    >>> jaxptd.use_devices(8)
    '8 simulated CPU devices'

    Args:
        number: how many devices you need.

    Returns:
        the devices, in words.

    Raises:
        UserError: there are accelerators, but fewer; or JAX has started with fewer devices.
    """
    if not 1 <= number <= MOST:
        raise UserError(f"use_devices({number}): use 1 to {MOST} devices")
    _set_flags(Layout(pp=number))
    with contextlib.suppress(RuntimeError):  # JAX has started already
        jax.config.update("jax_num_cpu_devices", number)
        _set_fraction()
    started = _started(f"call jaxptd.simulate({number}) instead")
    if len(started) < number:
        raise UserError(
            f"use_devices({number}): there are {len(started)} x {started[0].device_kind}; restart "
            f"Python (in a notebook its kernel), and call jaxptd.simulate({number}) instead"
        )
    return _description(started, number)


def ready(config: Config) -> tuple[Config, str]:
    """Prepares for a config passed from Python; also returns the devices, described in a line.

    float64 stays enabled if it is.

    Returns:
        the config, with model.vocab_size set.

    Raises:
        UserError: as `prepare`.
    """
    config = with_vocabulary(config)
    return config, prepare(config, double=bool(jax.config.read("jax_enable_x64")))


def start() -> list[Any]:
    """Starts all of JAX's devices, for a command that needs no config.

    Raises:
        UserError: they do not start.
    """
    _set_flags(Layout(cp=2))  # a layout with rings of permutes may run later
    _set_fraction()
    return _started("set JAX_PLATFORMS=cpu to simulate devices")


def _set_flags(layout: Layout) -> None:
    """Adds flags to XLA_FLAGS in the environment unless it already sets them.

    Raises:
        UserError: XLA does not know the user's flags.
    """
    _check_flags(os.environ.get("XLA_FLAGS", ""))
    for flag in process_flags(layout):
        flags = os.environ.get("XLA_FLAGS", "")
        if flag not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


@functools.cache
def _check_flags(flags: str) -> None:
    """Raises UserError for unknown XLA flags, for which XLA would abort with pages of text.

    Asks XLA in another process, which takes 0.2 s.
    """
    if not flags.strip():
        return
    command = [sys.executable, "-c", "from jaxlib import _jax; _jax.CompileOptions()"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60
        )
        if answer.returncode and (match := _FLAG_ERROR.search(answer.stderr)):
            raise UserError(
                f"the environment has XLA_FLAGS={quoted(flags)}: {quoted(match[0], 2 * QUOTED)}; "
                "unset or fix it"
            )


def _set_fraction() -> None:
    """Sets the share of a GPU's memory that JAX takes, unless the user has set it."""
    if not any(os.environ.get(name) for name in FRACTIONS):
        os.environ[FRACTIONS[0]] = str(GPU_MEMORY)


def _started(remedy: str = "use train.platform=cpu to simulate devices") -> list[Any]:
    """JAX's devices. Raises UserError if they do not start."""
    try:
        return jax.devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # the latter if no plugin for that platform is installed
        platforms = jax_option("jax_platforms")
        reason = str(error) or f"no plugin for JAX_PLATFORMS={platforms} is installed"
        raise UserError(
            f"JAX cannot start its devices: {' '.join(reason.split())}; {remedy}"
        ) from error


def prepare(config: Config, *, double: bool = False, world: World | None = None) -> str:
    """Sets up JAX for a config before anything runs; returns the devices, described in a line.

    If JAX has started already, as in a test or a notebook, its devices and XLA's flags stay as
    they are; see `config.xla` for what can then go wrong with a ring.

    Args:
        config: its layout gives the number of devices, train.platform their kind.
        double: allow float64.
        world: the processes of the run, which have joined. None for this process alone.

    Raises:
        UserError: there are fewer devices than the layout needs, they do not start, or a process
            does not have its share of them.
    """
    world = world or World()
    needed = config.layout.num_devices
    _set_flags(config.layout)
    if config.train.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # JAX has already started
        jax.config.update("jax_num_cpu_devices", min(world.share(needed), MOST))
        _set_fraction()
    devices = _started()
    if len(devices) < needed:
        raise UserError(
            f"layout ({config.layout}) needs {needed} devices, "
            f"{'this machine has' if world.alone else 'all processes have'} {len(devices)} "
            f"({devices[0].device_kind}); use smaller axes, or {_more(devices, needed)}"
        )
    if not world.alone and len(jax.local_devices()) != world.share(needed):
        raise UserError(
            f"{world.name} has {len(jax.local_devices())} devices, but its share of the layout "
            f"({config.layout}) is {world.share(needed)}; use a layout of {len(devices)} devices, "
            "or let each process see only its share (CUDA_VISIBLE_DEVICES)"
        )
    wide = double or config.model.dtype == "float64"
    if bool(jax.config.read("jax_enable_x64")) != wide:  # already so inside `jax.enable_x64`
        jax.config.update("jax_enable_x64", wide)
    return _description(devices, needed) + (f" of {world.count} processes" * (not world.alone))


def _more(devices: list[Any], needed: int) -> str:
    """The remedy for too few devices; JAX cannot simulate more of them once it has started."""
    if devices[0].platform == "cpu" and needed > MOST:
        return f"accelerators: a process simulates at most {MOST} devices"
    if devices[0].platform == "cpu":
        return f"call jaxptd.simulate({needed}) in a new Python, before anything uses JAX"
    return "train.platform=cpu to simulate devices"


def _description(devices: list[Any], needed: int) -> str:
    if devices[0].platform == "cpu":
        return f"{needed} simulated CPU device{'s' if needed > 1 else ''}"
    limit = memory_limit(jax.local_devices()[0])
    memory = f", {bytes_text(limit)} of memory each" if limit else ""
    names = [name for name in FRACTIONS if os.environ.get(name)]
    share = f" ({names[0]}={os.environ[names[0]]})" if memory and names else ""
    return f"{needed} of {len(devices)} x {devices[0].device_kind}{memory}{share}"
