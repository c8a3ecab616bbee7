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

# ---- H200s that this machine doesn't have --------------------------------------------------------

HARDWARE = Path(__file__).parent / "hardware" / "h200.txtpb"
PLUGINS = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13"


def gpus(number: int, memory: int | None = None) -> list[Any]:
    """Describes H200s to compile for.

    Args:
        number: how many.
        memory: bytes per GPU, which limit how far XLA moves collectives to hide them. None takes
            an H200's.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=hardware(memory), topology=f"1x1x{number}"
        ).devices
    except Exception as error:
        raise UserError(
            f"the CUDA compiler is missing ({' '.join(str(error).split())[:120]}); "
            f"{install('h200')}, its plugins in the version of jax ({jax.__version__})"
        ) from error


def hardware(memory: int | None = None) -> str:
    """The description of an H200 with the given bytes of memory."""
    text = HARDWARE.read_text(encoding="utf-8")
    if memory is None:
        return text
    return re.sub(r"(?<=device_memory_size: )\d+", str(memory), text)


# ---- what the planner asks of a step -------------------------------------------------------------

# With unrolled layers, peak and bytes are linear in the number of layers once the model is deep
# enough for memory to peak in the layers' backward pass and not in the loss.
DEPTHS = (8, 12)


def check_compiler() -> None:
    """Raises UserError unless the compiler for GPUs is installed."""
    gpus(1)


def measure(config: Config, memory: int) -> Figures:
    """Compiles a step for as many H200s as its layout has, and reads memory and traffic.

    Steps with scanned layers or pipeline stages are compiled whole: their compile time does not
    depend on depth. Unrolled layers are compiled at depths 8 and 12 and extrapolated linearly;
    models with `remat_layers`, or with stacks of different depths, are compiled whole.

    Args:
        config: the run's config.
        memory: bytes of each GPU.

    Raises:
        UserError: the compiler is not installed, or rejects this step.
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
    """True if the whole model's figures can be extrapolated from two with fewer layers."""
    model = config.model
    return (
        not model.scan_layers
        and config.layout.pp == 1
        and model.remat_layers is None
        and model.decoder_layers == model.num_layers
        and model.period == 1
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
        raise UserError(
            f"XLA cannot compile it: {' '.join(str(error).split())[:200]}; use another layout"
        ) from error
    text, pipeline = compiled.as_text(), Pipeline(config.layout.pp, program.resolved.trips)
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    return Figures(
        device_bytes(program, compiled.memory_analysis()),
        summary(text, pipeline).other_bytes,
        hidden_shares(moves(text, sizes, pipeline), sizes),
    )


def device_bytes(program: Any, memory: Any) -> int:
    """Bytes per device that a compiled step needs: arguments and temporaries.

    XLA's own peak ignores gaps between arrays and includes host memory.

    Args:
        program: of the step.
        memory: XLA's memory statistics of it.
    """
    arguments = int(memory.argument_size_in_bytes)
    if not memory.host_argument_size_in_bytes:
        # XLA counts arguments it cannot donate as device memory; JAX keeps these in host memory.
        state = memory_model.state(program.config, program.resolved.zero)
        arguments -= memory_model.hosted(program.config.layout, state)
    return max(arguments, 0) + int(memory.temp_size_in_bytes)


def hidden_shares(moves: Iterable[Move], sizes: dict[str, int]) -> dict[str, float]:
    """The share of the bytes over each set of axes that is overlapped with matmuls or attention.

    Collectives over the same axes have the same bandwidth, so this is also the share of time.

    Args:
        moves: all collectives of a step.
        sizes: sizes of the mesh axes.
    """
    every: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for each in moves:
        axes, sent = "+".join(each.axes), each.sent(sizes)
        every[axes] = every.get(axes, 0.0) + sent
        hidden[axes] = hidden.get(axes, 0.0) + sent * (each.hidden_by != "nothing")
    return {axes: hidden[axes] / sent for axes, sent in every.items() if sent}
