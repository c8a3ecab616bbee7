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
from reference.optimizers import DIRECTIONS, Kept, Rule, balanced, counts, decays, of_experts
from reference.tape import Value, gradients

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of a step, with the parameters after it."""

    loss: float
    norm: float
    rate: float
    gradients: Arrays
    params: Arrays


def loss_and_gradients(
    family: str, params: Arrays, batch: Batch, options: Options, masks: Masks
) -> tuple[float, Arrays]:
    """The training loss of a batch, and its derivative by each parameter.

    For a bias that counts tokens, the counts replace the derivative, which is zero.
    """
    values = {name: Value(p) for name, p in params.items()}
    loss, loads = MODELS[family](values, batch, options, masks)
    return float(loss.x), gradients(loss, values) | loads


@dataclasses.dataclass
class Training:
    """A run: its parameters and optimizer state.

    Args:
        family: family of the model.
        options: options of the model.
        rule: hyperparameters of the optimizer.
        seed: seed of dropout.
        params: canonical, float64.
    """

    family: str
    options: Options
    rule: Rule
    seed: int
    params: Arrays

    def __post_init__(self) -> None:
        self.done = 0
        self.kept = {name: Kept(name, of_experts(name, self.params)) for name in self.params}

    def step(self, batch: Batch, rate: float | None = None) -> Step:
        """Runs a step. rate: replaces the rule's learning rate, for instance with a rounded one."""
        masks, rule = Masks(self.seed, self.done, self.options.dropout), self.rule
        loss, grads = loss_and_gradients(self.family, self.params, batch, self.options, masks)
        trained = {name: g for name, g in grads.items() if not counts(name)}
        norm = math.sqrt(sum(float((g**2).sum()) for g in trained.values()))
        own, self.done = rule.rate(self.done), self.done + 1
        rate, shorter = own if rate is None else rate, min(1.0, rule.clip / norm)
        self.params = {
            name: p - rate * self._direction(name, grads[name] * shorter)
            if name in trained
            else balanced(p, grads[name], self.options.moe.rate)
            for name, p in self.params.items()
        }
        return Step(loss, norm, own, grads, self.params)

    def _direction(self, name: str, g: np.ndarray) -> np.ndarray:
        kept = self.kept[name]
        kept.steps += 1
        decay = self.rule.decay * self.params[name] if decays(name) else 0
        return DIRECTIONS[self.rule.name](g, kept, self.rule) + decay
