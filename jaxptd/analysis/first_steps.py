"""The difference of an optimizer's first steps that a difference of their gradients explains.

The elementwise ones have a formula. The ones that look at whole matrices are run, on one device and
in float64: from both gradients, and from one that is changed by one rounding error, which shows how
much they amplify it. The same step in float32 shows what their own sums and products round.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxptd.config import OptimizerConfig, OptimizerName
from jaxptd.params import ParamInfo
from jaxptd.step.optimizer import DIRECTIONS

ROUNDINGS = 4  # a layer rounds in its four products, not only in its parameters

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class FirstSteps:
    """The first steps of a config's optimizer.

    Args:
        config: of the optimizer.
        infos: of the parameters.
        eps: of the precision of the steps.
        options: of the compiler; None: its defaults.
    """

    config: OptimizerConfig
    infos: Mapping[str, ParamInfo]
    eps: float
    options: Mapping[str, Any] | None = None

    @property
    def growth(self) -> float:
        """The length of a second step of the same gradients, in those of the first.

        Moments that are corrected for their start give the same step; SGD's momentum does not.
        """
        return 1 + self.config.beta1 if self.config.name == "sgd" else 1.0

    def allowed(self, a: Tensors, b: Tensors) -> Tensors:
        """The largest explained difference of each element of the steps from two gradients.

        Args:
            a: gradients, canonical and by layer, clipped.
            b: those of the other step.
        """
        formula = _ELEMENTWISE.get(self.config.name)
        if formula is None:
            return self._measured(a, b)
        return {name: self._by_formula(formula, a[name], b[name]) for name in a}

    def _by_formula(self, formula: "Formula", a: np.ndarray, b: np.ndarray) -> np.ndarray:
        explained, size = formula(a, b, self.config.epsilon)
        return explained + ROUNDINGS * self.eps * size

    def _measured(self, a: Tensors, b: Tensors) -> Tensors:
        """The difference of the steps themselves, and the largest that roundings make."""
        rng, eps = np.random.default_rng(0), float(np.finfo(np.float32).eps)
        rounded = {n: x * (1 + self.eps * rng.choice([-1, 1], x.shape)) for n, x in a.items()}
        single = {name: x.astype(np.float32) for name, x in a.items()}
        with jax.enable_x64(True):
            taken = [jax.device_get(self._take(each)) for each in (a, b, rounded, single)]
        first, second, third, coarse = taken
        products = min(1.0, self.eps / eps)  # of what float32 rounds: steps are no coarser
        return {
            name: np.abs(first[name] - second[name])
            + ROUNDINGS * np.max(np.abs(third[name] - first[name]))
            + ROUNDINGS * products * np.max(np.abs(coarse[name] - first[name]))
            + ROUNDINGS * self.eps * np.abs(first[name])
            for name in a
        }

    @cached_property
    def _take(self) -> Callable[[Tensors], Mapping[str, jax.Array]]:
        """The first directions, compiled once for all steps that are compared."""
        options = None if self.options is None else dict(self.options)
        return jax.jit(self._directions, compiler_options=options)

    def _directions(self, gradients: Tensors) -> Mapping[str, jax.Array]:
        """The optimizer's first directions, on one device."""
        infos = {name: self._one_layer(name, x.shape) for name, x in gradients.items()}
        stacked = {name: x.reshape(infos[name].shape) for name, x in gradients.items()}
        optimizer = DIRECTIONS[self.config.name](self.config, infos)
        directions, _ = optimizer.update(stacked, optimizer.init(stacked), stacked)
        return {name: x.reshape(gradients[name].shape) for name, x in directions.items()}

    def _one_layer(self, name: str, shape: tuple[int, ...]) -> ParamInfo:
        """A parameter of one layer, held whole: a stack of one."""
        info = self.infos[re.sub(r"^(\w+)\.\d+\.", r"\1.", name)]
        whole = (1, *shape) if info.stack else shape
        return ParamInfo(
            whole, whole, (None,) * len(whole), False, stack=info.stack, matrix=info.matrix
        )


Formula = Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray | float]]


def _adam(a: np.ndarray, b: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray | float]:
    """u(g) = g / (|g| + e): |u(a) - u(b)| <= min(2, 2 |a - b| / (max(|a|, |b|) + e))."""
    largest = np.maximum(np.abs(a), np.abs(b)) + epsilon
    return np.minimum(2, 2 * np.abs(a - b) / largest), 1.0


def _lion(a: np.ndarray, b: np.ndarray, _: float) -> tuple[np.ndarray, np.ndarray | float]:
    """u(g) = sign(g), which differs only if the signs do."""
    return np.abs(np.sign(a) - np.sign(b)), 1.0


def _sgd(a: np.ndarray, b: np.ndarray, _: float) -> tuple[np.ndarray, np.ndarray | float]:
    """u(g) = g: the momentum is zero at first."""
    return np.abs(a - b), np.maximum(np.abs(a), np.abs(b))


# By how much first steps from the gradients a and b differ, and their size.
_ELEMENTWISE: Mapping[OptimizerName, Formula] = {"adamw": _adam, "lion": _lion, "sgd": _sgd}
