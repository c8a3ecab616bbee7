"""Training steps: gradients, clipping by their norm, and an optimizer.

Source: Pascanu et al., arXiv 1211.5063 (clipping).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from reference.draws import Masks
from reference.families import MODELS, Batch
from reference.layers import Options
from reference.optimizers import DIRECTIONS, Kept, Rule, is_matrix
from reference.tape import Value, gradients

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of a step; parameters are those after it."""

    loss: float
    norm: float
    rate: float
    gradients: Arrays
    params: Arrays


def loss_and_gradients(
    family: str, params: Arrays, batch: Batch, options: Options, masks: Masks
) -> tuple[float, Arrays]:
    """The training loss of a batch, and its derivative by each parameter."""
    values = {name: Value(p) for name, p in params.items()}
    loss = MODELS[family](values, batch, options, masks)
    return float(loss.x), gradients(loss, values)


@dataclasses.dataclass
class Training:
    """A run: its parameters, and its optimizer's memory.

    Args:
        family: of the model.
        options: of the model.
        rule: of the optimizer.
        seed: of dropout.
        params: canonical, float64.
    """

    family: str
    options: Options
    rule: Rule
    seed: int
    params: Arrays

    def __post_init__(self) -> None:
        self.done = 0
        self.kept = {name: Kept(name) for name in self.params}

    def step(self, batch: Batch, rate: float | None = None) -> Step:
        """Runs a step. rate: used in place of the rule's, as by one who rounds it."""
        masks, rule = Masks(self.seed, self.done, self.options.dropout), self.rule
        loss, grads = loss_and_gradients(self.family, self.params, batch, self.options, masks)
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        own, self.done = rule.rate(self.done), self.done + 1
        shorter = min(1.0, rule.clip / norm)
        self.params = {
            name: p - (own if rate is None else rate) * self._direction(name, grads[name] * shorter)
            for name, p in self.params.items()
        }
        return Step(loss, norm, own, grads, self.params)

    def _direction(self, name: str, g: np.ndarray) -> np.ndarray:
        kept = self.kept[name]
        kept.steps += 1
        decay = self.rule.decay * self.params[name] if is_matrix(name) else 0
        return DIRECTIONS[self.rule.name](g, kept, self.rule) + decay
