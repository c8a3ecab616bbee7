"""Norms, and a text model's ends: tables before the layers, heads with their losses after them.

Letters: b sequences of a micro-batch on one device, D model, T position, V vocabulary, M
micro-batches. Byte counts use padded sizes.
"""

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

from jaxptd.config.preference import most_pairs
from jaxptd.costs import kernels
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.costs.program import Implementation, Work
from jaxptd.costs.terms import Term
from jaxptd.layout import SEQUENCE_AXES, Axis
from jaxptd.parts.grid import product
from jaxptd.parts.parameters import (
    Named,
    Sharding,
    inside,
    norm,
    positions,
    square,
    token_types,
    vocabulary,
    vocabulary_bias,
)
from jaxptd.parts.scenario import Scenario
from jaxptd.parts.sizes import Sizes

if TYPE_CHECKING:
    from jaxptd.parts.architecture import Stack


@dataclasses.dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm.

    Args:
        hidden: D.
        statistics: per token: 2 (LayerNorm), 1 (RMSNorm) or 0 (no norm).
    """

    hidden: int
    statistics: int

    def parameters(self, sharding: Sharding) -> Named:
        """`w[D]`, and for a norm with a mean `b[D]`."""
        return norm(sharding, self.hidden, self.statistics)

    def kept(self, sizes: Sizes) -> int:
        """Bytes of its statistics, which backward needs."""
        return self.statistics * sizes.stream_rows * sizes.master_itemsize

    def on_grid(self, step: Scenario, *, forward: int, backward: int) -> Iterator[Collective]:
        """All-reduces: mean, then variance; in backward two means in one.

        RMSNorm needs one forward and one backward.

        Args:
            step: the step, with the norm's tokens.
            forward: number of forward passes in all layers and micro-batches.
            backward: number of backward passes.
        """
        if not self.statistics:
            return
        size = step.sizes.rows * step.sizes.master_itemsize
        count = self.statistics * forward + backward
        scalars = self.statistics * (forward + backward)
        yield Collective(ALL_REDUCE, (Axis.COL,), count, size * scalars)

    # ---- seconds -------------------------------------------------------------------------------

    def moved_forward(self, implementation: Implementation) -> int:
        """Bytes per element of the stream, with the addition before it and dropout's mask."""
        return implementation.stream_forward + implementation.dropout

    def moved_backward(self, implementation: Implementation) -> int:
        """Bytes of their gradients, and of the preceding bias's."""
        passes = implementation.stream_backward
        return passes + 5 * implementation.dropout + 2 * implementation.bias


class EndBytes(NamedTuple):
    """Bytes outside the layers, on one device.

    parameters: all of them, in the state's precision.
    narrow: the head's table in the precision of activations.
    gradient: that table's gradient until it is accumulated; on a grid in the state's precision.
    product: both of these; on a grid, whole columns for its matmuls, and the sum.
    logits: one micro-batch's, in the precision of activations.
    """

    parameters: int = 0
    narrow: int = 0
    gradient: int = 0
    product: int = 0
    logits: int = 0

    @classmethod
    def of_all(cls, ends: Iterable[Self]) -> Self:
        """The bytes of all ends together."""
        return cls(*map(sum, zip(cls(), *ends, strict=True)))


class End(abc.ABC):
    """A part of a model outside its layers."""

    @property
    def embedded(self) -> int:
        """Tokens per sample that it looks up."""
        return 0

    @property
    def weights(self) -> int:
        """Elements of its largest matrices."""
        return 0

    @property
    def layers(self) -> "tuple[Stack, ...]":
        """Layers that run with it, each a stack of one."""
        return ()

    def multiplications(self, tokens: int) -> int:
        """Multiplications with its own weights per sample; tokens: the last stack's output."""
        return 0

    def parameters(self, sharding: Sharding, vocab: int) -> Named:
        """Its parameters; vocab: padded V."""
        yield from ()

    def end_bytes(self, sizes: Sizes) -> EndBytes:
        """The bytes that it holds while the loss is computed."""
        return EndBytes()

    def streams(self, sizes: Sizes) -> list[int]:
        """Bytes of each array that passes all layers beside the residual stream for it."""
        return []

    @abc.abstractmethod
    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Its collectives in all micro-batches."""

    def terms(self, work: Work) -> list[Term]:
        """Its time per micro-batch; work: that of a layer in the adjacent stack."""
        return []


@dataclasses.dataclass(frozen=True)
class Embedding(End):
    """The tables whose rows add up to the residual stream, and an optional norm.

    Args:
        hidden: D.
        tokens: V, rows of the table of tokens.
        lengths: lengths of the sequences that are looked up.
        positions: rows of the table of positions; 0 without one.
        types: number of token types, each with a vector to add.
        statistics: the norm's, as in `Norm`; 0 without a norm.
    """

    hidden: int
    tokens: int
    lengths: tuple[int, ...]
    positions: int = 0
    types: int = 0
    statistics: int = 0

    @property
    def embedded(self) -> int:
        return sum(self.lengths)

    @property
    def weights(self) -> int:
        """Elements of the table of tokens."""
        return self.tokens * self.hidden

    @property
    def norm(self) -> Norm:
        """The norm after the look-up."""
        return Norm(self.hidden, self.statistics)

    def parameters(self, sharding: Sharding, vocab: int) -> Named:
        yield from inside("tokens", vocabulary(sharding, self.tokens, self.hidden, vocab))
        if self.positions:
            yield from inside("positions", positions(sharding, self.positions, self.hidden))
        if self.types:
            yield from inside("types", token_types(sharding, self.types, self.hidden))
        yield from inside("norm", self.norm.parameters(sharding))

    def end_bytes(self, sizes: Sizes) -> EndBytes:
        layout, wide = sizes.config.layout, sizes.master_itemsize
        rest = self.positions * sizes.hidden * wide // (layout.row * layout.col)
        return EndBytes(parameters=_table_bytes(sizes) + rest)

    # ---- bytes sent ----------------------------------------------------------------------------

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Forward, and its conjugates backward.

        A pipeline differentiates it at a separate tick, where a norm needs its input again.
        """
        forwards = 2 if step.plan and self.statistics else 1
        if not step.config.layout.has_grid:
            for length in self.lengths:
                trained = not step.config.freezes("tokens.table")
                yield from _whole_stream(step.with_tokens(length), sums=forwards, gathers=trained)
            return
        M, layout, sizes = step.micro_batches, step.config.layout, step.sizes
        yield from self.norm.on_grid(step, forward=forwards * M, backward=M)
        for length in self.lengths:
            yield from _look_ups(step.with_tokens(length), forwards)
        # Position table: T/cp rows, D/col of each.
        length = step.config.padded_model.seq_length // layout.sequence_shards
        rows = length * sizes.hidden // layout.col * sizes.itemsize
        for kind, times in ((REDUCE_SCATTER, forwards * M), (ALL_GATHER, M)):
            times *= self.positions > 0
            yield Collective(kind, (Axis.ROW,), times, times * rows)

    # ---- seconds -------------------------------------------------------------------------------

    def terms(self, work: Work) -> list[Term]:
        """Looks up tokens and adds up their gradients: five passes of 16 bits."""
        elements = sum(work.parallelism.stream(each, self.hidden) for each in self.lengths)
        return [_at_ends(kernels.moved(work.accelerator, 5 * 2 * elements, 4), "embedding")]


@dataclasses.dataclass(frozen=True)
class Head(End):
    """The matmul that computes logits, and their loss.

    Args:
        hidden: D.
        columns: V, or classes.
        squares: number of preceding matmuls `[D, D]` of the residual stream with a whole matrix.
        statistics: those of its own norm before it, as in `Norm`; 0 without a norm.
        own: whether it has its own matrix rather than the table of tokens.
        bias: whether the logits have a bias.
        of_tokens: whether its columns are the vocabulary.
        name: prefix of its parameters' names.
    """

    hidden: int
    columns: int
    squares: int = 0
    statistics: int = 0
    own: bool = False
    bias: bool = False
    of_tokens: bool = True
    name: str = "head"

    @property
    def weights(self) -> int:
        return self.hidden * (self.columns + self.squares * self.hidden)

    def multiplications(self, tokens: int) -> int:
        return tokens * self.weights

    @property
    def norm(self) -> Norm:
        """The norm before it."""
        return Norm(self.hidden, self.statistics)

    def padded_columns(self, sizes: Sizes) -> int:
        """Columns of the logits with padding: V, or classes."""
        return sizes.vocab if self.of_tokens else sizes.padded(self.columns)

    def parameters(self, sharding: Sharding, vocab: int) -> Named:
        return inside(self.name, self._parameters(sharding, vocab))

    def _parameters(self, sharding: Sharding, vocab: int) -> Named:
        rows = vocab if self.of_tokens else sharding.padded(self.columns)
        for number in range(self.squares):
            yield from inside(f"square{number}", square(sharding, self.hidden, self.hidden))
        yield from inside("norm", self.norm.parameters(sharding))
        if self.own:
            yield from vocabulary(sharding, self.columns, self.hidden, rows)
        if self.bias:
            yield from vocabulary_bias(sharding, self.columns, rows)

    def end_bytes(self, sizes: Sizes) -> EndBytes:
        """Ignores the matrix of a few classes."""
        layout, narrow, wide = sizes.config.layout, sizes.itemsize, sizes.master_itemsize
        squares = self.squares * sizes.hidden**2 * wide // (layout.row * layout.col)
        columns = self.padded_columns(sizes) // sizes.inner_devices
        logits = sizes.rows * columns * narrow
        if not self.of_tokens:
            return EndBytes(parameters=squares, logits=logits)
        table = _table_bytes(sizes)
        read = table * narrow // wide
        return EndBytes(
            parameters=squares + self.own * table,
            narrow=read,
            gradient=table if layout.has_grid else read,
            product=layout.row * (read + table) + table if layout.has_grid else 2 * read,
            logits=logits,
        )

    # ---- bytes sent ----------------------------------------------------------------------------

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Collectives of its matmuls and norm, and of its loss over the sharded vocabulary.

        The loss all-reduces a maximum and two sums per token.
        """
        sizes, M = step.sizes, step.micro_batches
        axis, tokens = Axis.TP, sizes.tokens
        if step.config.layout.has_grid:
            axis, tokens = Axis.COL, sizes.rows
            columns = self.padded_columns(sizes)
            yield from product(step, sizes.hidden, columns, forwards=1, times=M)
            squares = M * self.squares
            yield from product(step, sizes.hidden, sizes.hidden, forwards=1, times=squares)
            yield from self.norm.on_grid(step, forward=M, backward=M)
        else:
            yield from _whole_stream(step, sums=1)
        yield Collective(ALL_REDUCE, (axis,), 2 * M, 3 * M * tokens * sizes.master_itemsize)

    # ---- seconds -------------------------------------------------------------------------------

    def terms(self, work: Work) -> list[Term]:
        """Logits, the loss over the sharded vocabulary, and their gradients."""
        a, T, D = work.accelerator, work.tokens, self.hidden
        V = self.columns // work.parallelism.inner
        sizes = {"logits forward": (T, V, D), "logits dx": (T, D, V), "logits dw": (D, V, T)}
        products = [_at_ends(kernels.product(a, *size), name) for name, size in sizes.items()]
        squares = [_at_ends(kernels.product(a, T, D, D).times(3), "head's square")] * self.squares
        loss = kernels.moved(a, work.implementation.logit * float(T) * V, 8)
        return [*products, *squares, _at_ends(loss, "loss")]


@dataclasses.dataclass(frozen=True)
class PairSums(End):
    """Sums over the devices of a sequence: what the texts of its pairs gain, and their sizes."""

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """An all-reduce of two numbers of each document, 2*b*K."""
        config, sizes = step.config, step.sizes
        documents = 2 * most_pairs(config.padded_model.seq_length)
        size = 2 * sizes.sequences * documents * sizes.master_itemsize
        axes = (*SEQUENCE_AXES, *[Axis.ROW] * config.layout.has_grid)
        M = step.micro_batches
        yield Collective(ALL_REDUCE, axes, M, M * size)


def _table_bytes(sizes: Sizes) -> int:
    """Bytes of the table of tokens, in the state's precision."""
    return sizes.vocab * sizes.hidden * sizes.master_itemsize // sizes.matrix_shards


def _whole_stream(step: Scenario, *, sums: int, gathers: int = 1) -> Iterator[Collective]:
    """Collectives of the residual stream over tp at a table, b*T/cp*D.

    Args:
        step: the step.
        sums: all-reduces, or reduce-scatters, per micro-batch.
        gathers: all-gathers per micro-batch, with sequence parallelism; a look-up in a frozen table
            needs none.
    """
    for kind in step.kinds_on_tp:
        times = step.micro_batches * (gathers if kind == ALL_GATHER else sums)
        yield Collective(kind, (Axis.TP,), times, times * step.sizes.activations)


def _look_ups(step: Scenario, forwards: int) -> Iterator[Collective]:
    """Collectives of rows of a grid's token table, m*D per sequence, forward and backward."""
    sizes, times = step.sizes, step.micro_batches
    rows = times * sizes.rows * sizes.hidden * sizes.itemsize
    yield Collective(ALL_TO_ALL, (Axis.ROW,), (1 + forwards) * times, (1 + forwards) * rows)
    yield Collective(REDUCE_SCATTER, (Axis.COL,), forwards * times, forwards * rows)
    yield Collective(ALL_GATHER, (Axis.COL,), times, rows)


def _at_ends(term: Term, name: str) -> Term:
    return term.named(name, "embedding and loss")
