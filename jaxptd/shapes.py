"""Parameters as shapes and axes, without arrays; `params.py` deals with the arrays.

Formulas read these shapes, and so does the planner: nothing here imports jax.
"""

import dataclasses
from functools import cached_property
from typing import Protocol, Self

# For each dim the mesh axes that shard it: none, one, or several, as in jax's PartitionSpec.
Spec = tuple[str | tuple[str, ...] | None, ...]


def axes_in(spec: Spec) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dim."""
    return [() if a is None else a if isinstance(a, tuple) else (a,) for a in spec]


class StoredShape(Protocol):
    """The stored form of a parameter, as shapes and axes."""

    @property
    def info(self) -> "ParamShape":
        """The form in which layers use the parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Canonical shape."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Global shape of the stored form."""

    @property
    def spec(self) -> Spec:
        """The axes that shard each dim of the stored form."""

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the stored form is sharded."""

    @property
    def holders(self) -> tuple[str, ...]:
        """The mesh axes over which ZeRO deals out the state."""

    @property
    def is_canonical(self) -> bool:
        """True if the stored form is the canonical one."""

    @property
    def lead(self) -> int:
        """The number of leading dims of `info` that are not flattened."""


@dataclasses.dataclass(frozen=True)
class ParamShape:
    """Describes a parameter before it exists, and its stored form without ZeRO.

    Args:
        shape: canonical shape.
        stored_shape: global shape with padding and, on pipelines, the rows of all stages.
        spec: how the stored form is sharded.
        decay: whether weight decay applies.
        cast: whether it is only ever read in the compute precision.
        over: mesh axes over which its gradient is a partial sum, besides those that shard tokens.
        stack: if layers are its leading dim, the name of their stack, which begins its name;
            otherwise None.
        matrix: for a stack of matrices, a letter per dim: s for the stack (layers; or q, k and v,
            which are separate matrices), r for rows, c for columns; otherwise empty.
        rows: for a stack, the stored row of each layer; None: layer i is in row i.
        counts: whether its gradient counts tokens: it has no part in the norm of all gradients, is
            neither scaled nor clipped, and moves the parameter by its sign.
        frozen: whether training leaves it as it is (`optimizer.frozen`): it has no gradient.
    """

    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    spec: Spec
    decay: bool
    cast: bool = False
    over: tuple[str, ...] = ()
    stack: str | None = None
    matrix: str = ""
    rows: tuple[int, ...] | None = None
    counts: bool = False
    frozen: bool = False

    @property
    def optimized(self) -> bool:
        """True if an optimizer updates it, and so keeps moments of its gradients."""
        return not (self.counts or self.frozen)

    @property
    def info(self) -> Self:
        return self

    @cached_property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.axes_of_dims for axis in axes)

    @property
    def axes_of_dims(self) -> list[tuple[str, ...]]:
        """The mesh axes over which each dim is sharded."""
        return axes_in(self.spec)

    @property
    def holders(self) -> tuple[str, ...]:
        return ()

    @property
    def lead(self) -> int:
        return len(self.shape)

    @property
    def is_canonical(self) -> bool:
        return self.shape == self.stored_shape and self.rows is None
