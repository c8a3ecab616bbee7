"""Arrays that record how they were computed, and gradients by the chain rule, in numpy.

Each operation lists its vjp next to it: the gradient of its result -> that of each input.
Operations are analytic where possible, so they also accept complex numbers: perturbing a parameter
by i h gives its derivative to full precision, without a subtraction (`tests/reference/`).

Source of that check: Squire and Trapp, SIAM Review 40(1), 1998.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np

_count = itertools.count()
Vjp = Callable[[np.ndarray], np.ndarray]


class Value:
    """An array, and where it comes from.

    Args:
        x: the array.
        sources: values it was computed from, each with its vjp.
    """

    __array_ufunc__ = None  # makes `array * value` a Value

    def __init__(self, x: np.ndarray, *sources: tuple["Value", Vjp]) -> None:
        self.x, self.sources, self.number = np.asarray(x), sources, next(_count)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def __add__(self, other: "Value | np.ndarray | float") -> "Value":
        other = constant(other)
        return Value(
            self.x + other.x,
            (self, lambda g: _fitted(g, self.shape)),
            (other, lambda g: _fitted(g, other.shape)),
        )

    def __mul__(self, other: "Value | np.ndarray | float") -> "Value":
        other = constant(other)
        return Value(
            self.x * other.x,
            (self, lambda g: _fitted(g * other.x, self.shape)),
            (other, lambda g: _fitted(g * self.x, other.shape)),
        )

    def __sub__(self, other: "Value | np.ndarray | float") -> "Value":
        return self + constant(other) * -1.0

    __radd__, __rmul__ = __add__, __mul__

    def __getitem__(self, index: int | slice | tuple) -> "Value":
        """Takes basic indices, or one integer array for the first dim, with repeats allowed."""

        def vjp(g: np.ndarray) -> np.ndarray:
            whole = np.zeros(self.shape, g.dtype)
            np.add.at(whole, index, g)
            return whole

        return Value(self.x[index], (self, vjp))

    def sum(self) -> "Value":
        return Value(self.x.sum(), (self, lambda g: np.broadcast_to(g, self.shape)))

    def mean(self) -> "Value":
        """Mean over the last dim, kept with size 1."""
        size = self.shape[-1]
        mean = self.x.mean(-1, keepdims=True)
        return Value(mean, (self, lambda g: np.broadcast_to(g / size, self.shape)))

    def moved(self, source: int, target: int) -> "Value":
        """A dim moved to another place."""
        moved = np.moveaxis(self.x, source, target)
        return Value(moved, (self, lambda g: np.moveaxis(g, target, source)))


def stacked(values: list[Value], shape: tuple[int, ...]) -> Value:
    """Stacks values of the same shape into an array whose first dims are `shape`."""
    x = np.stack([each.x for each in values])
    whole = (*shape, *x.shape[1:])

    def vjp(number: int) -> Vjp:
        return lambda g: g.reshape(x.shape)[number]

    return Value(x.reshape(whole), *((each, vjp(i)) for i, each in enumerate(values)))


def constant(x: "Value | np.ndarray | float") -> Value:
    """A value without sources."""
    return x if isinstance(x, Value) else Value(np.asarray(x))


def _fitted(g: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over the dims that were broadcast."""
    g = g.sum(tuple(range(g.ndim - len(shape))))
    wide = tuple(i for i, size in enumerate(shape) if size == 1 and g.shape[i] != 1)
    return g.sum(wide, keepdims=True)


def gradients(total: Value, of: dict[str, Value]) -> dict[str, np.ndarray]:
    """Derivatives of a scalar by each value; zero for values it does not depend on."""
    found, nodes, todo = {total.number: np.ones(())}, {}, [total]
    while todo:
        node = todo.pop()
        if node.number not in nodes:
            nodes[node.number] = node
            todo += [source for source, _ in node.sources]
    for number in sorted(nodes, reverse=True):  # each after everything computed from it
        for source, vjp in nodes[number].sources:
            found[source.number] = found.get(source.number, 0) + vjp(found[number])
    return {name: found.get(v.number, np.zeros(v.shape)) for name, v in of.items()}


def einsum(rule: str, a: Value, b: Value | np.ndarray) -> Value:
    """einsum of two arrays; each letter of one is in the other or in the result."""
    b = constant(b)
    (of_a, of_b), result = rule.split("->")[0].split(","), rule.split("->")[1]
    return Value(
        np.einsum(rule, a.x, b.x),
        (a, lambda g: np.einsum(f"{result},{of_b}->{of_a}", g, b.x)),
        (b, lambda g: np.einsum(f"{result},{of_a}->{of_b}", g, a.x)),
    )


def softmax(x: Value, seen: np.ndarray) -> Value:
    """Softmax over the visible part of the last dim; zeros where nothing is visible."""
    top = np.max(x.x.real, axis=-1, keepdims=True, where=seen, initial=-1e300)
    e = np.where(seen, np.exp(np.where(seen, x.x - top, 0)), 0)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(seen.any(-1, keepdims=True), total, 1)
    return Value(p, (x, lambda g: p * (g - (g * p).sum(-1, keepdims=True))))


def with_column(x: Value, of_head: Value) -> Value:
    """x[B, N, T, S] with one more column, a number per head, `[B, N, T, S + 1]`."""
    column = np.broadcast_to(of_head.x[:, None, None], (*x.shape[:-1], 1))
    y = np.concatenate([x.x, column], -1)
    return Value(y, (x, lambda g: g[..., :-1]), (of_head, lambda g: g[..., -1].sum((0, 2))))


def logsumexp(x: Value) -> Value:
    """log(sum(exp(x))) over the last dim."""
    top = x.x.real.max(-1, keepdims=True)
    total = np.exp(x.x - top).sum(-1, keepdims=True)
    p = np.exp(x.x - top) / total
    return Value((top + np.log(total))[..., 0], (x, lambda g: g[..., None] * p))


def power(x: Value, exponent: float) -> Value:
    return Value(x.x**exponent, (x, lambda g: g * exponent * x.x ** (exponent - 1)))


def tanh(x: Value) -> Value:
    y = np.tanh(x.x)
    return Value(y, (x, lambda g: g * (1 - y * y)))


def relu(x: Value) -> Value:
    on = x.x.real > 0
    return Value(np.where(on, x.x, 0), (x, lambda g: g * on))


def sigmoid(x: Value) -> Value:
    y = 1 / (1 + np.exp(-x.x))
    return Value(y, (x, lambda g: g * y * (1 - y)))


def below(x: Value) -> Value:
    """The standard normal CDF at x; to first order if x is complex."""
    real, imaginary = x.x.real, x.x.imag
    density = np.exp(-(real**2) / 2) / math.sqrt(2 * math.pi)
    share = np.vectorize(math.erfc)(-real / math.sqrt(2)) / 2
    y = share + 1j * density * imaginary if np.iscomplexobj(x.x) else share
    return Value(y, (x, lambda g: g * density))
