"""Counts a program's collectives in its jaxpr, multiplied by the lengths of loops.

Bytes are those of the whole tensor on one device: an all-gather's result, any other collective's
operand. Axes of size 1 are omitted, as nothing is sent along them. A pipeline's stages are added
up: a layer's collectives count once, whichever stage holds the layer.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxptd.analysis.compiled_step import compile_to_read
from jaxptd.analysis.hlo import collectives_from_hlo
from jaxptd.analysis.jaxprs import branches, traced
from jaxptd.analysis.traffic import expected
from jaxptd.collectives import moved_along
from jaxptd.config import Config
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
    add_up,
    subtract,
)
from jaxptd.fields import checked
from jaxptd.mesh import Axis, on_gpus
from jaxptd.models.families import architecture_of, family_of
from jaxptd.step import Program

PRIMITIVES = {
    "psum": ALL_REDUCE,
    "psum_invariant": ALL_REDUCE,
    "pmax": ALL_REDUCE,
    "pmin": ALL_REDUCE,
    "all_gather": ALL_GATHER,
    "all_gather_invariant": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "ppermute": PERMUTE,
    "all_to_all": ALL_TO_ALL,
    "pbroadcast": BROADCAST,
}


@checked("jaxptd.comms.collectives_of")
def collectives_of(
    jaxpr: Any, mesh: Mesh | AbstractMesh, trips: Mapping[str, int] = MappingProxyType({})
) -> list[Collective]:
    """The collectives of a jaxpr, added up by kind and axes.

    Args:
        jaxpr: the program's.
        mesh: the mesh that the program runs on.
        trips: for loops and conditionals that differ by stage, their executions by all stages
            together, in the form of `Plan.trips`.

    Raises:
        ValueError: a collective is in a while loop whose length is unknown.
    """
    sizes = dict(mesh.shape)
    return add_up(_walk(getattr(jaxpr, "jaxpr", jaxpr), sizes.get(Axis.PP, 1), (sizes, trips)))


def _walk(
    jaxpr: Any, times: int, known: tuple[Mapping[str, int], Mapping[str, int]]
) -> Iterator[Collective]:
    """Collectives below; times: this jaxpr's executions by all stages; known: axis sizes, trips."""
    sizes, trips = known
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRIMITIVES:
            yield from _read(equation, times, sizes)
        runs, endless = times * equation.params.get("length", 1), False
        if equation.primitive.name == "while":
            scope = str(equation.source_info.name_stack).rpartition("/")[2]
            runs, endless = trips.get(scope, times), scope not in trips
        inner = [c for sub, n in branches(equation, runs, trips) for c in _walk(sub, n, known)]
        if endless and inner:
            raise ValueError(
                f"{inner[0].kind} in a while loop: the number of executions is unknown"
            )
        yield from inner


def _read(equation: Any, times: int, sizes: Mapping[str, int]) -> Iterator[Collective]:
    """The collectives of one equation, one for each operand."""
    axes = equation.params.get("axes", equation.params.get("axis_name"))
    axes = axes if isinstance(axes, tuple) else (axes,)
    kind = PRIMITIVES[equation.primitive.name]
    if kind == PERMUTE:
        along = moved_along(equation.params["perm"], [sizes[axis] for axis in axes])
        axes = tuple(axes[i] for i in along)
    axes = tuple(str(axis) for axis in axes if sizes[axis] > 1)
    if Axis.PP in axes:  # all stages run it together, as one
        times //= sizes[Axis.PP]
    for variable in equation.outvars if kind == ALL_GATHER else equation.invars:
        if axes:
            size = math.prod(variable.aval.shape) * variable.aval.dtype.itemsize
            yield Collective(kind, axes, times, times * size)


# ---- a training step -----------------------------------------------------------------------------


@checked("jaxptd.comms.count")
def count(program: Program) -> list[Collective]:
    """The collectives of a training step, from its jaxpr."""
    return collectives_of(traced(program).jaxpr, program.mesh, program.resolved.trips)


@checked("jaxptd.comms.count_compiled")
def count_compiled(program: Program, options: Mapping[str, Any] | None = None) -> list[Collective]:
    """The collectives of a compiled training step, from its HLO; XLA may have merged some.

    Args:
        program: holds the training step.
        options: for the compiler.
    """
    text = compile_to_read(program, options).as_text()
    return add_up(collectives_from_hlo(text, dict(program.mesh.shape), program.resolved.trips))


@checked("jaxptd.comms.formula")
def formula(program: Program) -> list[Collective]:
    """The collectives that a training step must run, by formula."""
    config, infos, plan = program.config, program.infos, program.resolved.plan
    return add_up(expected(config, infos, plan, on_gpus=on_gpus(program.mesh)))


@checked("jaxptd.comms.per_layer")
def per_layer(program: Program) -> list[Collective]:
    """The collectives of one additional layer in each stack.

    Its gradients add bytes to the step's all-reduces, not executions.
    """
    deeper = dataclasses.replace(program, config=_deeper(program.config))
    return subtract(count(deeper), count(program))


def _deeper(config: Config) -> Config:
    """The config with one more layer in each stack: in the first part, and in the last."""
    model, longer = config.model, config.layout.stage_layers
    if longer and len(architecture_of(model).stacks) > 1:
        longer = (longer[0] + 1, *longer[1:])
    longer = longer and (*longer[:-1], longer[-1] + model.period)
    return dataclasses.replace(
        config,
        model=family_of(model).deeper(model),
        layout=dataclasses.replace(config.layout, stage_layers=longer),
    )
