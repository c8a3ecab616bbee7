"""The tensors of a pair of matmuls that are alive in its backward pass, on one device."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Protocol, Self

from jaxptd.config import Remat
from jaxptd.parts.sizes import Sizes


class HasSizes(Protocol):
    """Padded sizes of a pair of matmuls."""

    def first(self, sizes: Sizes) -> int:
        """Columns of the first matmul."""

    def second(self, sizes: Sizes) -> int:
        """Rows of the second matmul."""


@dataclasses.dataclass(frozen=True)
class PairBytes:
    """Bytes of a pair of matmuls with an activation between them.

    Args:
        x: the residual stream.
        taken: the first matmul's input.
        first: the first matmul's output.
        second: the second matmul's input.
        gradient: the gradient of the second matmul's output, with all rows that matmuls read.
        weight: the larger matrix, in the precision of activations, if it is cast for the layer.
        moving: panels and buffers of collectives while a matmul of backward runs.
        gathers: whether matmuls read x gathered over tp.
        again: whether backward gathers that again.
        core: what attention's backward holds besides q, k, v and their gradients; 0 without
            attention.
        has_scores: whether that includes arrays of scores.
    """

    x: int
    taken: int
    first: int
    second: int
    gradient: int
    weight: int
    moving: int
    gathers: bool
    again: bool
    core: int = 0
    has_scores: bool = False

    @classmethod
    def of(cls, part: HasSizes, sizes: Sizes, **others: Any) -> Self:
        """The bytes of a part; others: fields to override, and a subclass's fields."""
        layout, first, second = sizes.config.layout, part.first(sizes), part.second(sizes)
        token, shards = sizes.tokens * sizes.itemsize, sizes.matrix_shards
        whole, rows = token * sizes.hidden, max(first, second)
        x = whole // (shards if layout.has_grid or layout.sequence_parallel else 1)
        own = token * second // shards
        fields = {
            "x": x,
            "taken": whole if layout.gathers_inputs else x,
            "first": own * first // second,
            "second": own,
            "gradient": x if layout.has_grid else whole,
            # Parameters that a step casts at its beginning are not cast again.
            "weight": 0 if sizes.casts else rows * sizes.hidden * sizes.itemsize // shards,
            "moving": _moving(sizes, whole, rows * token),
            "gathers": layout.gathers_inputs,
            "again": sizes.config.gathers_again,
        }
        return cls(**fields | others)

    @property
    def forward(self) -> int:
        """Tensors that forward computes up to the second matmul."""
        return self.x + self.taken + self.first + self.second

    def backward(self, remat: Remat) -> int:
        """Tensors between the backward passes of both matmuls.

        Where backward recomputes the second matmul's input, the matmul that reads it does so on the
        fly.
        """
        alive = self.forward + self.second + self.weight + self.moving + self.first
        return alive - (self.second if computes_again(remat) else 0)

    @property
    def waiting(self) -> int:
        """Tensors that wait for weight-gradient matmuls: operands, and gradients shaped like x."""
        return self.streams + self.first + self.second

    @property
    def streams(self) -> int:
        """Number of them shaped like x: its gradients, and inputs of matmuls."""
        return 3 * self.x + self.taken + (self.taken if self.gathers else 0)

    # ---- what XLA does with saved tensors ------------------------------------------------------

    @property
    def output(self) -> int:
        """The output that `dots` names twice on a grid, and that fp8 also saves in 16 bits."""
        return 0

    @property
    def in_8_bits(self) -> int:
        """Inputs of matmuls that fp8 saves in 8 bits, where they are saved."""
        return self.saved_input + self.second

    @property
    def saved_input(self) -> int:
        """The first matmul's input, where backward does not gather it again."""
        return 0 if self.again else self.taken

    def makes_second_again(self, remat: Remat) -> bool:
        """True if backward recomputes the second matmul's input, on a grid."""
        return computes_again(remat)

    def free(self, remat: Remat, *, grid: bool) -> Iterator[int]:
        """Saved arrays of the pair that the second half of a split backward does not read.

        For gated units saved rows are halves.
        """
        if self.first == self.second and (grid or not computes_again(remat)):
            yield self.first


def computes_again(remat: Remat) -> bool:
    """True if backward recomputes the input of an MLP's second matmul."""
    return remat in ("dots", "full")


def _moving(sizes: Sizes, x: int, hidden: int) -> int:
    """Buffers of a matmul's collectives: x gathered and transposed, pieces of it, or panels.

    Args:
        sizes: the layer's.
        x: bytes of all rows of the residual stream.
        hidden: bytes of all of the pair's hidden units.
    """
    layout = sizes.config.layout
    if layout.has_grid:
        return hidden // layout.row
    if layout.collective_matmul:
        return x
    return 2 * x if layout.sequence_parallel else 0
