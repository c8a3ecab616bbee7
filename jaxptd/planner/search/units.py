"""The costs of units: computed once for each, and scaled where that is exact."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from jaxptd.analysis import memory_model
from jaxptd.config import Config, Remat
from jaxptd.hardware import Cluster
from jaxptd.layout import Layout
from jaxptd.planner.cost import Program, Setting
from jaxptd.planner.cost.ends import first_terms, last_terms
from jaxptd.planner.cost.layer import LayerTerms, layer_terms
from jaxptd.planner.cost.step import message_terms
from jaxptd.planner.cost.terms import total
from jaxptd.planner.own.program import ADDED, STACKED
from jaxptd.planner.own.step import OwnStep, Predictor
from jaxptd.planner.search.bounds import UnitCost
from jaxptd.planner.search.space import REMATS, Space, Unit


class Fixed(NamedTuple):
    """The bytes that a layout keeps of a sequence, and its state, as `UnitCost` has them."""

    config: Config
    setting: Setting
    kept: Mapping[Remat, float]
    state: float
    gradients: float
    matrices: float


class Units:
    """The costs of the units of a space on a cluster.

    Args:
        space: of the layouts.
        cluster: the devices.
    """

    def __init__(self, space: Space, cluster: Cluster) -> None:
        self.space, self.cluster = space, cluster
        self.predict = Predictor(cluster)
        self.bare = functools.cache(self._bare)
        self.whole = functools.cache(self._whole)
        self._fixed_of = functools.cache(self._fixed)

    def _fixed(self, layout: Layout) -> Fixed | None:
        """None if the layout does not divide the model."""
        config = self.space.unit_config(Unit(layout, 1))
        if config is None:
            return None
        step = OwnStep(config)
        setting, stacks = step.setting(self.cluster), self.space.stacks
        kept = {
            remat: float(sum(s.layers * memory_model.layer(config, s, remat) for s in stacks))
            for remat in REMATS
        }
        own = step.state["parameters"] + step.state["optimizer"]
        matrices = sum(stack.layers * setting.layer_parameters(stack) for stack in stacks)
        return Fixed(config, setting, kept, own, step.state["gradients"], 4 * matrices)

    def _bare(self, unit: Unit, many: bool) -> UnitCost | None:
        """Without collectives and copies; None if the layout does not divide the model."""
        fixed = self._fixed_of(unit.layout)
        if fixed is None:
            return None
        spread = dataclasses.replace(
            fixed.setting.spread, micro_batch=unit.micro_batch, global_batch=unit.micro_batch
        )
        program = _program(fixed.setting.program, many=many)
        setting = dataclasses.replace(fixed.setting, spread=spread, program=program)
        terms = [(stack.layers, layer_terms(setting, stack)) for stack in self.space.stacks]

        def seconds(remat: Remat) -> float:
            return sum(layers * _seconds(each, remat) for layers, each in terms)

        last = total(last_terms(setting))
        ends = total(first_terms(setting)) + last
        hop = 2 * total(message_terms(setting, inside=self.space.gpus <= self.cluster.node_size))
        kept = {remat: unit.micro_batch * size for remat, size in fixed.kept.items()}
        own = fixed.state, fixed.gradients, fixed.matrices
        number = self.space.layers
        return UnitCost(functools.cache(seconds), ends, last, hop, number, kept, *own)

    def _whole(self, unit: Unit, many: bool, stages: bool) -> UnitCost | None:
        """With the collectives and copies of layers.

        Args:
            unit: of the layout.
            many: whether a step has several micro-batches.
            stages: whether it has several stages.
        """
        bare = self.bare(unit, many)
        fixed = self._fixed_of(unit.layout)
        if bare is None or fixed is None:
            return None
        train = dataclasses.replace(fixed.config.train, global_batch_size=unit.micro_batch)
        config = dataclasses.replace(fixed.config, train=train)

        program = _program(fixed.setting.program, many=many, stages=stages)

        def seconds(remat: Remat) -> float:
            passes, _ = self.predict.unit(config, program, remat)
            return sum(s.layers * passes[s.name, remat].seconds for s in self.space.stacks)

        _, ends = self.predict.unit(config, program, "none")
        last = total(ends.last)
        own = total(ends.first) + last
        return dataclasses.replace(bare, layers=functools.cache(seconds), ends=own, last=last)


def _program(found: Program, *, many: bool, stages: bool = False) -> Program:
    """The record of a program without casts, which depend on the ZeRO stage."""
    return dataclasses.replace(
        found,
        cast=0,
        accumulate=ADDED if many else 0,
        stacked=STACKED if stages else found.stacked,
    )


def _seconds(terms: LayerTerms, remat: str) -> float:
    return total(terms.forward) + total(terms.backward(remat))
