"""Compiles training steps for measurements, and makes batches to run them on."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxptd.analysis.jaxprs import traced
from jaxptd.config import Config
from jaxptd.mesh import on_gpus
from jaxptd.models.families import family_of
from jaxptd.step import Program

# XLA on CPU drops the barriers that separate `jax.checkpoint`'s recomputation from the first
# computation, which would undo it in an unrolled program. Without the pass that drops them,
# temporary bytes mean the same as on a GPU. jaxlib 0.12 separates the two by itself, and aborts
# without the pass if loops contain barriers.
CPU_OPTIONS: dict[str, Any] = (
    {} if jax.__version_info__ >= (0, 12) else {"xla_disable_hlo_passes": "cse_barrier_expander"}
)
# Skipping LLVM's optimisations halves compile time; program, collectives and memory stay the same,
# because XLA decides on them earlier.
UNOPTIMISED: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def compile_to_read(program: Program, options: Mapping[str, Any] | None = None) -> Any:
    """Compiles a program's training step for reading; on CPUs too slow to run.

    Args:
        program: holds the step.
        options: the compiler's.
    """
    quick = {} if on_gpus(program.mesh) else UNOPTIMISED
    return traced(program).lower().compile(compiler_options={**quick, **(options or {})} or None)


def compile_step(program: Any, gpu_options: Mapping[str, Any] | None = None) -> Any:
    """Compiles the training step of a `Program` or a `Peer` from abstract arguments.

    Args:
        program: holds the step.
        gpu_options: compiler options for GPUs, added to the step's own.
    """
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    return lowered.compile(compiler_options=CPU_OPTIONS if on_cpu else gpu_options)


def random_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of random numbers, with the fields that a user provides."""
    family = family_of(config.model)
    drawn = family.draw(config, np.random.default_rng(seed))
    return {name: drawn[name] for name in family.given(config)}
