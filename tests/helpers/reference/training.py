"""Training steps: gradients, clipping by their norm, the learning rate, and AdamW.

Source: Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Pascanu et al., arXiv 1211.5063 (clipping).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from reference.draws import Masks
from reference.families import MODELS, Batch
from reference.layers import Options
from reference.tape import Value, gradients

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The numbers of AdamW and of its learning rate.

    Args:
        peak: learning rate after the warm-up.
        warmup: steps of it.
        steps: in all; the rate falls to a tenth of its peak, along a cosine.
        decay: of weights that are matrices.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        epsilon: added to the root of that mean.
        clip: largest norm of all gradients.
    """

    peak: float
    warmup: int
    steps: int
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    clip: float

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)
        return self.peak * (0.1 + 0.9 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)


@dataclasses.dataclass(frozen=True)
class Step:
    """The results of a step; parameters are those after it."""

    loss: float
    norm: float
    rate: float
    gradients: Arrays
    params: Arrays


def is_matrix(name: str) -> bool:
    """True for parameters whose weights decay: no norms, no biases."""
    return not (name.endswith(".b") or "norm" in name or "_bias." in name)


def loss_and_gradients(
    family: str, params: Arrays, batch: Batch, options: Options, masks: Masks
) -> tuple[float, Arrays]:
    """The training loss of a batch, and its derivative by each parameter."""
    values = {name: Value(p) for name, p in params.items()}
    loss = MODELS[family](values, batch, options, masks)
    return float(loss.x), gradients(loss, values)


@dataclasses.dataclass
class Training:
    """A run: its parameters, and AdamW's means of gradients and of their squares.

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
        self.means = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.squares = {name: np.zeros_like(p) for name, p in self.params.items()}

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
        rule, m, v = self.rule, self.means, self.squares
        m[name] = rule.beta1 * m[name] + (1 - rule.beta1) * g
        v[name] = rule.beta2 * v[name] + (1 - rule.beta2) * g**2
        mean = m[name] / (1 - rule.beta1**self.done)
        square = v[name] / (1 - rule.beta2**self.done)
        decay = rule.decay * self.params[name] if is_matrix(name) else 0
        return mean / (np.sqrt(square) + rule.epsilon) + decay
