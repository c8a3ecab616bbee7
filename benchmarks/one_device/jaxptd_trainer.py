"""jaxptd's steps of `benchmarks.one_device`; run by `trainer.py`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.lib.timing import first_gpu
from benchmarks.one_device.cases import Case
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.config import Kernels
from jaxptd.mesh import make_mesh
from jaxptd.step import Program


def start(case: Case, kernels: Kernels = "xla") -> tuple[Any, Callable[[], dict[str, Any]]]:
    """Makes the step and the facts of `trainer.Trainer`.

    Raises:
        UserError: JAX finds no GPU.
    """
    device = first_gpu()
    model = dataclasses.replace(case.config.model, kernels=kernels)
    config = dataclasses.replace(case.config, model=model)
    program = Program(config, make_mesh(config.layout))
    state, batch = program.init_state(), program.place(random_batch(config))

    def step() -> Callable[[], float]:
        nonlocal state
        state, metrics = program.train_step(state, batch)
        return lambda: float(metrics["loss"])

    def facts() -> dict[str, Any]:
        return {
            "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use", 0),
            "device": device.device_kind,
            "versions": {"jax": jax.__version__},
            "parameters": sum(math.prod(info.shape) for info in program.infos.values()),
            "attention": program.resolved.model.attention,
        }

    return step, facts
