"""Low-rank adapters of a layer's matrices: their description. The layer is `layers/adapters.py`.

Letters: D rows of a matrix, R rank.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Self

from jaxptd.config.lora import LoRA
from jaxptd.shapes import ParamShape


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of a matrix.

    Args:
        rank: R.
        scale: the factor of what it adds.
    """

    rank: int
    scale: float

    @classmethod
    def of(cls, lora: LoRA | None, name: str) -> Self | None:
        """The adapter of the matrix of that name in a layer, such as mlp.up, if it has one."""
        if lora is None or not lora.adapts(name):
            return None
        return cls(lora.rank, lora.scale)

    def parameters(
        self, w: ParamShape, *, rows: int, parts: int = 0, over: tuple[str, ...]
    ) -> Iterator[tuple[str, ParamShape]]:
        """`a[*rows, *parts, R]` and `b[R, *parts, *columns]` of a matrix, sharded as it is.

        Args:
            w: the matrix, `[*rows, *parts, *columns]`.
            rows: number of its dims that are rows.
            parts: number of its dims that number separate matrices, each with its own adapter.
            over: the axis along which devices share the matrix: what a device computes for the one
                that is not sharded is a partial sum over it.
        """
        ends, rank = rows + parts, (self.rank,)
        first = (*w.shape[:ends], *rank), (*w.stored_shape[:ends], *rank), (*w.spec[:ends], None)
        second = (*rank, *w.shape[rows:]), (*rank, *w.stored_shape[rows:]), (None, *w.spec[rows:])
        columns, separate = "c" * (len(w.shape) - ends), "s" * parts
        letters = ("r" * rows + separate + "c", "r" + separate + columns)
        for name, each, matrix in zip("ab", (first, second), letters, strict=True):
            partial = over if each[2].count(None) == len(each[2]) else ()
            shape = ParamShape(*each, decay=True, cast=True, over=partial, matrix=matrix)
            yield f"lora.{name}", shape


def low_columns(a: ParamShape) -> int:
    """Columns of an adapter's first matrix, those of all its separate matrices."""
    pairs = zip(a.shape, a.matrix, strict=True)
    return math.prod(size for size, letter in pairs if letter != "r")
