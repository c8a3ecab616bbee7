"""The memory that one more layer costs, of compiled steps."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.lib.compiler import UNTRIED
from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.compiling import gpus
from jaxptd.config import Config
from jaxptd.mesh import make_mesh
from jaxptd.models.families import architecture_of
from jaxptd.step import Program

LAYERS = (2, 4)  # of the two steps that are compared
Devices = Callable[[int], Sequence[Any] | None]  # a number -> the devices to compile for


class Growth(NamedTuple):
    """Bytes of one more layer on one device.

    Args:
        state: parameters and moments, from the sizes of the compiled step's arguments.
        temporary: all else: gradients, and what the layer keeps for backward.
        gradients: by this library's formula.
        formula: what it keeps, by this library's formula.
    """

    state: int
    temporary: int
    gradients: int
    formula: int

    @property
    def kept(self) -> int:
        """What is kept for backward, as compiled."""
        return self.temporary - self.gradients

    @property
    def total(self) -> int:
        """All that one more layer costs, as compiled."""
        return self.state + self.temporary


def simulated(_: int) -> None:
    """The devices of this process, in which CPUs are simulated."""
    return


def absent(number: int) -> Sequence[Any]:
    """H200s that are not there."""
    return gpus(number)


def growth(config: Config, devices: Devices) -> Growth:
    """Compiles a config with 2 and with 4 layers; the difference of two layers, halved."""
    small, large = (_memory(config, layers, devices) for layers in LAYERS)
    state, temporary, gradients = (
        (more - less) // 2 for more, less in zip(large, small, strict=True)
    )
    (stack,) = architecture_of(config.model).stacks
    kept = memory_model.layer(config, stack, config.model.remat)
    return Growth(state, temporary, gradients, kept)


def _memory(config: Config, layers: int, devices: Devices) -> tuple[int, int, int]:
    """Arguments and temporary memory of a compiled step, and gradients by the formula, bytes."""
    model = dataclasses.replace(config.model, num_layers=layers)
    made = dataclasses.replace(config, model=model)
    mesh = make_mesh(config.layout, devices(config.layout.num_devices))
    program = Program(made, mesh)
    found, zero = compile_step(program, UNTRIED).memory_analysis(), program.resolved.zero
    gradients = memory_model.state(made, zero)["gradients"] - memory_model.narrowed(made, zero)
    return found.argument_size_in_bytes, found.temp_size_in_bytes, gradients
