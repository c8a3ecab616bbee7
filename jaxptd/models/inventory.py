"""The parts of a model, by which bytes, memory and FLOPs are counted.

Sizes are those of the whole model, without padding. Letters: D model, F hidden, N heads, K heads of
keys and values, H head size, T tokens in a sequence, V vocabulary, L layers.
"""

import dataclasses
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Attention:
    """A pair of products, of which the first makes q, k, v, with attention between them.

    Args:
        hidden: D.
        heads: N.
        kv_heads: K.
        head_size: H.
        unit: numbers of a head that stay together where heads are cut.
        tokens: T of queries and keys.
        reach: keys that a token attends to, T or those of a window.
        has_norm: whether queries and keys are normalised.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    unit: int
    tokens: int
    reach: int
    has_norm: bool

    @property
    def weights(self) -> int:
        """Elements of the matrices: D N H twice and D K H twice."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size

    @property
    def score_flops(self) -> int:
        """FLOPs of a token's scores and of their product with the values, forward."""
        return 4 * self.heads * self.head_size * self.reach


@dataclasses.dataclass(frozen=True)
class MLP:
    """A pair of products with an activation between them.

    Args:
        hidden: D.
        size: F.
        gated: whether the first product has 2 F columns.
    """

    hidden: int
    size: int
    gated: bool
    score_flops: int = 0

    @property
    def weights(self) -> int:
        """Elements of the matrices."""
        return self.hidden * self.size * (3 if self.gated else 2)


Pair = Attention | MLP


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that are alike: for each pair of products a norm, and a residual sum after it.

    Args:
        name: of the stack.
        layers: L.
        pairs: of a layer, in their order.
        statistics: of a token that each norm keeps: 2 of LayerNorm, 1 of RMSNorm.
        norms_sums: whether the norms are of the sums, not of what enters the pairs.
    """

    name: str
    layers: int
    pairs: tuple[Pair, ...]
    statistics: int
    norms_sums: bool


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of which rows are looked up: of tokens, `[V, D]`, or of positions, `[T, D]`."""

    rows: int
    hidden: int


@dataclasses.dataclass(frozen=True)
class Head:
    """The product that makes logits, and the loss.

    Args:
        hidden: D.
        columns: V.
    """

    hidden: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Inventory:
    """The parts of a model.

    Args:
        hidden: D.
        tokens: the table of tokens.
        positions: that of positions; None without one.
        stacks: in the order in which activations go through them.
        head: behind them.
        first_norm: statistics of the norm before the stacks, as in `Stack`; 0 without one.
        last_norm: statistics of the norm behind them.
    """

    hidden: int
    tokens: Table
    positions: Table | None
    stacks: tuple[Stack, ...]
    head: Head
    first_norm: int
    last_norm: int

    @property
    def pairs(self) -> Iterator[tuple[int, Pair]]:
        """Every pair of products, with the number of layers that have it."""
        return ((stack.layers, pair) for stack in self.stacks for pair in stack.pairs)

    @property
    def streams(self) -> tuple[int, ...]:
        """Tokens of a sequence in each array of x: one for each stack, which its layers change."""
        attentions = (
            next(pair for pair in stack.pairs if isinstance(pair, Attention))
            for stack in self.stacks
        )
        return tuple(attention.tokens for attention in attentions)

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a token in a step: six a weight of a product, three times those of scores.

        Source: Chowdhery et al., arXiv 2204.02311, appendix B.
        """
        head = math.prod((self.head.hidden, self.head.columns))
        layers = sum(n * (6 * pair.weights + 3 * pair.score_flops) for n, pair in self.pairs)
        return 6 * head + layers
