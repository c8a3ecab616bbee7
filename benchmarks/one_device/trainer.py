"""Runs one trainer of `benchmarks.one_device`, in a process of its own.

`python -m benchmarks.one_device.trainer jaxptd --case 124m --steps 20` (or `torch`) prints one JSON
object: the seconds of each step, losses, bytes. `jaxptd-triton` is jaxptd with `model.kernels:
triton`; PyTorch's trainer is `torch_trainer.py`.
"""

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.lib.timing import first_gpu, queued
from benchmarks.one_device.cases import CASES, Case
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

TRAINERS = ("jaxptd", "jaxptd-triton", "torch")
WARM_UP = 5  # steps that are not timed; the first compiles


class Trainer(NamedTuple):
    """A model that is trained on one batch over and over.

    Args:
        step: starts one step -> waits for its end and returns its loss.
        facts: returns what is known after training: peak_bytes, device, versions, parameters,
            attention.
    """

    step: Callable[[], Callable[[], float]]
    facts: Callable[[], dict[str, Any]]


def start(name: str, case: Case) -> Trainer:
    """Starts the trainer of that name; what follows a hyphen selects its kernels.

    Raises:
        UserError: the trainer is not installed, or finds no GPU.
    """
    library, *kernels = name.split("-")
    if library == "jaxptd":
        return own(case, *kernels)
    try:
        return Trainer(*importlib.import_module("benchmarks.one_device.torch_trainer").start(case))
    except ModuleNotFoundError as error:
        raise UserError(f"{error.name} is not installed; pip install {error.name}") from error


def own(case: Case, kernels: str = "xla") -> Trainer:
    """jaxptd's trainer.

    Raises:
        UserError: JAX finds no GPU.
    """
    device = first_gpu()
    model: Any = dataclasses.replace(case.config.model, kernels=kernels)
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

    return Trainer(step, facts)


def run(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Runs the trainer; returns the seconds of `steps` steps, all losses and the facts."""
    seconds, losses = queued(trainer.step, WARM_UP + steps)
    timed = {"seconds": seconds[WARM_UP:], "compiling": seconds[0], "losses": losses}
    return timed | trainer.facts()


def add_steps(parser: Parser) -> None:
    """Adds the option `--steps`."""
    parser.add_argument(
        "--steps", type=int, default=20, help="timed steps, after five warm-up steps; 2 or more"
    )


def check_steps(steps: int) -> None:
    """Raises UserError for fewer than two steps, since quantiles need two."""
    if steps < 2:
        raise UserError(f"--steps={steps} must be at least 2")


def main(argv: Sequence[str] | None = None) -> int:
    """Times steps of a model on this machine's first GPU."""
    parser = Parser(prog="python -m benchmarks.one_device.trainer", description=main.__doc__)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    add_steps(parser)
    options = parser.parse_args(argv)
    check_steps(options.steps)
    print(json.dumps(run(start(options.trainer, CASES[options.case]), options.steps)))
    return 0


if __name__ == "__main__":
    run_command(main)
