"""The costs of units: computed once for each, and scaled where that is exact."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from jaxptd.analysis import memory_model
from jaxptd.config import Config
from jaxptd.hardware import Cluster
from jaxptd.layout import Layout
from jaxptd.planner.cost.ends import first_terms, last_terms
from jaxptd.planner.cost.layer import LayerTerms, layer_terms
from jaxptd.planner.cost.terms import total
from jaxptd.planner.own.step import OwnStep, Predictor
from jaxptd.planner.search.bounds import UnitCost
from jaxptd.planner.search.space import Space, Unit

REMATS = ("none", "attention", "dots", "full")


class Fixed(NamedTuple):
    """What a layout keeps of a sequence, and its state, as `UnitCost` has them."""

    config: Config
    kept: Mapping[str, float]
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
        return Fixed(config, kept, own, step.state["gradients"], 4 * matrices)

    def _bare(self, unit: Unit) -> UnitCost | None:
        """Without collectives and copies; None if the layout does not divide the model."""
        fixed = self._fixed_of(unit.layout)
        if fixed is None:
            return None
        setting = OwnStep(fixed.config).setting(self.cluster)
        spread = dataclasses.replace(
            setting.spread, micro_batch=unit.micro_batch, global_batch=unit.micro_batch
        )
        setting = dataclasses.replace(setting, spread=spread)
        terms = [(stack.layers, layer_terms(setting, stack)) for stack in self.space.stacks]

        def seconds(remat: str) -> float:
            return sum(layers * _seconds(each, remat) for layers, each in terms)

        ends = total(first_terms(setting)) + total(last_terms(setting))
        kept = {remat: unit.micro_batch * size for remat, size in fixed.kept.items()}
        own = fixed.state, fixed.gradients, fixed.matrices
        return UnitCost(functools.cache(seconds), ends, kept, *own)

    def _whole(self, unit: Unit) -> UnitCost | None:
        """With the collectives and copies of layers."""
        bare = self.bare(unit)
        config = bare and self.space.unit_config(unit)
        if bare is None or config is None:
            return None

        def seconds(remat: str) -> float:
            passes, _ = self.predict.unit(config, remat)
            return sum(s.layers * passes[s.name, remat].seconds for s in self.space.stacks)

        _, ends = self.predict.unit(config, "none")
        own = total(ends.first) + total(ends.last)
        return dataclasses.replace(bare, layers=functools.cache(seconds), ends=own)


def _seconds(terms: LayerTerms, remat: str) -> float:
    return total(terms.forward) + total(terms.backward(remat))
