"""A module that predicts one token further: its description and costs.

The layer is `layers/mtp.py`.

Letters: T tokens of a sequence, D model, V vocabulary, M micro-batches.
Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

import dataclasses
from collections.abc import Iterator

from jaxptd.costs import kernels
from jaxptd.costs.collective import Collective
from jaxptd.costs.program import Work
from jaxptd.costs.terms import Term
from jaxptd.parts.architecture import Stack
from jaxptd.parts.ends import Embedding, End, EndBytes, Head, Norm
from jaxptd.parts.grid import product
from jaxptd.parts.parameters import LayoutSharding, Named, Sharding, inside, joined
from jaxptd.parts.scenario import RECOMPUTED, Scenario
from jaxptd.parts.sizes import Sizes, elements_on_device

HALVES = 2  # of what its first matmul reads: the embedding of a token, and the stream before it
NORMS = 3  # besides those of its layer: of both halves, and the head's


@dataclasses.dataclass(frozen=True)
class Module(End):
    """A layer behind the last one, with norms and a matmul before it, and the head's matmul.

    Head and table of tokens are the model's. A pipeline runs the module with the head, on the last
    stage, forward and backward in one operation, so that nothing of it waits and nothing is sent.

    Args:
        layer: a stack of the one layer; its name is the prefix of all parameters' names.
        vocab: V.
    """

    layer: Stack
    vocab: int

    @property
    def hidden(self) -> int:
        """D."""
        return self.layer.hidden

    @property
    def norm(self) -> Norm:
        """Each of its norms: of the stream, of embeddings, and the last."""
        return self.layer.norm

    @property
    def head(self) -> Head:
        """The output layer with the module's last norm."""
        return Head(self.hidden, self.vocab, statistics=self.layer.statistics)

    @property
    def table(self) -> Embedding:
        """The look-up of tokens."""
        return Embedding(self.hidden, self.vocab, (self.layer.tokens,))

    def multiplications(self, tokens: int) -> int:
        return tokens * HALVES * self.hidden**2 + self.head.multiplications(tokens)

    @property
    def layers(self) -> tuple[Stack, ...]:
        return (self.layer,)

    # ---- parameters ----------------------------------------------------------------------------

    def parameters(self, sharding: Sharding, vocab: int) -> Named:
        return inside(self.layer.name, self._parameters(sharding))

    def _parameters(self, sharding: Sharding) -> Named:
        yield from self.layer.of_a_layer(sharding)
        yield from inside("stream_norm", self.norm.parameters(sharding))
        yield from inside("embedding_norm", self.norm.parameters(sharding))
        yield from inside("join", joined(sharding, self.hidden))
        yield from inside("norm", self.norm.parameters(sharding))

    def end_bytes(self, sizes: Sizes) -> EndBytes:
        """Logits are held beside those of the other heads until all losses are known.

        The table has two more gradients, of its head and of its look-up.
        """
        layout = sizes.config.layout
        infos = dict(self.parameters(LayoutSharding(layout), sizes.vocab)).values()
        elements = sum(elements_on_device(info, layout) for info in infos)
        head = self.head.end_bytes(sizes)
        return EndBytes(
            parameters=elements * sizes.master_itemsize,
            gradient=2 * head.gradient,
            logits=head.logits,
        )

    # ---- bytes sent ----------------------------------------------------------------------------

    def collectives(self, step: Scenario) -> Iterator[Collective]:
        """Collectives of the look-up, both matmuls before the layer, the layer, and the head."""
        step, M = dataclasses.replace(step, plan=None), step.micro_batches
        step, hidden = step.with_tokens(self.layer.tokens), step.sizes.hidden
        yield from self.table.collectives(step)
        if step.config.layout.has_grid:
            forwards, both = 1 + self._is_recomputed(step), HALVES * M
            yield from product(step, hidden, hidden, forwards=forwards, times=both)
            yield from self.norm.on_grid(step, forward=forwards * both, backward=both)
        yield from self.layer.collectives(step)
        yield from self.layer.along_cp(step)
        yield from self.head.collectives(step)

    # ---- seconds -------------------------------------------------------------------------------

    def terms(self, work: Work) -> list[Term]:
        """The look-up, both matmuls before the layer, its norms, and the head with its loss.

        The layer's own terms are those of a stack, `layers`.
        """
        parallelism, a = work.parallelism, work.accelerator
        sharded = parallelism.tp if parallelism.sequence_parallel else 1
        T, D, N = work.tokens // sharded, self.hidden, self.hidden // parallelism.col
        ((remat, _),) = parallelism.remats(1)
        sizes = {"forward": (T, N, D), "dx": (T, D, N), "dw": (D, N, T)}
        if RECOMPUTED[remat].products:
            sizes["forward again"] = sizes["forward"]
        joins = [
            kernels.product(a, *size).times(HALVES).named(f"join of a module {name}")
            for name, size in sizes.items()
        ]
        norm = self.norm.moved_forward(work.implementation)
        norm += self.norm.moved_backward(work.implementation)
        elements = parallelism.stream(self.layer.tokens, D)
        norms = kernels.moved(a, NORMS * norm * elements, 2 * NORMS).named("norms of a module")
        return [*self.table.terms(work), *joins, norms, *self.head.terms(work)]

    # ---- recomputation -------------------------------------------------------------------------

    def _is_recomputed(self, step: Scenario) -> bool:
        """True if backward computes again what the layer takes."""
        ((remat, _),) = step.config.model.remats(1)
        return RECOMPUTED[remat].products
