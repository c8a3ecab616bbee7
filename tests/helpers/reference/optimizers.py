"""Optimizers: gradients -> the update that a step subtracts, before learning rate and decay.

All see clipped gradients, and all weight decay is decoupled. Muon updates the matrices of layers,
AdamW the rest. Update sizes follow `docs/optimizers.md`.

Letters: S matrices of a parameter, R rows, C columns.

Source: Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Chen et al., arXiv 2302.06675, algorithm 2
(Lion); Polyak, USSR Computational Mathematics 4(5), 1964 (SGD with momentum); Shazeer and Stern,
arXiv 1804.04235, algorithms 4 and 5 (Adafactor, without its relative step); Jordan et al.,
https://kellerjordan.github.io/posts/muon, 2024 (Muon), with the bias correction of Dozat,
Incorporating Nesterov momentum into Adam, ICLR workshop 2016, and the size of Liu et al., arXiv
2502.16982.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

import numpy as np

STACKS = ("blocks", "encoder.", "decoder.")
ORTHOGONAL = (3.4445, -4.7750, 2.0315)  # coefficients of x, x**3 and x**5
MUON_RMS = 0.2
NO_NORM = 1e-8  # added to a matrix's norm
ADAFACTOR_POWER, ADAFACTOR_LEAST, ADAFACTOR_RMS = -0.8, 1e-30, 1.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """Hyperparameters of an optimizer and its learning rate.

    Args:
        peak: learning rate after the warm-up.
        warmup: steps of warm-up.
        steps: steps in total; the rate falls along a cosine to a tenth of its peak.
        decay: weight decay of matrices.
        beta1: decay of the mean of gradients; for sgd, of their sum.
        beta2: decay of the mean of their squares; for lion, of the stored mean.
        epsilon: added to the root of that mean.
        clip: largest allowed norm of all gradients together.
        name: name of the optimizer.
        momentum: momentum of Muon's matrices.
    """

    peak: float
    warmup: int
    steps: int
    decay: float
    beta1: float
    beta2: float
    epsilon: float
    clip: float
    name: str = "adamw"
    momentum: float = 0.95

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)
        return self.peak * (0.1 + 0.9 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)


@dataclasses.dataclass
class Kept:
    """An optimizer's state for a parameter, and the number of steps including the next.

    experts: whether the parameter has a matrix for each expert.
    """

    name: str
    experts: bool = False
    steps: int = 0
    mean: np.ndarray | float = 0.0
    square: np.ndarray | float = 0.0
    rows: np.ndarray | float = 0.0
    columns: np.ndarray | float = 0.0


def decays(name: str) -> bool:
    """True for parameters with weight decay: all but norms, biases and sinks."""
    vectors = (".b", ".sinks")
    return not (name.endswith(vectors) or "norm" in name or "_bias." in name)


def is_matrix(name: str) -> bool:
    """True for matrices. The gate of a shared MLP is a vector, though its weights decay."""
    return decays(name) and "shared_gate" not in name


def of_experts(name: str, names: Collection[str]) -> bool:
    """True for parameters with a matrix for each expert; their second dim is the expert.

    names: names of all parameters. In a layer with a router, `mlp.up` and `mlp.down` are experts'.
    """
    mlp, _, part = name.rpartition(".mlp.")
    return part in ("up.w", "down.w") and f"{mlp}.mlp.router.w" in names


def counts(name: str) -> bool:
    """True for the biases that count tokens, which no optimizer updates."""
    return name.endswith(".load_bias")


def balanced(bias: np.ndarray, counts: np.ndarray, rate: float) -> np.ndarray:
    """Biases `[L, E]` after a step with these counts of tokens per expert."""
    return bias + rate * np.sign(counts.mean(-1, keepdims=True) - counts)


def in_layer(name: str) -> bool:
    """True for parameters that every layer of a stack has; their first dim is the layer."""
    return name.startswith(STACKS)


def as_matrices(kept: Kept, x: np.ndarray) -> np.ndarray:
    """A view of a parameter as its matrices, `[.., R, C]`, whose rows are their inputs.

    q, k, v, gate and up are a matrix each; the columns of q span all heads.
    """
    if not in_layer(kept.name):
        return x
    if kept.experts:  # [L, E, D, F], [L, E, D, 2, F]
        return x if x.ndim == 4 else np.moveaxis(x, 3, 2)
    kind = kept.name.split(".")[-2]
    layers = len(x)
    if kind == "out":  # [L, N, H, D]
        return x.reshape(layers, -1, x.shape[-1])
    several = kind in ("qkv", "kv") or (kind == "up" and x.ndim == 4)  # [L, D, several, ..]
    x = np.moveaxis(x, 2, 1) if several else x[:, None]
    return x.reshape(*x.shape[:3], -1)


def adamw(g: np.ndarray, kept: Kept, rule: Rule) -> np.ndarray:
    kept.mean = rule.beta1 * kept.mean + (1 - rule.beta1) * g
    kept.square = rule.beta2 * kept.square + (1 - rule.beta2) * g**2
    mean = kept.mean / (1 - rule.beta1**kept.steps)
    square = kept.square / (1 - rule.beta2**kept.steps)
    return mean / (np.sqrt(square) + rule.epsilon)


def lion(g: np.ndarray, kept: Kept, rule: Rule) -> np.ndarray:
    direction = np.sign(rule.beta1 * kept.mean + (1 - rule.beta1) * g)
    kept.mean = rule.beta2 * kept.mean + (1 - rule.beta2) * g
    return direction


def sgd(g: np.ndarray, kept: Kept, rule: Rule) -> np.ndarray:
    kept.mean = rule.beta1 * kept.mean + g  # a sum, not a mean
    return np.asarray(kept.mean)


def muon(g: np.ndarray, kept: Kept, rule: Rule) -> np.ndarray:
    if not (in_layer(kept.name) and is_matrix(kept.name)):
        return adamw(g, kept, rule)
    m, t = rule.momentum, kept.steps
    kept.mean = m * kept.mean + (1 - m) * g
    ahead = m * kept.mean / (1 - m ** (t + 1)) + (1 - m) * g / (1 - m**t)
    direction = np.zeros_like(g)
    view = as_matrices(kept, direction)
    view[...] = orthogonal(as_matrices(kept, ahead))
    return direction


def orthogonal(x: np.ndarray) -> np.ndarray:
    """Applies the polynomial to the singular values of matrices `[.., R, C]` five times."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (np.linalg.norm(s, axis=-1, keepdims=True) + NO_NORM)
    for _ in range(5):
        s = sum(factor * s**power for factor, power in zip(ORTHOGONAL, (1, 3, 5), strict=True))
    return MUON_RMS * math.sqrt(max(x.shape[-2:])) * (u * s[..., None, :]) @ v


def adafactor(g: np.ndarray, kept: Kept, rule: Rule) -> np.ndarray:
    """Adafactor's update per matrix; anything else is updated per layer with all its squares."""
    beta = 1 - kept.steps**ADAFACTOR_POWER
    square = g**2 + ADAFACTOR_LEAST
    direction = np.zeros_like(g)
    if not is_matrix(kept.name):
        kept.square = beta * kept.square + (1 - beta) * square
        direction[...] = g / np.sqrt(kept.square)
        dims = tuple(range(int(in_layer(kept.name)), g.ndim))
        return _at_most(direction, dims)
    squares = as_matrices(kept, square)
    kept.rows = beta * kept.rows + (1 - beta) * squares.sum(-1, keepdims=True)
    kept.columns = beta * kept.columns + (1 - beta) * squares.sum(-2, keepdims=True)
    expected = kept.rows * kept.columns / kept.rows.sum(-2, keepdims=True)
    view = as_matrices(kept, direction)
    view[...] = _at_most(as_matrices(kept, g) / np.sqrt(expected), (-2, -1))
    return direction


def _at_most(x: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """Scales x down where its root mean square over these dims is too large."""
    rms = np.sqrt((x**2).mean(dims, keepdims=True))
    return x / np.maximum(1.0, rms / ADAFACTOR_RMS)


DIRECTIONS: Mapping[str, Callable[[np.ndarray, Kept, Rule], np.ndarray]] = {
    each.__name__: each for each in (adamw, lion, sgd, muon, adafactor)
}
