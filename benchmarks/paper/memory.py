"""Memory of a step of any layout, compiled for as many H200s without having any."""

import dataclasses
import time

from jaxptd.analysis.compiled_step import compile_step
from jaxptd.compiling.absent import gpus
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
    """

    peak: int
    state: int
    seconds: float

    def fits(self, size: float) -> bool:
        """True if a GPU with so many bytes can hold the peak."""
        return self.peak <= size


def compiled_memory(config: Config) -> Memory:
    """Compiles a config's step for H200s and reads its memory.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    start = time.process_time()
    program = Program(config, make_mesh(config.layout, gpus(config.layout.num_devices)))
    found = compile_step(program).memory_analysis()
    seconds = time.process_time() - start
    return Memory(found.peak_memory_in_bytes, found.argument_size_in_bytes, seconds)
