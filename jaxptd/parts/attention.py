"""Attention of a layer: its description and costs. The layers are `layers/attention`.

Letters: b sequences of a micro-batch on one device, T tokens of the queries and S of the keys in a
sequence, D model, N heads, K heads of keys and values, H head size.
"""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Self

from jaxptd.config import ModelConfig, Remat
from jaxptd.config.lora import LoRA
from jaxptd.context_parallel import CHUNK, Imported
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.costs.kept import MOST, Kept, by
from jaxptd.costs.program import Implementation, Work
from jaxptd.costs.terms import Term
from jaxptd.layout import Axis, Layout
from jaxptd.matmul.padding import HeadCounts, heads_for
from jaxptd.parts.attention_time import AttentionWork
from jaxptd.parts.grid import Panels
from jaxptd.parts.parameters import HeadShape, Named, Sharding, inside, relative_bias
from jaxptd.parts.part import Part, Product
from jaxptd.parts.projections import Projections
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes

SCORES = 2  # arrays of scores alive at once, in float32 and in activations' precision


@dataclasses.dataclass(frozen=True)
class AttentionShape(Part):
    """A pair of matmuls with attention between them; the first computes q, k and v.

    Args:
        hidden: D.
        heads: N.
        kv_heads: K.
        head_size: H.
        unit: elements of a head that stay together where heads are cut.
        tokens: T.
        reaches: keys that a token attends to, T or a window's, in each layer of the stack; one
            entry if all layers are alike.
        has_norm: whether queries and keys are normalised.
        whole_norm: whether all heads together are.
        buckets: number of distance buckets with score biases that all layers share; 0 without
            biases.
        bias: whether the projections of q, k and v have a bias.
        causal: whether tokens see only themselves and earlier ones.
        out_bias: whether the output projection has a bias.
        sinks: whether each head has a logit beside its scores.
        lora: adapters, of the projections that it names.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    unit: int
    tokens: int
    reaches: tuple[int, ...]
    has_norm: bool
    whole_norm: bool = False
    buckets: int = 0
    bias: bool = False
    causal: bool = True
    out_bias: bool = False
    sinks: bool = False
    lora: LoRA | None = None

    layer = Imported("jaxptd.layers.attention", "SelfAttention")
    name: ClassVar[str] = "attention"
    title: ClassVar[str] = "attention"
    first_title: ClassVar[str] = "product that makes q, k, v"

    @classmethod
    def of(cls, model: ModelConfig, layers: slice = slice(None), **others: Any) -> Self:
        """The attention of these layers of a model; others: fields to override."""
        reaches = [model.reach if each else model.seq_length for each in model.windowed[layers]]
        options = model.block
        fields: dict[str, Any] = {
            "hidden": model.hidden_size,
            "heads": model.num_heads,
            "kv_heads": options.num_kv_heads,
            "head_size": model.head_size_of(layers.start or 0),
            "unit": options.head_unit,
            "tokens": model.seq_length,
            "reaches": tuple(reaches if len(set(reaches)) > 1 else reaches[:1]),
            "has_norm": bool(options.qk_norm),
            "whole_norm": options.qk_norm == "whole",
            "buckets": options.relative.buckets if options.relative else 0,
            "bias": options.linear_bias != "none",
            "causal": options.causal,
            "out_bias": options.linear_bias == "all",
            "sinks": options.attention_sinks,
            "lora": model.lora,
        }
        return cls(**fields | others)

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def sequence(self) -> int:
        return self.tokens

    @property
    def key_tokens(self) -> int:
        """S, the number of tokens with keys and values."""
        return self.tokens

    @property
    def cuts_output(self) -> bool:
        """True if the output projection takes a part of each head of attention's output."""
        return False

    def exchanged(self, own: "HeadSizes") -> int:
        """Elements for each token that devices exchange if they share sequences."""
        return 2 * own.sent_keys

    def attended(self, absorbed: bool) -> tuple[int, int]:
        """(heads of keys and values, their size) that attention takes; 0 heads: the layer's own.

        absorbed: whether latent attention takes scores on latent vectors.
        """
        return 0, self.head_size

    def of_keys(self, tokens: int) -> int:
        """Number of tokens with keys and values, for `tokens` queries."""
        return tokens * self.key_tokens // self.tokens

    @property
    def columns(self) -> int:
        return self.head_size * (self.heads + 2 * self.kv_heads)

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def key_columns(self) -> int:
        return self.kv_heads * self.head_size

    def multiplications(self, tokens: int) -> int:
        """Multiplications with weights in a sequence of `tokens` tokens and in its source."""
        used = tokens * self.heads + self.key_tokens * self.kv_heads
        return 2 * self.hidden * used * self.head_size

    @property
    def score_flops(self) -> Fraction:
        """FLOPs per token of scores and of their matmul with the values, forward: layers' mean."""
        return Fraction(4 * self.heads * self.head_size * sum(self.reaches), len(self.reaches))

    def first(self, sizes: Sizes) -> int:
        return self.second(sizes) + 2 * HeadSizes(self, sizes).made_keys

    def second(self, sizes: Sizes) -> int:
        return HeadSizes(self, sizes).inner

    def heads_on_device(self, sizes: Sizes) -> int:
        return HeadSizes(self, sizes).heads

    @property
    def head_shape(self) -> HeadShape:
        return HeadShape(self.heads, self.kv_heads, self.head_size)

    def splits(self, layout: Layout) -> bool:
        """True if heads, in whole groups, split over tp or col."""
        if layout.has_grid and layout.attention2d == "blocks":
            return True
        if self.heads == self.kv_heads:
            return self.heads % (layout.tp * layout.col) == 0
        counts = heads_for(layout, self.heads, self.kv_heads, self.head_size)
        return counts.queries == self.heads

    # ---- parameters ----------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """True if one parameter holds the matrices of queries, keys and values."""
        return self.heads == self.kv_heads

    @property
    def projections(self) -> Projections:
        """Its projections, and the norms of queries and keys."""
        return Projections(
            self.hidden,
            self.heads,
            self.kv_heads,
            self.head_size,
            joined=self.joined,
            unit=self.unit,
            bias=self.bias,
            out_bias=self.out_bias,
            has_norm=self.has_norm,
            whole_norm=self.whole_norm,
            sinks=self.sinks,
            lora=self.lora,
            name=self.name,
        )

    def parameters(self, sharding: Sharding) -> Named:
        yield from self.projections.parameters(sharding)

    def common_parameters(self, sharding: Sharding, stack: str) -> Named:
        """The score biases by distance."""
        if self.buckets:
            bias = relative_bias(sharding, self.buckets, self.head_shape)
            yield from inside(f"{stack}_bias", bias)

    # ---- bytes saved for backward --------------------------------------------------------------

    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        own = HeadSizes(self, sizes)
        queries = sizes.tokens * sizes.itemsize * own.inner // sizes.matrix_shards
        yield from self._queries_keys_values(own, queries)
        yield from self._core_kept(own, queries)

    def _queries_keys_values(self, own: "HeadSizes", queries: int) -> Iterator[Kept]:
        """The projections' result, or what follows from it; a norm of q and k needs both.

        queries: bytes of the queries.
        """
        sizes = own.sizes
        kv, taken = own.made_kv, own.taken_kv
        if own.gathers_kv:
            tokens = self.of_keys(sizes.tokens)
            keys_values = tokens * own.made_keys // sizes.matrix_shards
            yield Kept("slices of k, v", 2 * keys_values * sizes.itemsize, by("dots"))
            yield Kept("gathered k, v", kv, by("attention"))
            yield Kept("k, v as attention takes them", taken, by("none"))
            yield Kept("q", queries, MOST)
        else:
            yield Kept("q, k, v", queries + kv, by("attention", "dots"))
            yield Kept("q, k, v as attention takes them", queries + taken, by("none"))
        if self.whole_norm:
            yield from self._whole_norm_kept(own, queries)
        elif self.has_norm:
            keys = self.of_keys(sizes.rows) * own.kv_heads
            normed = (sizes.rows * own.heads + keys) * sizes.master_itemsize
            yield Kept("q and k before their norm", queries + kv // 2, by("none"))
            yield Kept("statistics of the norms of q and k", normed, MOST)

    def _whole_norm_kept(self, own: "HeadSizes", queries: int) -> Iterator[Kept]:
        """The input of a norm: queries of this many bytes, and keys, or slices gathered later."""
        sizes, shards = own.sizes, own.sizes.matrix_shards
        keys = self.of_keys(sizes.tokens) * own.made_keys * sizes.itemsize // shards
        factors = (own.inner + own.made_keys) * sizes.master_itemsize // sizes.inner_devices
        statistics = (sizes.rows + self.of_keys(sizes.rows)) * sizes.master_itemsize
        yield Kept("q and k before their norm", queries + keys, by("none"))
        yield Kept("factors of the norms of q and k, reshaped", factors, by("none"))
        yield Kept("statistics of the norms of q and k", statistics, MOST)
        if own.gathers_kv:
            yield Kept("slices of k before their norm", keys, by("attention"))

    def _core_kept(self, own: "HeadSizes", output: int) -> Iterator[Kept]:
        """The output, and what a kernel or a ring needs to recompute scores."""
        sizes = own.sizes
        if sizes.has_blocks:
            yield from own.rows_kept(output)
        elif sizes.config.layout.ring_size > 1:
            yield from own.exchange.kept(output)
        else:
            yield from own.kernel_kept(output)

    def bias_kept(self, own: "HeadSizes") -> Iterator[Kept]:
        """The bias of each distance, which each separately traced layer computes for itself."""
        if self.buckets and own.sizes.traces_layers:
            distances = 2 * self.tokens - 1
            size = own.attended * distances * own.sizes.master_itemsize
            yield Kept("biases by distance", size, by("none"))

    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        own = HeadSizes(self, sizes)
        queries = sizes.tokens * sizes.itemsize * own.inner // sizes.matrix_shards
        scores, core = not sizes.is_fused, self._core_bytes(own, queries)
        first = queries + own.made_kv
        return AttentionBytes.of(self, sizes, first=first, core=core, has_scores=scores)

    def _core_bytes(self, own: "HeadSizes", queries: int) -> int:
        """Besides q, k and v: a ring's arrays, and a kernel's chunks of scores."""
        sizes, layout = own.sizes, own.sizes.config.layout
        narrow, wide = sizes.itemsize, sizes.master_itemsize
        both, ring = narrow + wide, layout.ring_size
        rows = sizes.rows * own.heads
        if sizes.has_blocks:
            return rows * self.key_tokens * 2 * wide
        total = 0
        if ring > 1:
            total = own.exchange.in_backward(queries, own.taken_kv)
        if not sizes.is_fused and not layout.context_parallel.exchange.whole_rows * (ring > 1):
            halves = 1 + (ring > 1 and self.causal)  # of a block, see `attend._at_once`
            queries_at_once = min(CHUNK, -(-self.tokens // ring // halves))
            keys_at_once = min(CHUNK, -(-self.key_tokens // ring // halves))
            total += sizes.sequences * own.attended * queries_at_once * keys_at_once * SCORES * both
            if queries_at_once < self.tokens // ring:  # sums over chunks
                total += (queries + own.visited_kv) * wide // narrow
        return total

    def turned_weights(self) -> int:
        return self.hidden * self.inner

    # ---- bytes sent ----------------------------------------------------------------------------
    # Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889.

    def on_tp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Adds slices of keys and values."""
        yield from super().on_tp(step, again, times)
        yield from self._gathered_kv(step, again, Axis.TP, times)
        yield from self._whole_norms(step, again, Axis.TP, times)

    def on_grid(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Adds attention in blocks, or slices of keys and values."""
        yield from super().on_grid(step, again, times)
        if step.sizes.has_blocks:
            yield from self._blocks(step, again, times)
        yield from self._gathered_kv(step, again, Axis.COL, times)
        yield from self._whole_norms(step, again, Axis.COL, times)

    def along_cp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Keys and values, forward and backward; their gradients, in master precision."""
        own = HeadSizes(self, step.sizes)
        if step.sizes.has_blocks:
            yield from self._gathered_blocks(step, own, again, times)
        else:
            yield from own.exchange.sent(step, again, times)
            yield from self._exchanged_heads(step, own, again, times)

    def _exchanged_heads(
        self, step: Scenario, own: "HeadSizes", again: Recomputed, times: int
    ) -> Iterator[Collective]:
        """All-to-alls of queries, of keys and values, and of outputs, forward and backward."""
        sizes = step.sizes
        queries = sizes.rows * own.heads * own.head * sizes.itemsize
        passes = times * (3 - again.nothing)
        size = passes * (2 * queries + own.taken_kv)
        yield Collective(ALL_TO_ALL, (Axis.ULYSSES,), 3 * passes, size)

    def _gathered_kv(
        self, step: Scenario, again: Recomputed, axis: Axis, times: int
    ) -> Iterator[Collective]:
        """All-gathers of slices of kv heads, and their gradients'; axis: the one that shards N."""
        own, sizes = HeadSizes(self, step.sizes), step.sizes
        if own.gathers_kv:
            whole = times * self.of_keys(sizes.rows) * 2 * own.made_keys * sizes.itemsize
            passes = 1 + again.keys
            yield Collective(ALL_GATHER, (axis,), times * passes, passes * whole)
            yield Collective(REDUCE_SCATTER, (axis,), times, whole)

    def _whole_norms(
        self, step: Scenario, again: Recomputed, axis: Axis, times: int
    ) -> Iterator[Collective]:
        """Sums of the statistics of queries and of keys; axis: the one that shards N."""
        if self.whole_norm:
            sizes, passes = step.sizes, times * (2 + again.products)
            statistics = sizes.rows + self.of_keys(sizes.rows)
            size = passes * statistics * sizes.master_itemsize
            yield Collective(ALL_REDUCE, (axis,), 2 * passes, size)

    def _gathered_blocks(
        self, step: Scenario, own: "HeadSizes", again: Recomputed, times: int
    ) -> Iterator[Collective]:
        """All-gathers of every grid's keys and values, repeated with the scores."""
        passes = 1 + again.scores
        whole = times * 2 * self.of_keys(step.sizes.rows) * own.keys * step.sizes.itemsize
        whole *= step.config.layout.cp
        yield Collective(ALL_GATHER, (Axis.CP,), passes * times, passes * whole)
        yield Collective(REDUCE_SCATTER, (Axis.CP,), times, whole)

    def hops(self, layout: Layout) -> int:
        """Hops to all other devices; with contiguous blocks only as far as every layer reaches."""
        others = layout.ring_size - 1
        if not layout.context_parallel.order.in_line:
            return others
        return min(others, -(-(max(self.reaches) - 1) * layout.ring_size // self.tokens))

    def _blocks(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Q K^T, softmax, P V of every head: s elements in a block of scores, k in whole keys.

        Forward and backward, the two matmuls spread keys or values four times and scores four
        times.
        """
        sizes, panels = step.sizes, Panels(step.config.layout, step.on_gpus)
        narrow, wide, own = sizes.itemsize, sizes.master_itemsize, HeadSizes(self, sizes)
        k = step.config.layout.cp * self.of_keys(sizes.rows) * own.keys
        s = sizes.rows * self.heads * self.key_tokens // step.config.layout.col
        keys = times * (4 + again.scores + again.values)
        yield from panels.spread(Axis.ROW, k, times=keys, itemsize=narrow)
        yield from panels.spread(Axis.COL, s, times=times * (4 + again.values), itemsize=narrow)
        yield from panels.collect(Axis.COL, s, times=times, itemsize=narrow)
        yield from panels.collect(Axis.COL, s, times=times * (1 + again.scores), itemsize=wide)
        yield from panels.collect(Axis.ROW, k, times=times * 2, itemsize=narrow)
        softmax = times * (3 + 2 * again.scores)
        rows = sizes.rows * self.heads * wide
        yield Collective(ALL_REDUCE, (Axis.COL,), softmax, softmax * rows)
        if self.has_norm and not self.whole_norm:
            passes = times * (2 + again.products)
            rows += sizes.rows * self.kv_heads * wide
            yield Collective(ALL_REDUCE, (Axis.COL,), 2 * passes, passes * rows)

    # ---- seconds -------------------------------------------------------------------------------

    def products(self, work: Work) -> Iterator[Product]:
        devices = work.parallelism.inner
        yield from self._first_products(work, devices)
        yield Product("attention output", work.tokens, self.inner // devices, self.hidden)

    def _first_products(self, work: Work, devices: int) -> Iterator[Product]:
        yield Product("qkv", work.tokens, self.hidden, self.columns // devices)

    def core_forward(self, work: Work) -> list[Term]:
        """The kernel; unfused, two matmuls and the softmax between them."""
        return AttentionWork(self, work).forward

    def core_backward(self, work: Work) -> list[Term]:
        """The kernel; unfused, four matmuls and the softmax's gradient."""
        return AttentionWork(self, work).backward

    def moved_forward(self, implementation: Implementation) -> int:
        biases = 4 * implementation.bias * self.columns
        split = 0 if implementation.apart else 4 * self.inner + biases
        return split + 4 * implementation.rotary * (self.inner + self.key_columns)

    def moved_backward(self, implementation: Implementation) -> int:
        biases = 2 * implementation.bias * self.columns
        joined = 0 if implementation.apart else 4 * self.inner + 4 * self.columns
        return biases + joined + 4 * implementation.rotary * (self.inner + self.key_columns)


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """Sizes of attention's heads and keys, on one device unless stated otherwise."""

    part: AttentionShape
    sizes: Sizes

    @cached_property
    def counts(self) -> HeadCounts:
        """Numbers of heads; attention in blocks pads H instead."""
        part = self.part
        if self.sizes.has_blocks:
            return HeadCounts(part.heads, part.kv_heads)
        return heads_for(self.sizes.config.layout, part.heads, part.kv_heads, part.head_size)

    @property
    def exchange(self) -> Any:
        """The costs of a ring's exchange: `parts.exchange.Blocks` or a subclass."""
        return self.sizes.config.layout.context_parallel.exchange.costs(self)

    @property
    def inner(self) -> int:
        """N*H. Attention shards N or, in blocks on a grid, H, and pads the sharded dim."""
        return self.counts.queries * self.head

    @property
    def head(self) -> int:
        """H, which blocks on a grid shard and pad."""
        (_, size), unit = self._attended, self.part.unit
        return unit * self.sizes.padded(size // unit, each=unit) if self.sizes.has_blocks else size

    @property
    def heads(self) -> int:
        """Heads that a device computes, whole or a block of each."""
        return self.counts.queries // self._sharing

    @property
    def attended(self) -> int:
        """Heads of which a device computes attention: with Ulysses a share of its heads."""
        return self.heads // self.sizes.config.layout.ulysses

    @property
    def gathers_kv(self) -> bool:
        """True if kv heads do not split, so that devices compute and gather slices of them."""
        return self.counts.gathered

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values that a device attends with, whole or a block of each."""
        return self._attended[0] or max(1, self.counts.keys // self._sharing)

    @property
    def keys(self) -> int:
        """Elements of a token's keys that a device attends with."""
        parts = self.sizes.config.layout.col if self.sizes.has_blocks else 1
        return self.kv_heads * self.head // parts

    @property
    def sent_keys(self) -> int:
        """Elements of a token's keys that a device sends to attention.

        With Ulysses it sends each device one head at least; blocks on a grid are gathered over cp.
        """
        layout = self.sizes.config.layout
        if self.sizes.has_blocks:
            return self.keys * layout.cp
        return max(self.kv_heads, layout.ulysses) * self.head

    @property
    def made_kv(self) -> int:
        """Bytes of the keys and values of a device's tokens."""
        return 2 * self.part.of_keys(self.sizes.rows) * self.keys * self.sizes.itemsize

    @property
    def taken_kv(self) -> int:
        """Bytes of what attention takes for keys and values, of a ring a device's own block."""
        tokens = self.part.of_keys(self.sizes.rows)
        return tokens * self.part.exchanged(self) * self.sizes.itemsize

    @property
    def visited_kv(self) -> int:
        """Bytes of the keys and values of as many tokens, with which a device attends."""
        return 2 * self.part.of_keys(self.sizes.rows) * self.sent_keys * self.sizes.itemsize

    @property
    def made_keys(self) -> int:
        """Elements of a token's keys that all devices compute together, with padding."""
        head = self.sizes.padded(self.part.head_size) if self.gathers_kv else self.head
        return self.counts.keys * head

    @property
    def _attended(self) -> tuple[int, int]:
        """Heads of keys and values that all devices share, if any, and H."""
        return self.part.attended(self.sizes.config.layout.absorbs_latents)

    @property
    def _cuts_output(self) -> bool:
        """True if the layer cuts attention's output before the matmul that takes it."""
        return self.part.cuts_output and not self.sizes.config.layout.absorbs_latents

    @property
    def _sharing(self) -> int:
        """Devices that share the heads."""
        return 1 if self.sizes.has_blocks else self.sizes.inner_devices

    # ---- saved for backward
    # ------------------------------------------------------------------------

    def kernel_kept(self, output: int) -> Iterator[Kept]:
        """A kernel's output and logsumexp, and the biases by distance.

        On a grid `dots` saves the output twice: as computed, and with heads in one dimension. With
        Ulysses, layers that save all do: with all tokens of its heads, and all heads of its tokens.
        """
        sizes, layout = self.sizes, self.sizes.config.layout
        again = layout.ulysses > 1 and not self._cuts_output
        twice: dict[Remat, int] = {"none": 1 + again, "dots": 1 + layout.has_grid}
        yield Kept("attention's output", output, twice)
        logsumexp = sizes.rows * self.heads * sizes.master_itemsize
        yield Kept("logsumexp", logsumexp, by("none", "dots"))
        if self.part.sinks and layout.ulysses > 1:
            yield Kept("sinks of its heads", self.attended * sizes.master_itemsize, by("none"))
        yield from self.part.bias_kept(self)

    def rows_kept(self, output: int) -> Iterator[Kept]:
        """Adds the probabilities of whole rows, computed without a kernel."""
        sizes, blocks = self.sizes, self.sizes.has_blocks
        narrow, wide, rows = sizes.itemsize, sizes.master_itemsize, sizes.rows * self.heads
        scores = rows * self.part.key_tokens // (sizes.config.layout.col if blocks else 1)
        taken = {} if self._cuts_output else by("none")
        yield Kept("attention's output", output, by("attention", "dots") | taken)
        yield Kept("probabilities, before and after dropout", scores * (wide + narrow), by("none"))
        yield Kept("sums and maxima of their rows", rows * (2 * wide + blocks), by("none"))


class AttentionBytes(PairBytes):
    """Bytes of a pair of matmuls with attention between them."""

    def backward(self, remat: Remat) -> int:
        """Bytes of tensors between the backward passes of both matmuls.

        Whole scores are freed when matmuls turn them into the gradients of q, k and v; a second
        gather of x comes only later.
        """
        alive = self.forward + self.second + self.weight + self.moving + self.core
        later = self.taken if self.gathers and (self.again or remat == "dots") else 0
        return alive + (0 if self.has_scores else self.first) - later

    @property
    def output(self) -> int:
        return self.second

    @property
    def in_8_bits(self) -> int:
        return self.saved_input

    def makes_second_again(self, remat: Remat) -> bool:
        return remat in ("attention", "full")

    def free(self, remat: Remat, *, grid: bool) -> Iterator[int]:
        """Nothing: backward reads q, k and v."""
        yield from ()
