"""Memory of a step of any layout, compiled for as many H200s without having any."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.lib.compiler import UNTRIED
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.compiling import device_bytes, gpus
from jaxptd.config import Config
from jaxptd.mesh import make_mesh
from jaxptd.step import Program


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of one GPU during a step.

    Args:
        peak: bytes of all that the program needs, state included.
        state: bytes of its arguments: parameters, optimizer state and batch.
        seconds: of CPU time that the compilation took.
        device: bytes of its arguments and temporaries; unlike the peak without what is in the
            host's memory.
        host: bytes of those that `layout.offload` has there.
    """

    peak: int
    state: int
    seconds: float
    device: int = 0
    host: int = 0

    def fits(self, size: float) -> bool:
        """True if a GPU with so many bytes can hold the peak."""
        return self.peak <= size


def compiled_memory(config: Config, options: Mapping[str, Any] = UNTRIED) -> Memory:
    """Compiles a config's step for H200s and reads its memory.

    Args:
        config: of the step.
        options: of the compiler, beside the step's own.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    start = time.process_time()
    program = Program(config, make_mesh(config.layout, gpus(config.layout.num_devices)))
    found = compile_step(program, options).memory_analysis()
    seconds = time.process_time() - start
    state, device = found.argument_size_in_bytes, device_bytes(program, found)
    host = found.host_argument_size_in_bytes + found.host_temp_size_in_bytes
    host += state + found.temp_size_in_bytes - device
    return Memory(found.peak_memory_in_bytes, state, seconds, device, host)
