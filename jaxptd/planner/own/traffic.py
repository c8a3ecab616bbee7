"""This library's collectives with their places in a step, from the formulas of `analysis.traffic`.

The formulas count a whole step. Here a step of one layer of each stack and one micro-batch is
counted for each policy of recomputation, and what happens once a step from the config itself.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxptd.analysis.collective import BROADCAST, PERMUTE, Collective
from jaxptd.analysis.traffic import Part, parts
from jaxptd.config import Config, Remat
from jaxptd.models.families import inventory_of
from jaxptd.models.parameters import parameter_infos
from jaxptd.pipeline.placement import Stages
from jaxptd.planner.cost import Placed
from jaxptd.planner.cost.collectives import Place, Under
from jaxptd.shapes import ParamShape

NAMES = {
    "tensor": "layers",
    "ring": "ring",
    "ends": "ends",
    "zero": "parameters of layers",
    "step": "once",
}


def of_one_layer(config: Config, remat: Remat) -> Iterator[Placed]:
    """Collectives of one layer of each stack and one micro-batch, and of its ends.

    Args:
        config: of one micro-batch on the devices that share it, with one layer in each stack.
        remat: what these layers compute again.
    """
    model = dataclasses.replace(config.model, remat=remat, remat_layers=None)
    config = dataclasses.replace(config, model=model)
    infos = parameter_infos(config)
    for part, each in parts(config, infos, on_gpus=True, only=("tensor", "ring", "ends")):
        yield _placed(part, each, "last" if part.what == "ends" else "layer", _under(part, each))


def once(config: Config, infos: Mapping[str, ParamShape], plan: Stages | None) -> Iterator[Placed]:
    """Collectives of ZeRO's layers, each micro-batch, and those once a step.

    Args:
        config: of the run.
        infos: of its parameters.
        plan: of its pipeline, or an outline.
    """
    layout, m = config.layout, config.train.micro_batches
    layers = {stack.name: stack.layers for stack in inventory_of(config.model).stacks}
    under: Under = "nothing" if layout.pp > 1 else "other layers"
    for part, each in parts(config, infos, plan, on_gpus=True, only=("zero", "step")):
        if part.what == "zero":
            runs = layers[part.stack or ""] * m
            yield _placed(part, each, "layer", under, runs)
        else:
            runs = 1 if "pp" in each.axes else layout.pp
            yield _placed(part, each, "step", "nothing", runs)


def _placed(part: Part, each: Collective, place: Place, under: Under, runs: int = 1) -> Placed:
    """A collective at its place, which the formulas count for so many runs together."""
    name = f"{NAMES[part.what]}, {each.kind} over {'+'.join(each.axes)}"
    count, size = each.count / runs, each.bytes / each.count
    return Placed(name, each.kind, each.axes, count, size, place, under, part.stack)


def _under(part: Part, each: Collective) -> Under:
    """The work at the same time: pieces run beside the work on the piece before."""
    if part.what == "ring":
        return "attention" if each.kind == PERMUTE else "nothing"
    if part.what == "tensor" and each.kind in (PERMUTE, BROADCAST):
        return "products"
    return "nothing"
