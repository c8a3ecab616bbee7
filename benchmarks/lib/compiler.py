"""Compiles steps for H200s that this machine does not have: XLA's options, programs, memory."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxptd.analysis.compiled_step import CPU_OPTIONS, UNOPTIMISED, compile_step
from jaxptd.compiling import PLUGINS, device_bytes, gpus
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

PACKAGES = ("flax", "optax", *PLUGINS.split())  # whose versions shape a step compiled for GPUs
QUICK: dict[str, Any] = CPU_OPTIONS | UNOPTIMISED
# For GPUs that are absent: machine code is not optimised, because only memory is read. Temporaries
# are those of the optimised program, because buffers are assigned before that.
QUICK_ON_GPUS: dict[str, Any] = UNOPTIMISED | {"xla_gpu_disable_gpuasm_optimizations": True}
# XLA does not try configurations of a matmul to find one that works, and makes no machine code: our
# `ptxas` writes none. By default small float32 matmuls have no configuration, and XLA refuses them.
UNTRIED = QUICK_ON_GPUS | {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_cuda_data_dir": str(Path(__file__).with_name("cuda")),
}


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """Parses `name=value` words into XLA's options.

    Raises:
        UserError: a word is not of that form.
    """
    for word in words:
        if "=" not in word:
            raise UserError(f"--compiler {word}: write it as name=value")
    return dict(word.split("=", 1) for word in words)


def compile_only() -> None:
    """Leaves this machine's accelerators alone: steps are only compiled for GPUs."""
    jax.config.update("jax_platforms", "cpu")


def on_h200s(config: Config) -> Any:
    """A config's program for H200s, to compile on a machine that has none."""
    return Program(config, make_mesh(config.layout, gpus(config.layout.num_devices)))


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    """The size of each axis of a mesh, by its name."""
    return {str(axis): size for axis, size in mesh.shape.items()}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one GPU during a step."""

    peak: int  # all that the program needs, including state
    state: int  # its arguments: parameters, optimizer state and batch
    seconds: float  # CPU time of the compilation
    device: int = 0  # arguments and temporaries; unlike the peak, without host memory
    host: int = 0  # what `layout.offload` puts there

    def fits(self, size: float) -> bool:
        """True if the peak fits on a GPU with this many bytes."""
        return self.peak <= size


def compiled_memory(config: Config, options: Mapping[str, Any] = UNTRIED) -> Memory:
    """Compiles a config's step for H200s and reads its memory.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    start, program = time.process_time(), on_h200s(config)
    found = compile_step(program, options).memory_analysis()
    seconds = time.process_time() - start
    state, device = found.argument_size_in_bytes, device_bytes(program, found)
    host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    host += state + found.temp_size_in_bytes - device
    return Memory(found.peak_memory_in_bytes, state, seconds, device, host)
