"""Compares the outcomes of two training steps, tensor by tensor.

*Tolerance.* Two layouts add the same numbers in different orders, so their gradients differ by
rounding errors, which the network amplifies. The amplification is measured: on one device every
parameter changes by one rounding error (a relative eps of random sign), and the resulting change of
each gradient is its yardstick, which grows with depth as C^(L+1-l). The yardstick is the largest of
a few draws of the signs, since a gradient of one or two elements may by chance change little in one
draw. A precision that is compared with a finer one also rounds what layers compute, most visibly
where terms cancel. So the difference between the two on one device is taken at several parameters
far from each other; comparing these differences shows the noise, without errors that all share. A
gradient may differ by `ROUNDINGS` yardsticks. The update is the optimizer's first (Adam's: g / (|g|
+ eps')); each of its elements may differ as much as the gradients' difference explains
(`FirstSteps`). A second step from the same parameters but from the first's moments has the same
direction, so it exposes moments that belong to other parameters.

A gradient may vanish in exact arithmetic, as that of a router does that chooses one expert and
gives it the weight 1. What one device computes for it is noise, which every compiled program rounds
in a way of its own. It is recognised by two facts: it is no larger than `ROUNDINGS` rounding errors
of all gradients together, in the precision in which it is computed there, and changing parameters
by one rounding error may change all of it. Then the layout's may be as large as a rounding error of
all gradients in the layout's precision, and the direction in which the optimizer moves is not
compared. A gradient that does not vanish is larger, also where 16 bits or fp8 leave it inaccurate.

The loss is a mean of n numbers of similar size. Each addition rounds the running sum by up to eps /
2 of it, so the mean's relative error has the deviation eps sqrt(n) / 6. Changing parameters does
not reveal it, because the order of additions stays; so it is a lower bound of the loss's yardstick,
and of the yardstick of a vector's gradient, each element of which is a sum over n tokens. The norm
of all gradients is the root of a sum of squares, of which the largest parameter adds the most, n in
a row; a root halves relative errors, so that yardstick's lower bound is eps sqrt(n) / 12.

Source of the method: TTrace, arXiv 2506.09280.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jaxptd.config import OptimizerConfig, OptimizerName
from jaxptd.params import ParamInfo
from jaxptd.step.optimizer import DIRECTIONS

# ---- the first steps of an optimizer -------------------------------------------------------------
# The difference of an optimizer's first steps that a difference of their gradients explains.
#
# Elementwise optimizers have a formula. Those that use whole matrices are run on one device in
# float64: from both gradients, and from one that is changed by one rounding error, which shows how
# much they amplify it. The same step in float32 shows their own rounding.

ROUNDINGS = 4  # a layer rounds in its four matmuls, not only in its parameters

Tensors = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class FirstSteps:
    """The first steps of a config's optimizer.

    Args:
        config: the optimizer's.
        infos: the parameters'.
        eps: that of the steps' precision.
        options: the compiler's; None: its defaults.
    """

    config: OptimizerConfig
    infos: Mapping[str, ParamInfo]
    eps: float
    options: Mapping[str, Any] | None = None

    @property
    def growth(self) -> float:
        """The length of a second step with the same gradients, relative to the first.

        Bias-corrected moments give the same step; SGD's momentum does not.
        """
        return 1 + self.config.beta1 if self.config.name == "sgd" else 1.0

    def allowed(self, a: Tensors, b: Tensors) -> Tensors:
        """The largest explained difference of each element of the steps from two gradients.

        Args:
            a: gradients, canonical and by layer, clipped.
            b: the other step's.
        """
        formula = _ELEMENTWISE.get(self.config.name)
        if formula is None:
            return self._measured(a, b)
        return {name: self._by_formula(formula, a[name], b[name]) for name in a}

    def _by_formula(self, formula: "Formula", a: np.ndarray, b: np.ndarray) -> np.ndarray:
        explained, size = formula(a, b, self.config.epsilon)
        return explained + ROUNDINGS * self.eps * size

    def _measured(self, a: Tensors, b: Tensors) -> Tensors:
        """The difference of the steps themselves, and the largest that rounding causes."""
        rng, eps = np.random.default_rng(0), float(np.finfo(np.float32).eps)
        rounded = {n: x * (1 + self.eps * rng.choice([-1, 1], x.shape)) for n, x in a.items()}
        single = {name: x.astype(np.float32) for name, x in a.items()}
        with jax.enable_x64(True):
            taken = [jax.device_get(self._take(each)) for each in (a, b, rounded, single)]
        first, second, third, coarse = taken
        products = min(1.0, self.eps / eps)  # relative to float32: steps are not coarser
        return {
            name: np.abs(first[name] - second[name])
            + ROUNDINGS * np.max(np.abs(third[name] - first[name]))
            + ROUNDINGS * products * np.max(np.abs(coarse[name] - first[name]))
            + ROUNDINGS * self.eps * np.abs(first[name])
            for name in a
        }

    @cached_property
    def _take(self) -> Callable[[Tensors], Mapping[str, jax.Array]]:
        """The first directions, compiled once for all compared steps."""
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


# How much first steps from the gradients a and b differ, and their size.
_ELEMENTWISE: Mapping[OptimizerName, Formula] = {"adamw": _adam, "lion": _lion, "sgd": _sgd}


# ---- the comparison of two steps -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of one step; gradients and updated parameters are canonical, by layer.

    again: the parameters after a second step from the first's moments, with the first step's
    parameters, batch and seed.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    gradients: Tensors
    parameters: Tensors
    again: Tensors

    def plus(self, other: "Outcome") -> "Outcome":
        """Adds what is compared by size: loss, norm and gradients."""
        gradients = {name: x + other.gradients[name] for name, x in self.gradients.items()}
        loss, norm = self.loss + other.loss, self.grad_norm + other.grad_norm
        return dataclasses.replace(self, loss=loss, grad_norm=norm, gradients=gradients)


def perturbed(params: Tensors, share: float, seed: int) -> Tensors:
    """Changes every element by a share of itself, up or down."""
    rng = np.random.default_rng(seed)
    return {
        name: p * (1 + share * rng.choice([-1, 1], p.shape)).astype(p.dtype)
        for name, p in params.items()
    }


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


def _relative(tensor: ArrayLike, other: ArrayLike, expected: ArrayLike) -> float:
    """Norm of the difference / norm of the expected tensor."""
    scale = np.linalg.norm(np.asarray(expected, np.float64))
    difference = np.linalg.norm(np.asarray(tensor, np.float64) - np.asarray(other, np.float64))
    return float(difference / scale) if scale else float(difference)


def compare(
    expected: Outcome,
    rounded: Sequence[tuple[Outcome, Outcome]],
    found: Outcome,
    *,
    steps: FirstSteps,
    terms: int = 1,
) -> Iterator[Row]:
    """Compares a step with the expected one.

    Args:
        expected: the step on one device.
        rounded: pairs of such steps that differ only by rounding.
        found: the step on the layout.
        steps: the optimizer's, in the layout's precision.
        terms: how many numbers the loss averages.
    """
    eps, of_sum = steps.eps, steps.eps * max(1.0, math.sqrt(terms) / 6)
    squares = max((math.prod(info.shape) for info in steps.infos.values()), default=1)
    of_norm = eps * max(1.0, math.sqrt(squares) / 12)
    for name, least in (("loss", of_sum), ("grad_norm", of_norm)):
        want = getattr(expected, name)
        changes = [_relative(getattr(a, name), getattr(b, name), want) for a, b in rounded]
        error = _relative(getattr(found, name), want, want)
        yield Row(name, "scalar", error, ROUNDINGS * max(*changes, least))
    changed = {
        name: max(_relative(a.gradients[name], b.gradients[name], want) for a, b in rounded)
        for name, want in expected.gradients.items()
    }
    noise = {name for name, change in changed.items() if _is_noise(expected, name, change)}
    moved = _moved(expected, found, noise, steps)
    for name, want in expected.gradients.items():
        error = _relative(found.gradients[name], want, want)
        least = of_sum if want.ndim == 1 else eps
        if name in noise:
            least = max(least, eps * expected.grad_norm / _length(want))
        yield Row(name, "gradient", error, ROUNDINGS * max(changed[name], least))
        differences = [
            _update_difference(
                (outcomes[0][name], outcomes[1][name]),
                rate=expected.learning_rate,
                moved=moved[name] * growth,
                steps=steps,
            )
            for outcomes, growth in (
                ((expected.parameters, found.parameters), 1.0),
                ((expected.again, found.again), steps.growth),
            )
        ]
        yield Row(name, "parameter", float(np.max(differences)), 1.0)


def _is_noise(expected: Outcome, name: str, change: float) -> bool:
    """True if a gradient vanishes in exact arithmetic.

    Args:
        expected: the step on one device, in the precision of its gradients.
        name: the gradient's.
        change: its largest change by rounding, relative to its size.
    """
    want = expected.gradients[name]
    rounding = ROUNDINGS * float(jnp.finfo(want.dtype).eps) * expected.grad_norm
    return ROUNDINGS * change >= 1 and 0 < _length(want) <= rounding


def _length(x: np.ndarray) -> float:
    """The norm of an array, in float64."""
    return float(np.linalg.norm(x.astype(np.float64)))


def _moved(expected: Outcome, found: Outcome, noise: Collection[str], steps: FirstSteps) -> Tensors:
    """The explained difference of the optimizer's first directions.

    noise: names of gradients whose direction is not compared: each element may then differ by as
    much as the whole step does that turns round.
    """
    clip = steps.config.grad_clip
    want, got = (_clipped(each, clip) for each in (expected, found))
    moved = steps.allowed(want, got)
    if noise:
        opposite = {name: -g if name in noise else g for name, g in want.items()}
        either = steps.allowed(want, opposite)
        longest = {name: _length(either[name]) for name in noise}
        moved |= {name: np.maximum(moved[name], longest[name]) for name in noise}
    return moved


def _update_difference(
    updated: tuple[np.ndarray, np.ndarray], *, rate: float, moved: np.ndarray, steps: FirstSteps
) -> float:
    """The largest difference of an updated element, relative to the explained one.

    Args:
        updated: the expected parameter and the one found.
        rate: the learning rate.
        moved: the explained difference of the optimizer's direction.
        steps: the optimizer's.
    """
    rounding = ROUNDINGS * steps.eps
    expected, found = (each.astype(np.float64) for each in updated)
    size = np.abs(expected)
    allowed = rate * (moved + rounding * steps.config.weight_decay * size) + rounding * size
    return float(np.max(np.abs(found - expected) / allowed))


def _clipped(outcome: Outcome, limit: float) -> Tensors:
    """Gradients after clipping their joint norm to `limit`; 0 does not clip."""
    scale = min(1.0, limit / outcome.grad_norm) if limit else 1.0
    return {name: g.astype(np.float64) * scale for name, g in outcome.gradients.items()}


def backward_order(row: Row, last: Sequence[str]) -> tuple[int, ...]:
    """Sorts rows from the loss to the embedding, each gradient before the parameter it updates.

    last: prefixes of the names of parameters after the layers.
    """
    if row.what == "scalar":
        return 0, 0, 0
    layer = re.match(r"\w+\.(\d+)\.", row.name)
    behind = row.name.startswith(tuple(last))
    place = (2, -int(layer[1])) if layer else (1, 0) if behind else (3, 0)
    return *place, ("choices", "gradient", "parameter").index(row.what)


# ---- choices of routers --------------------------------------------------------------------------
# A router may choose otherwise where two experts are nearly tied, and rounding tips the scales. All
# that follows then differs by far more than rounding. So below float64 choices are compared first,
# and then all steps are given those of one device.


@dataclasses.dataclass(frozen=True)
class Choices:
    """The choices of one device's routers.

    Args:
        experts: of each token and layer, `[B, T, L, K]`.
        margins: by how much the last of them was better than the next, `[B, T, L]`; infinite if
            there is no next.
        noise: the largest change of a margin in each layer by rounding, `[L]`.
    """

    experts: np.ndarray
    margins: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(
        cls,
        choose: Callable[[Tensors], tuple[np.ndarray, np.ndarray]],
        start: Tensors,
        changed: Sequence[Tensors],
    ) -> "Choices":
        """Records the choices from some parameters; changed: these with other roundings."""
        experts, margins = choose(start)
        known, *others = (
            np.nan_to_num(each, posinf=0)
            for each in (margins, *(choose(tensors)[1] for tensors in changed))
        )
        noise = [np.abs(each - known).max((0, 1)) for each in others]
        return cls(experts, margins, np.max(noise, axis=0))

    @property
    def smallest(self) -> float:
        """The smallest margin of any choice."""
        sparse = self.margins.any((0, 1))  # other layers have zeros
        return float(self.margins[..., sparse].min())

    def compared(self, expected: Outcome, own: Outcome) -> Iterator[Row]:
        """Compares the loads of experts, layer by layer, until they differ.

        As many tokens may choose otherwise as have margins that rounding can close. Layers after
        one with other choices see other tokens.

        Args:
            expected: the step on one device.
            own: the step on the layout, whose routers chose.
        """
        near_L = (self.margins <= ROUNDINGS * self.noise).sum((0, 1))
        names = [name for name in expected.gradients if name.endswith("load_bias")]
        behind = len(near_L) - sum(map(bool, map(_MODULE.match, names)))
        number, differed = partial(_layer_number, behind=behind), False
        for name in sorted(names, key=number):
            change = np.abs(own.gradients[name] - expected.gradients[name]).sum() / 2
            layer = number(name)
            allowed = math.inf if differed else float(near_L[layer] * self.experts.shape[-1])
            yield Row(name, "choices", float(change), allowed)
            differed = differed or bool(change > 0)


_MODULE = re.compile(r"mtp_(\d+)\.")


def _layer_number(name: str, behind: int) -> int:
    """The number in the model of a parameter's layer: `blocks_2.1.mlp.up.w` is of layer 3.

    behind: that of the first MTP module, which is a layer behind the last.
    """
    if module := _MODULE.match(name):
        return behind + int(module[1]) - 1
    found = re.match(r"[a-z]+(?:_(\d+))?\.(\d+)\.", name)
    assert found is not None, name
    return int(found[1] or 0) + int(found[2])
