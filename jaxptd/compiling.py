"""Compiles training steps for H200s on a machine without GPUs: memory, kernels and schedule.

The hardware is described in `hardware/h200.txtpb`. `measure` is what `jaxptd plan --compile` asks.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.kernels import summary
from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import Move, moves
from jaxptd.config import Config, with_fields
from jaxptd.errors import UserError, install
from jaxptd.mesh import make_mesh
from jaxptd.planner.steps.traffic import Figures
from jaxptd.step import Program

# ---- absent H200s --------------------------------------------------------------------------------

HARDWARE = Path(__file__).parent / "hardware" / "h200.txtpb"
PLUGINS = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13"


def gpus(number: int, memory: int | None = None) -> list[Any]:
    """Makes so many H200s to compile for.

    Args:
        number: of them.
        memory: bytes of each, which bound what XLA moves to hide collectives; None: an H200's.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=hardware(memory), topology=f"1x1x{number}"
        ).devices
    except Exception as error:
        raise UserError(
            f"no CUDA compiler here ({' '.join(str(error).split())[:120]}); "
            f"{install('h200')}, its plugins in the version of jax ({jax.__version__})"
        ) from error


def hardware(memory: int | None = None) -> str:
    """The description of an H200, with so many bytes of memory."""
    text = HARDWARE.read_text(encoding="utf-8")
    if memory is None:
        return text
    return re.sub(r"(?<=device_memory_size: )\d+", str(memory), text)


# ---- what the planner asks of a step -------------------------------------------------------------

# Unrolled layers: peak and bytes are linear in the number of layers, but only from a depth at which
# the layers' backward pass, and not the loss, is the fullest moment.
DEPTHS = (8, 12)


def check_compiler() -> None:
    """Raises UserError where the compiler for GPUs is not installed."""
    gpus(1)


def measure(config: Config, memory: int) -> Figures:
    """Compiles a step for H200s, as many as its layout has, and reads its figures.

    A step whose layers are scanned or on stages is compiled whole, in a time that does not depend
    on its size. Of unrolled layers 8 and 12 are, and a straight line leads to the depth of the
    model; a model with `remat_layers`, or with stacks of different depths, is compiled whole.

    Args:
        config: of the step.
        memory: bytes that each GPU has.

    Raises:
        UserError: the compiler is not installed, or does not compile this.
    """
    layers = config.model.num_layers
    if not _has_depths(config):
        return _figures(config, memory)
    few, more = (_figures(_with_layers(config, depth), memory) for depth in DEPTHS)
    further = (layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    return Figures(
        round(more.bytes + further * (more.bytes - few.bytes)),
        more.moved + further * (more.moved - few.moved),
        more.hidden,
    )


def _has_depths(config: Config) -> bool:
    """True if steps of few layers tell the figures of the whole one."""
    model = config.model
    return (
        not model.scan_layers
        and config.layout.pp == 1
        and model.remat_layers is None
        and model.decoder_layers == model.num_layers
        and model.num_layers > DEPTHS[1]
    )


def _with_layers(config: Config, layers: int) -> Config:
    model = dataclasses.replace(config.model, num_layers=layers)
    if model.encoder_decoder:
        model = with_fields(model, {"encoder_decoder.num_layers": layers})
    return dataclasses.replace(config, model=model)


def _figures(config: Config, memory: int) -> Figures:
    """Compiles a step as it is."""
    mesh = make_mesh(config.layout, gpus(config.layout.num_devices, memory))
    program: Any = Program(config, mesh)
    try:
        compiled = compile_step(program)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"XLA: {' '.join(str(error).split())[:200]}; use another layout") from error
    text, pipeline = compiled.as_text(), Pipeline(config.layout.pp, program.resolved.trips)
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    return Figures(
        device_bytes(program, compiled.memory_analysis()),
        summary(text, pipeline).other_bytes,
        hidden_shares(moves(text, sizes, pipeline), sizes),
    )


def device_bytes(program: Any, memory: Any) -> int:
    """Bytes of a device that a compiled step needs: arguments and temporaries.

    XLA's own peak leaves the gaps between arrays out, and counts the host's memory in.

    Args:
        program: with the step.
        memory: XLA's figures of it.
    """
    arguments = int(memory.argument_size_in_bytes)
    if not memory.host_argument_size_in_bytes:
        # XLA takes arguments that it cannot give back for the device's; JAX has them in the host's.
        state = memory_model.state(program.config, program.resolved.zero)
        arguments -= memory_model.hosted(program.config.layout, state)
    return max(arguments, 0) + int(memory.temp_size_in_bytes)


def hidden_shares(moves: Iterable[Move], sizes: dict[str, int]) -> dict[str, float]:
    """The share of the bytes sent over each set of axes that products or attention run beside.

    Collectives over the same axes are as fast as each other, so the share of bytes is one of time.

    Args:
        moves: all collectives of a step.
        sizes: of the mesh axes.
    """
    every: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for each in moves:
        axes, sent = "+".join(each.axes), each.sent(sizes)
        every[axes] = every.get(axes, 0.0) + sent
        hidden[axes] = hidden.get(axes, 0.0) + sent * (each.hidden_by != "nothing")
    return {axes: hidden[axes] / sent for axes, sent in every.items() if sent}
