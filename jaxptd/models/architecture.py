"""The parts of a model, by which bytes, memory and FLOPs are counted.

Sizes are those of the whole model, without padding. Letters: D model, F hidden, N heads, K heads of
keys and values, H head size, T tokens in a sequence, V vocabulary, L layers. Patches of an
image count as tokens.
"""

import dataclasses

from jaxptd.vision.architecture import ImageEnds, Windows


@dataclasses.dataclass(frozen=True)
class Attention:
    """A pair of products, of which the first makes q, k, v, with attention between them.

    Args:
        hidden: D.
        heads: N.
        kv_heads: K.
        head_size: H.
        unit: numbers of a head that stay together where heads are cut.
        tokens: T of the queries.
        reach: keys that a token attends to, T or those of a window.
        has_norm: whether queries and keys are normalised.
        source: tokens in another sequence, whose keys and values these are; None: the same tokens.
        source_statistics: of a token of that sequence that a norm before them keeps, as in `Stack`;
            0 without one.
        buckets: of distances, whose biases of scores all layers share; 0 without any.
        bias: whether the products that make q, k, v have one.
        out_bias: whether the product behind attention has one.
        causal: whether a token sees no later ones.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    unit: int
    tokens: int
    reach: int
    has_norm: bool
    source: int | None = None
    source_statistics: int = 0
    buckets: int = 0
    bias: bool = False
    causal: bool = True
    out_bias: bool = False

    @property
    def has_bias(self) -> bool:
        """True if scores have a bias by distance."""
        return self.buckets > 0

    @property
    def key_tokens(self) -> int:
        """Tokens that have keys and values."""
        return self.tokens if self.source is None else self.source

    @property
    def weights(self) -> int:
        """Elements of the matrices: D N H twice and D K H twice."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_size

    def multiplications(self, tokens: int) -> int:
        """Multiplications with weights in a sequence of so many tokens, and in its source."""
        used = tokens * self.heads + self.key_tokens * self.kv_heads
        return 2 * self.hidden * used * self.head_size

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
        bias: whether both products have one.
    """

    hidden: int
    size: int
    gated: bool
    score_flops: int = 0
    bias: bool = False

    @property
    def weights(self) -> int:
        """Elements of the matrices."""
        return self.hidden * self.size * (3 if self.gated else 2)

    def multiplications(self, tokens: int) -> int:
        """Multiplications with weights in a sequence of so many tokens."""
        return tokens * self.weights


Sublayer = Attention | MLP | Windows


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that are alike: for each pair of products a norm, and a residual sum after it.

    Args:
        name: of the stack.
        layers: L.
        sublayers: of a layer, in their order.
        statistics: of a token that each norm keeps: 2 of LayerNorm, 1 of RMSNorm.
        norms_sums: whether the norms are of the sums, not of what enters the pairs.
    """

    name: str
    layers: int
    sublayers: tuple[Sublayer, ...]
    statistics: int
    norms_sums: bool

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attentions of a layer."""
        return tuple(sublayer for sublayer in self.sublayers if isinstance(sublayer, Attention))

    @property
    def windows(self) -> tuple[Windows, ...]:
        """The attentions of a layer that are in windows."""
        return tuple(sublayer for sublayer in self.sublayers if isinstance(sublayer, Windows))

    def in_strips(self, devices: int) -> bool:
        """True if so many devices share images in strips; else each has whole ones."""
        return all(each.in_strips(devices) for each in self.windows)

    @property
    def of_text(self) -> tuple[Attention | MLP, ...]:
        """The pairs, for what knows none of images: `require_times` refuses these before."""
        assert not self.windows
        return tuple(sublayer for sublayer in self.sublayers if not isinstance(sublayer, Windows))

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that its layers change."""
        attending: tuple[Attention | Windows, ...] = (*self.attentions, *self.windows)
        return attending[0].tokens

    @property
    def hidden(self) -> int:
        """D of its layers."""
        return self.sublayers[0].hidden

    @property
    def flops(self) -> int:
        """FLOPs of a sequence in all layers and a whole step; see `Architecture.flops`."""
        tokens = self.tokens
        each = (6 * p.multiplications(tokens) + 3 * tokens * p.score_flops for p in self.sublayers)
        return self.layers * sum(each)


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


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The parts of a model.

    Args:
        hidden: D.
        tokens: the table of tokens.
        embedded: tokens of each sequence that is looked up in it.
        positions: that of positions; None without one.
        stacks: in the order in which activations go through them.
        heads: behind them, one for each term of the loss that has logits of its own.
        first_norm: statistics of the norm before the stacks, as in `Stack`; 0 without one.
        types: of tokens, each with a vector that is added to it.
        images: the parts outside of stacks of a model of images, which has no tables and heads.
    """

    hidden: int
    tokens: Table
    embedded: tuple[int, ...]
    positions: Table | None
    stacks: tuple[Stack, ...]
    heads: tuple[Head, ...]
    first_norm: int
    types: int = 0
    images: ImageEnds | None = None

    @property
    def streams(self) -> tuple[int, ...]:
        """Tokens of a sequence in each array of x: one for each stack, which its layers change."""
        return tuple(stack.tokens for stack in self.stacks)

    @property
    def flops(self) -> int:
        """FLOPs of a sequence, with its source, in a step.

        Six a token and a weight of a product, three times those of scores.
        Source: Chowdhery et al., arXiv 2204.02311, appendix B.
        """
        outside = self.stacks[-1].tokens * sum(head.weights for head in self.heads)
        outside += 0 if self.images is None else self.images.multiplications
        return 6 * outside + sum(stack.flops for stack in self.stacks)
