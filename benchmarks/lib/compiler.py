"""Steps compiled for H200s that are absent: XLA's options, the program, its memory."""

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

PACKAGES = ("flax", "optax", *PLUGINS.split())  # on whose versions a step compiled for GPUs depends
QUICK: dict[str, Any] = CPU_OPTIONS | UNOPTIMISED
# For GPUs that are absent: code that is not optimised, of which memory is read. Temporaries are
# those of the same program, as buffers are assigned before.
QUICK_ON_GPUS: dict[str, Any] = UNOPTIMISED | {"xla_gpu_disable_gpuasm_optimizations": True}
# Nor does XLA try configurations of a product, to find one that works, or make machine code: our
# `ptxas` writes none. Small products in float32 have no configuration by default, and then XLA
# refuses.
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
    """Uses no accelerator of this machine: steps are only compiled for GPUs."""
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

    peak: int  # all that the program needs, state included
    state: int  # its arguments: parameters, optimizer state and batch
    seconds: float  # of CPU time that the compilation took
    device: int = 0  # arguments and temporaries; unlike the peak without those of the host's memory
    host: int = 0  # what `layout.offload` has there

    def fits(self, size: float) -> bool:
        """True if a GPU with so many bytes can hold the peak."""
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
