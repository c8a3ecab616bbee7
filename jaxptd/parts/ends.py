"""Tables and heads, the parts of a model of text before and behind its layers.

Letters: D model, T position, V vocabulary.
"""

import dataclasses

from jaxptd.parts.parameters import (
    Named,
    Sharding,
    inside,
    norm,
    square,
    vocabulary,
    vocabulary_bias,
)
from jaxptd.parts.sizes import Sizes


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of which rows are looked up: of tokens, `[V, D]`, or of positions, `[T, D]`."""

    rows: int
    hidden: int


@dataclasses.dataclass(frozen=True)
class Head:
    """The product that makes logits, and their loss.

    Args:
        hidden: D.
        columns: V.
        squares: products `[D, D]` before it, of the residual stream with a whole matrix.
        norm: statistics of a norm of its own before it, as in `Stack`; 0 without one.
        own: whether its matrix is its own; else it is the table of tokens.
        bias: whether the logits have one.
    """

    hidden: int
    columns: int
    squares: int = 0
    norm: int = 0
    own: bool = False
    bias: bool = False

    @property
    def weights(self) -> int:
        """Elements of the matrices."""
        return self.hidden * (self.columns + self.squares * self.hidden)

    def padded_columns(self, sizes: Sizes) -> int:
        """Columns of the product that makes its logits, with padding: V, or classes."""
        if self.columns == sizes.config.model.vocab_size:
            return sizes.vocab
        return sizes.padded(self.columns)

    def parameters(self, sharding: Sharding, rows: int) -> Named:
        """Its parameters; rows: its columns with padding."""
        for number in range(self.squares):
            yield from inside(f"square{number}", square(sharding, self.hidden, self.hidden))
        yield from inside("norm", norm(sharding, self.hidden, self.norm))
        if self.own:
            yield from vocabulary(sharding, self.columns, self.hidden, rows)
        if self.bias:
            yield from vocabulary_bias(sharding, self.columns, rows)
