"""A training step compiled to be measured, and a batch to run it on."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxptd.config import Config

# XLA on CPU drops the barriers that keep what `jax.checkpoint` computes again apart from what was
# computed before, and so would undo it in an unrolled program. Both programs are compiled without
# that pass, so that temporary bytes mean what they mean on a GPU. jaxlib 0.12 keeps them apart by
# itself, and aborts without the pass where loops have barriers.
CPU_OPTIONS: dict[str, Any] = (
    {} if jax.__version_info__ >= (0, 12) else {"xla_disable_hlo_passes": "cse_barrier_expander"}
)


def compile_step(program: Any, gpu_options: Mapping[str, Any] | None = None) -> Any:
    """The compiled training step of a `Program` or a `Peer`, from abstract arguments.

    gpu_options: what XLA is asked for on GPUs beside the step's own.
    """
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    on_cpu = program.mesh.devices.flat[0].platform == "cpu"
    return lowered.compile(compiler_options=CPU_OPTIONS if on_cpu else gpu_options)


def random_batch(config: Config) -> dict[str, np.ndarray]:
    """Random tokens, each the next one's target."""
    shape = (config.train.global_batch_size, config.model.seq_length + 1)
    rows = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
