"""Compares the outcomes of two training steps, tensor by tensor.

*Tolerance.* Two layouts add the same numbers in another order, so their gradients differ by
rounding errors, which the network amplifies. The amplification is measured, not guessed: on one
device every parameter is changed by one rounding error (a relative eps, of either sign), and the
resulting change of each gradient is that gradient's yardstick; it grows with the depth as
C^(L+1-l). A gradient may differ by `ROUNDINGS` yardsticks. The update is the optimizer's first, of
Adam g / (|g| + eps'): each of its elements may differ as much as the gradients' difference
explains (`FIRST_STEPS`).

Source of the method: TTrace, arXiv 2506.09280.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxptd.config import OptimizerConfig, OptimizerName

ROUNDINGS = 4  # a layer rounds in its four products, not only in its parameters

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one step; gradients and updated parameters are canonical, by layer."""

    loss: float
    grad_norm: float
    learning_rate: float
    gradients: Tensors
    parameters: Tensors


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: the relative difference, and the one that is allowed."""

    name: str
    what: str
    error: float
    allowed: float

    @property
    def equal(self) -> bool:
        return self.error <= self.allowed  # False for NaN


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference / norm of the expected tensor."""
    scale = np.linalg.norm(expected.astype(np.float64))
    difference = np.linalg.norm(found.astype(np.float64) - expected)
    return float(difference / scale) if scale else float(difference)


def compare(
    expected: Outcome, rounded: Outcome, found: Outcome, *, config: OptimizerConfig, eps: float
) -> Iterator[Row]:
    """Compares a step with the expected one.

    Args:
        expected: the step on one device.
        rounded: that step from parameters changed by one rounding error.
        found: the step on the layout.
        config: of the optimizer.
        eps: of the precision.
    """
    for name in ("loss", "grad_norm"):
        values = [np.array(getattr(outcome, name)) for outcome in (expected, rounded, found)]
        yield Row(
            name,
            "scalar",
            _relative(values[2], values[0]),
            ROUNDINGS * max(_relative(values[1], values[0]), eps),
        )
    for name, want in expected.gradients.items():
        yardstick = max(_relative(rounded.gradients[name], want), eps)
        yield Row(name, "gradient", _relative(found.gradients[name], want), ROUNDINGS * yardstick)
        yield Row(
            name, "parameter", *_update_difference(name, expected, found, config=config, eps=eps)
        )


def _update_difference(
    name: str, expected: Outcome, found: Outcome, *, config: OptimizerConfig, eps: float
) -> tuple[float, float]:
    """The largest difference of an updated element, as a multiple of the explained one; and 1."""
    a, b = (_clipped(outcome, name, config.grad_clip) for outcome in (expected, found))
    explained, size_of_step = FIRST_STEPS[config.name](a, b, config.epsilon)
    moved = explained + ROUNDINGS * eps * size_of_step
    size = np.abs(expected.parameters[name].astype(np.float64))
    allowed = (
        expected.learning_rate * (moved + ROUNDINGS * eps * config.weight_decay * size)
        + ROUNDINGS * eps * size
    )
    difference = np.abs(found.parameters[name].astype(np.float64) - expected.parameters[name])
    return float(np.max(difference / allowed)), 1.0


def _adam(a: np.ndarray, b: np.ndarray, epsilon: float) -> tuple[np.ndarray, Any]:
    """u(g) = g / (|g| + e): |u(a) - u(b)| <= min(2, 2 |a - b| / (max(|a|, |b|) + e))."""
    largest = np.maximum(np.abs(a), np.abs(b)) + epsilon
    return np.minimum(2, 2 * np.abs(a - b) / largest), 1.0


def _lion(a: np.ndarray, b: np.ndarray, _: float) -> tuple[np.ndarray, Any]:
    """u(g) = sign(g), which differs only if the signs do."""
    return np.abs(np.sign(a) - np.sign(b)), 1.0


def _sgd(a: np.ndarray, b: np.ndarray, _: float) -> tuple[np.ndarray, Any]:
    """u(g) = g: the momentum is zero at first."""
    return np.abs(a - b), np.maximum(np.abs(a), np.abs(b))


# Of each optimizer, by how much first steps from the gradients a and b differ, and their size.
FIRST_STEPS: Mapping[OptimizerName, Callable[..., tuple[np.ndarray, Any]]] = {
    "adamw": _adam,
    "lion": _lion,
    "sgd": _sgd,
}


def _clipped(outcome: Outcome, name: str, limit: float) -> np.ndarray:
    """A gradient after clipping the norm of all to `limit`; 0 does not clip."""
    scale = min(1.0, limit / outcome.grad_norm) if limit else 1.0
    return outcome.gradients[name].astype(np.float64) * scale


def backward_order(row: Row, last: Sequence[str]) -> tuple[int, ...]:
    """Sorts rows from the loss to the embedding, each gradient before the parameter it updates.

    last: names with which parameters behind the layers begin.
    """
    if row.what == "scalar":
        return 0, 0, 0
    layer = re.match(r"\w+\.(\d+)\.", row.name)
    behind = row.name.startswith(tuple(last))
    place = (2, -int(layer[1])) if layer else (1, 0) if behind else (3, 0)
    return *place, ("gradient", "parameter").index(row.what)
