"""Multi-head latent attention: its description, and its costs where they are not attention's.

A device computes latent vectors of its tokens of the residual stream, with whole matrices, and from
them queries, keys and values of its heads. So latent vectors move over tp where x moves elsewhere,
and the keys that all heads share move beside them. With absorbed products attention takes both as
one head of keys and values. The layer is `layers/attention/latent.py`.

Letters: T tokens, D model, N heads, H head size of queries and keys, V that of values, R a latent
vector's elements.
"""

import dataclasses
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, ClassVar, Self

from jaxptd.config import ModelConfig
from jaxptd.context_parallel import Imported
from jaxptd.costs import kernels
from jaxptd.costs.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxptd.costs.kept import MOST, SOME, Kept, by
from jaxptd.costs.program import Implementation, Work
from jaxptd.costs.terms import Term
from jaxptd.layout import Axis
from jaxptd.parts.attention import AttentionBytes, AttentionShape, HeadSizes
from jaxptd.parts.cross_attention import SOURCE_ROUNDS
from jaxptd.parts.parameters import Column, Named, Row, Sharding, inside, latent_norm
from jaxptd.parts.part import BACKWARD, FORWARD, Product
from jaxptd.parts.projections import Projections
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes
from jaxptd.parts.working import PairBytes
from jaxptd.shapes import ParamShape


@dataclasses.dataclass(frozen=True)
class Compressed:
    """A latent vector of each token.

    Args:
        hidden: D.
        rank: R.
        beside: elements that the same matrix yields beside it.
    """

    hidden: int
    rank: int
    beside: int = 0

    @property
    def columns(self) -> int:
        """Columns of its matrix."""
        return self.rank + self.beside

    @property
    def weights(self) -> int:
        """Elements of its matrix."""
        return self.hidden * self.columns

    def matrix(self) -> Named:
        """`w[D, R + beside]`, whole on every device."""
        shape = (self.hidden, self.columns)
        yield "w", ParamShape(shape, shape, (None, None), decay=True, cast=True, matrix="rc")

    def parameters(self) -> Named:
        """The matrix, and the factors of the vector's norm."""
        yield from self.matrix()
        yield from inside("norm", latent_norm(self.rank))


@dataclasses.dataclass(frozen=True)
class LatentProjections(Projections):
    """The projections from latent vectors to heads, and the output projection.

    Args:
        q_rank: R of queries; 0: D.
        kv_rank: R of keys and values.
        nope_size: elements of a key that W_kv yields.
        value_size: V.
    """

    q_rank: int = dataclasses.field(kw_only=True)
    kv_rank: int = dataclasses.field(kw_only=True)
    nope_size: int = dataclasses.field(kw_only=True)
    value_size: int = dataclasses.field(kw_only=True)

    def first(self, sharding: Sharding) -> dict[str, Column]:
        """The projections `q_up` and `kv_up` of latent vectors; `q` of x if queries have none."""
        own: Any = {"bias": False, "padded": self._padded(sharding)[0]}
        keys_values = (self.heads, self.nope_size + self.value_size)
        name = "q_up" if self.q_rank else "q"
        queries = Column(self.q_rank or self.hidden, (self.heads, self.head_size), **own)
        kv_up = Column(self.kv_rank, keys_values, **own)  # no adapter: it is absorbed
        return {name: self.adapted(name, queries), "kv_up": kv_up}

    def out(self, sharding: Sharding) -> Row:
        """The output projection, of values without padding."""
        shape, padded = (self.heads, self.value_size), self._padded(sharding)[0]
        return self.adapted("out", Row(shape, self.hidden, bias=False, padded=padded))


@dataclasses.dataclass(frozen=True)
class LatentAttentionShape(AttentionShape):
    """Attention with heads computed from latent vectors.

    Args:
        q_rank: R of queries; 0 without: they are computed from x.
        kv_rank: R of keys and values.
        nope_size: elements of a head of queries and keys that are not rotated.
        rope_size: the others, which keys of all heads share.
        value_size: V.
    """

    q_rank: int = dataclasses.field(kw_only=True)
    kv_rank: int = dataclasses.field(kw_only=True)
    nope_size: int = dataclasses.field(kw_only=True)
    rope_size: int = dataclasses.field(kw_only=True)
    value_size: int = dataclasses.field(kw_only=True)

    layer = Imported("jaxptd.layers.attention", "LatentAttention")
    first_title: ClassVar[str] = "product that makes latent vectors"

    @classmethod
    def of(cls, model: ModelConfig, layers: slice = slice(None), **others: Any) -> Self:
        """The attention of these layers of a model; others: fields to override."""
        assert model.latent is not None
        return super().of(model, layers, **dataclasses.asdict(model.latent) | others)

    # ---- sizes ---------------------------------------------------------------------------------

    @property
    def compressed(self) -> dict[str, Compressed]:
        """The latent vectors by the names of what computes them."""
        vectors = {"kv_latent": Compressed(self.hidden, self.kv_rank, self.rope_size)}
        if self.q_rank:
            vectors["q_latent"] = Compressed(self.hidden, self.q_rank)
        return vectors

    @property
    def vector(self) -> int:
        """Elements of a latent vector of keys and values, and of the key that all heads share."""
        return self.kv_rank + self.rope_size

    def attended(self, absorbed: bool) -> tuple[int, int]:
        """With absorbed products one head of latent vectors."""
        return (1, self.vector) if absorbed else super().attended(absorbed)

    def exchanged(self, own: HeadSizes) -> int:
        """A latent vector, and the keys' part that all heads share; with Ulysses for all heads.

        RSA passes them around a ring as keys, and another as values.
        """
        layout = own.sizes.config.layout
        if layout.attends_latents:
            return self.vector * layout.ulysses * own.exchange.rings
        return super().exchanged(own)

    def _taken_kv(self, own: HeadSizes) -> int:
        """Bytes of what attention takes for keys and values."""
        rings = own.exchange.rings if own.sizes.config.layout.absorbs_latents else 1
        return own.taken_kv // rings

    @property
    def compressing_weights(self) -> int:
        """Elements of the matrices that every device has whole."""
        return sum(each.weights for each in self.compressed.values())

    @property
    def columns(self) -> int:
        return self.heads * (self.head_size + self.nope_size + self.value_size)

    @property
    def first_weights(self) -> int:
        sources = (self.q_rank or self.hidden) * self.head_size
        sources += self.kv_rank * (self.nope_size + self.value_size)
        return self.heads * sources

    @property
    def weights(self) -> int:
        return self.compressing_weights + self.first_weights + self.hidden * self.inner

    def held(self, shards: int, expert_shards: int) -> float:
        """Adds the matrices that every device has whole."""
        split = (self.weights - self.compressing_weights) / shards
        return split + self.compressing_weights

    def multiplications(self, tokens: int) -> int:
        return tokens * self.weights

    @property
    def inner(self) -> int:
        return self.heads * self.value_size

    @property
    def score_flops(self) -> Fraction:
        """FLOPs of scores, and of their matmul with values, which the kernel computes padded."""
        size = self.head_size + self.value_size
        return Fraction(2 * self.heads * size * sum(self.reaches), len(self.reaches))

    @property
    def cuts_output(self) -> bool:
        """True where values are padded."""
        return self.value_size < self.head_size

    def first(self, sizes: Sizes) -> int:
        return self._of_heads(sizes, self.head_size + self.nope_size + self.value_size)

    def second(self, sizes: Sizes) -> int:
        return self._of_heads(sizes, self.value_size)

    def _of_heads(self, sizes: Sizes, size: int) -> int:
        """Elements of all heads of this size, with padding."""
        return HeadSizes(self, sizes).counts.queries * size

    # ---- parameters ----------------------------------------------------------------------------

    @property
    def projections(self) -> LatentProjections:
        """Its projections from latent vectors."""
        return LatentProjections(
            *(self.hidden, self.heads, self.heads, self.head_size),
            joined=False,
            sinks=self.sinks,
            q_rank=self.q_rank,
            kv_rank=self.kv_rank,
            nope_size=self.nope_size,
            value_size=self.value_size,
            lora=self.lora,
        )

    def parameters(self, sharding: Sharding) -> Named:
        """Adds the matrices and norms of latent vectors."""
        for name, each in self.compressed.items():
            yield from inside(name, each.parameters())
        yield from super().parameters(sharding)

    # ---- bytes saved for backward --------------------------------------------------------------

    def taken(self, sizes: Sizes) -> int:
        """Bytes of the layer's own tokens; if queries are computed from x, as elsewhere."""
        return sizes.stream if self.q_rank else sizes.taken

    def kept(self, sizes: Sizes) -> Iterator[Kept]:
        yield from self._latents_kept(sizes)
        yield from super().kept(sizes)

    def _latents_kept(self, sizes: Sizes) -> Iterator[Kept]:
        """Latent vectors before and after their norm; those after it as a first matmul's input."""
        rows, size = sizes.stream_rows, sizes.itemsize
        if not self.q_rank:  # two matmuls read x, one its own tokens and one all of them
            config = sizes.config
            # Whether x is a norm's output, and has a name of its own.
            normed = config.model.block.norm_order not in ("post", "output")
            again = by("attention") if normed and config.gathers_again else {}
            copies = SOME if sizes.copies_taken else again
            yield Kept("x beside its tokens on all devices", sizes.stream, copies)
        attended = sizes.config.layout.attends_latents
        for name, each in self.compressed.items():
            yield Kept("a latent vector before its norm", rows * each.rank * size, MOST)
            yield Kept("statistics of its norm", rows * sizes.master_itemsize, MOST)
            if attended and name == "kv_latent":
                continue  # no matmul before attention
            taken = sizes.with_tokens(sizes.length, each.rank).taken
            yield Kept("a latent vector", taken, SOME)

    def _queries_keys_values(self, own: HeadSizes, queries: int) -> Iterator[Kept]:
        """The projections' result and the keys of all heads, or what follows from them."""
        sizes, layout = own.sizes, own.sizes.config.layout
        of_all = self.vector if layout.attends_latents else self.rope_size
        of_all *= sizes.rows * sizes.itemsize
        yield Kept("q, k, v of latent vectors", self._made(own), by("attention", "dots"))
        yield Kept("what all heads share", of_all, by("attention", "dots"))
        taken = queries + self._taken_kv(own)
        yield Kept("q, k, v as attention takes them", taken, by("none"))
        if layout.absorbs_latents:
            yield Kept("queries for W_k", self._of_tokens(own, self.nope_size), by("none"))
        if layout.exchanges_latents and layout.ulysses > 1:
            size = sizes.itemsize if sizes.casts else sizes.master_itemsize
            columns = own.attended * (self.nope_size + self.value_size)
            yield Kept("k, v matrix of its heads", self.kv_rank * columns * size, by("none"))

    def _core_kept(self, own: HeadSizes, output: int) -> Iterator[Kept]:
        """Adds the output without the padding of values, as the output projection takes it."""
        yield from super()._core_kept(own, output)
        if own.sizes.config.layout.absorbs_latents:
            yield Kept("outputs of W_v", self._of_tokens(own, self.value_size), by("none"))
        elif self.cuts_output:
            taken = self._of_tokens(own, self.value_size)
            yield Kept("attention's output without padding", taken, by("none"))

    def _made(self, own: HeadSizes) -> int:
        """Bytes of what the first matmuls of heads yield: of queries alone, or of keys as well."""
        if own.sizes.config.layout.attends_latents:
            return self._of_tokens(own, self.head_size)
        return self._of_tokens(own, self.first(own.sizes) // own.counts.queries)

    def _of_tokens(self, own: HeadSizes, size: int) -> int:
        """Bytes of `size` elements for each token and head of a device."""
        return own.sizes.rows * own.heads * size * own.sizes.itemsize

    def pair_bytes(self, sizes: Sizes) -> PairBytes:
        """Bytes of attention, with latent vectors beside what the first matmuls yield."""
        own, size = HeadSizes(self, sizes), sizes.itemsize
        queries = sizes.tokens * size * own.inner // sizes.matrix_shards
        made = self._made(own)
        vectors = sum(each.columns for each in self.compressed.values())
        vectors *= (sizes.stream_rows + sizes.tokens) * size
        joined = queries + self._taken_kv(own)  # rotated, and values padded
        if sizes.config.layout.absorbs_latents:  # the kernel's output, and its gradient
            joined += 2 * (queries - self._of_tokens(own, self.value_size))
        core, scores = self._core_bytes(own, queries), not sizes.is_fused
        found = AttentionBytes.of(self, sizes, first=made + vectors, core=core + joined)
        largest = max(self.first_weights, self.hidden * self.inner) * size // sizes.matrix_shards
        return dataclasses.replace(found, weight=0 if sizes.casts else largest, has_scores=scores)

    def _core_bytes(self, own: HeadSizes, queries: int) -> int:
        """Adds what a visit expands: keys, values and their gradients, and those of the matrix."""
        found, sizes, layout = super()._core_bytes(own, queries), own.sizes, own.sizes.config.layout
        narrow, wide, matrix = sizes.itemsize, sizes.master_itemsize, 0
        if layout.exchanges_latents:
            matrix = self.kv_rank * own.attended * (self.nope_size + self.value_size)
        elif not layout.absorbs_latents:
            return found
        visited = own.visited_kv * (own.exchange.at_once(layout) if layout.ring_size > 1 else 1)
        return found + visited + visited * wide // narrow + matrix * wide

    # ---- bytes sent ----------------------------------------------------------------------------

    def on_tp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Latent vectors, and the keys of all heads, before the first matmuls; x behind the last.

        Without a latent vector of queries, x before their matmul.
        """
        sizes, layout = step.sizes, step.config.layout
        x, token = sizes.activations, sizes.tokens * sizes.itemsize
        taken: tuple[int, ...] = (token * self.kv_rank, token * self.q_rank or x)
        key, tp = token * self.rope_size, layout.tp
        if layout.attends_latents:  # in one array, which no matmul takes before attention
            taken, key = taken[1:], key + taken[0]
        ends = BACKWARD + FORWARD + again.last_product
        if layout.collective_matmul:
            splits = step.plan is not None and step.plan.schedule.splits
            rounds = SOURCE_ROUNDS + again.products
            hops, moved = len(taken) * rounds, rounds * sum(taken)
            hops, moved = hops + ends + splits, moved + (ends + splits) * x
            every = times * (tp - 1)
            yield Collective(PERMUTE, (Axis.TP,), every * hops, every * moved // tp)
        elif layout.sequence_parallel:
            gathers, whole = FORWARD + again.inputs, sum(taken)
            yield _tp(ALL_GATHER, times, (gathers * len(taken), gathers * whole), (BACKWARD, x))
            sums = FORWARD + again.last_product
            yield _tp(REDUCE_SCATTER, times, (len(taken), whole), (sums, sums * x))
        else:
            sums = FORWARD + again.last_product
            yield _tp(ALL_REDUCE, times, (len(taken) + 1, sum(taken) + key), (sums, sums * x))
        if layout.sequence_parallel:
            gathers = FORWARD + again.products
            yield _tp(ALL_GATHER, times, (gathers, gathers * key))
            yield _tp(REDUCE_SCATTER, times, (BACKWARD, key))

    def _exchanged_heads(
        self, step: Scenario, own: HeadSizes, again: Recomputed, times: int
    ) -> Iterator[Collective]:
        """All-to-alls of queries and outputs; latent vectors are gathered for the heads."""
        if not step.config.layout.attends_latents:
            yield from super()._exchanged_heads(step, own, again, times)
            return
        sizes, forwards = step.sizes, times * (2 - again.nothing)
        queries = sizes.rows * own.heads * own.head * sizes.itemsize
        moves, axes = 2 * (forwards + times), (Axis.ULYSSES,)
        yield Collective(ALL_TO_ALL, axes, moves, moves * queries)
        vectors = self._taken_kv(own)
        yield Collective(ALL_GATHER, axes, forwards, forwards * vectors)
        yield Collective(REDUCE_SCATTER, axes, times, times * vectors)

    # ---- seconds -------------------------------------------------------------------------------

    def _first_products(self, work: Work, devices: int) -> Iterator[Product]:
        rows = work.tokens // (work.parallelism.tp if work.parallelism.sequence_parallel else 1)
        for name, each in self.compressed.items():
            yield Product(name, rows, self.hidden, each.columns)
        heads = self.heads // devices
        source, key_value = self.q_rank or self.hidden, self.nope_size + self.value_size
        yield Product("q of heads", work.tokens, source, heads * self.head_size)
        if not (work.parallelism.latents or work.parallelism.absorbed):
            yield Product("k, v of heads", work.tokens, self.kv_rank, heads * key_value)

    def core_forward(self, work: Work) -> list[Term]:
        """Adds the keys and values that a device makes of the latent vectors that it visits.

        With absorbed products, the matmuls of queries and outputs instead.
        """
        more = *self._expansions(work, "forward"), *self._absorbed(work, "forward")
        return [*super().core_forward(work), *more]

    def core_backward(self, work: Work) -> list[Term]:
        """Adds the same again, and the gradients of vectors and matrix."""
        more = *self._expansions(work, "backward"), *self._absorbed(work, "backward")
        return [*super().core_backward(work), *more]

    def core_again(self, work: Work) -> list[Term]:
        return list(self._absorbed(work, "forward"))

    def _absorbed(self, work: Work, name: str) -> Iterator[Term]:
        """Each head's matmuls with its columns of W_k and W_v, and passes over their results."""
        parallelism, a = work.parallelism, work.accelerator
        if not parallelism.absorbed:
            return
        T, R, heads = work.tokens, self.kv_rank, self.heads // parallelism.inner
        backward = name == "backward"
        factors = {"queries by W_k": (self.nope_size, R), "outputs by W_v": (R, self.value_size)}
        for what, (K, N) in factors.items():
            for each in ((T, K, N), (K, N, T)) if backward else ((T, N, K),):
                term = kernels.product(a, *each, batch=heads)
                yield term.named(f"{what} {name}", "attention")
        # Queries joined of both parts, or their gradient and that of outputs cut and padded.
        moves = T * heads * self.vector * 4 * (1 + backward)
        passes = kernels.moved(a, moves, 1 + backward)
        yield passes.named(f"queries of latent vectors joined {name}", "attention")

    def _expansions(self, work: Work, name: str) -> Iterator[Term]:
        """Matmuls with the tokens of each device that it visits, and passes over their results."""
        parallelism, a = work.parallelism, work.accelerator
        if not parallelism.latents:
            return
        T, K = work.tokens * parallelism.ulysses, self.kv_rank
        heads = self.heads // (parallelism.inner * parallelism.ulysses)
        N, backward = heads * (self.nope_size + self.value_size), name == "backward"
        for each in ((T, N, K), (T, K, N), (K, N, T))[: 3 if backward else 1]:
            term = kernels.product(a, *each).times(parallelism.cp)
            yield term.named(f"k, v of latent vectors {name}", "attention")
        # Keys joined and values padded; in backward also their float32 gradients to 16 bits.
        moves = T * heads * 2 * self.head_size * (4 + 6 * backward)
        passes = kernels.moved(a, moves, 2 + backward).times(parallelism.cp)
        yield passes.named(f"k, v of latent vectors joined {name}", "attention")

    def moved_forward(self, implementation: Implementation) -> int:
        """Queries and keys joined of their parts, one rotated, and values padded and cut."""
        return 4 * self.heads * (3 * self.head_size + self.value_size)

    def moved_backward(self, implementation: Implementation) -> int:
        return self.moved_forward(implementation)


def _tp(kind: str, times: int, *moves: tuple[int, int]) -> Collective:
    """Collectives over tp, `times` of each of these (messages, bytes)."""
    messages, moved = (times * sum(each) for each in zip(*moves, strict=True))
    return Collective(kind, (Axis.TP,), messages, moved)


def attention_of(model: ModelConfig, layers: slice = slice(None)) -> AttentionShape:
    """The attention of these layers of a decoder."""
    return (LatentAttentionShape if model.latent else AttentionShape).of(model, layers)
