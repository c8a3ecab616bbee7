"""The parts of a model, in the order in which activations go through them.

Sizes are those of the whole model, without padding. Letters: D model, T tokens in a sequence, V
vocabulary, L layers. Patches of an image count as tokens.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

from jaxptd.costs.collective import Collective
from jaxptd.parts.ends import Head, Table
from jaxptd.parts.parameters import (
    Named,
    Sharding,
    inside,
    norm,
    positions,
    token_types,
    vocabulary,
)
from jaxptd.parts.part import Part
from jaxptd.parts.scenario import Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.shapes import ParamShape


@dataclasses.dataclass(frozen=True)
class Stack:
    """Layers that are alike: for each pair of products a norm, and a residual sum after it.

    Args:
        name: of the stack.
        layers: L.
        parts: of a layer, in their order.
        statistics: of a token that each norm keeps: 2 of LayerNorm, 1 of RMSNorm.
        norms_sums: whether the norms are of the sums, not of what enters the pairs.
        parallel: whether all parts read one norm of a layer's input, and none what another makes.
    """

    name: str
    layers: int
    parts: tuple[Part, ...]
    statistics: int
    norms_sums: bool
    parallel: bool = False

    @property
    def norms(self) -> int:
        """Norms of a layer."""
        return 1 if self.parallel else len(self.parts)

    @property
    def read_inside(self) -> int:
        """Parts of whose results other parts of the layer are made, the first ones."""
        return 0 if self.parallel else len(self.parts) - 1

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that its layers change."""
        return next(part.sequence for part in self.parts if part.sequence)

    @property
    def hidden(self) -> int:
        """D of its layers."""
        return self.parts[0].hidden

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices."""
        return sum(part.weights for part in self.parts)

    @property
    def flops(self) -> int:
        """FLOPs of a sequence in all layers and a whole step; see `Architecture.flops`."""
        tokens = self.tokens
        each = (6 * p.multiplications(tokens) + 3 * tokens * p.score_flops for p in self.parts)
        return self.layers * sum(each)

    # ---- images --------------------------------------------------------------------------------

    @property
    def of_images(self) -> bool:
        """True if its tokens are patches of images."""
        return any(part.of_images for part in self.parts)

    def in_strips(self, devices: int) -> bool:
        """True if so many devices share images in strips; else each has whole ones."""
        return all(part.in_strips(devices) for part in self.parts)

    def samples(self, sizes: Sizes, rows: int) -> int:
        """Samples of which a device has some of so many tokens: whole sequences or their shards.

        Tokens of a sequence are sharded by more than cp, but an image only by cp, or by nothing.
        """
        if not self.of_images:
            return sizes.sequences
        cp = sizes.config.layout.cp
        return rows * (cp if self.in_strips(cp) else 1) // self.tokens

    # ---- parameters ----------------------------------------------------------------------------

    def parameters(self, sharding: Sharding) -> Named:
        """The parameters of all layers, `[L, ..]`: of each part its norm and its products."""
        for name, info in self._of_a_layer(sharding):
            yield name, self._stacked(info)

    def _of_a_layer(self, sharding: Sharding) -> Named:
        for number, part in enumerate(self.parts):
            if number < self.norms:
                name = "norm" if self.parallel else f"{part.name}_norm"
                yield from inside(name, norm(sharding, self.hidden, self.statistics))
            yield from inside(part.name, part.parameters(sharding))

    def _stacked(self, info: ParamShape) -> ParamShape:
        """The parameter of all layers."""
        return dataclasses.replace(
            info,
            shape=(self.layers, *info.shape),
            stored_shape=(self.layers, *info.stored_shape),
            spec=(None, *info.spec),
            stack=self.name,
            matrix="s" + info.matrix if info.matrix else "",
        )


class Outside(Protocol):
    """The parts outside of stacks of a model that has no tables and heads."""

    @property
    def multiplications(self) -> int:
        """Multiplications with weights in a sample."""

    def collectives(self, step: Scenario, stacks: tuple[Stack, ...]) -> Iterator[Collective]:
        """Their collectives in all micro-batches."""


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
        outside: the parts outside of stacks of a model of images, which has no tables and heads.
    """

    hidden: int
    tokens: Table
    embedded: tuple[int, ...]
    positions: Table | None
    stacks: tuple[Stack, ...]
    heads: tuple[Head, ...]
    first_norm: int
    types: int = 0
    outside: Outside | None = None

    @property
    def flops(self) -> int:
        """FLOPs of a sequence, with its source, in a step.

        Six a token and a weight of a product, three times those of scores.
        Source: Chowdhery et al., arXiv 2204.02311, appendix B.
        """
        ends = self.stacks[-1].tokens * sum(head.weights for head in self.heads)
        ends += 0 if self.outside is None else self.outside.multiplications
        return 6 * ends + sum(stack.flops for stack in self.stacks)

    def parameters(self, sharding: Sharding, vocab: int) -> Named:
        """Every parameter of a model of text, the layers of a stack as one; vocab: V, padded.

        Their names are the model's where one of its kind has one name in all models.
        """
        size = self.hidden
        yield from inside("tokens", vocabulary(sharding, self.tokens.rows, size, vocab))
        if self.positions is not None:
            yield from inside("positions", positions(sharding, self.positions.rows, size))
        if self.types:
            yield from inside("types", token_types(sharding, self.types, size))
        for stack in self.stacks:
            yield from inside(stack.name, stack.parameters(sharding))
            for part in stack.parts:
                yield from inside("common", part.common_parameters(sharding, stack.name))
        yield from inside("norm", norm(sharding, size, self.first_norm))
        for number, head in enumerate(self.heads):
            # A head of tokens has the padding of their table.
            rows = vocab if head.columns == self.tokens.rows else sharding.padded(head.columns)
            yield from inside(f"head{number or ''}", head.parameters(sharding, rows))

    def streams(self, sizes: Sizes) -> list[int]:
        """Bytes of each array of x, as the residual stream of a micro-batch has it on a device.

        There is one for each stack, which its layers change; all are as wide as the model.
        """
        return [sizes.with_tokens(stack.tokens).stream for stack in self.stacks]
