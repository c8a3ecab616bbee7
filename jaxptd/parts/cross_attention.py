"""Attention to another sequence: its description, and its costs beyond attention's.

Letters: T tokens of the queries, S of the source, D model, N heads, K heads of keys and values, H
head size.
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from jaxptd.context_parallel import Imported
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.costs.kept import Kept, by
from jaxptd.costs.program import Work
from jaxptd.layout import Axis, Layout
from jaxptd.parts.attention import AttentionShape, HeadSizes
from jaxptd.parts.ends import Norm
from jaxptd.parts.grid import product
from jaxptd.parts.parameters import Named, Sharding, inside
from jaxptd.parts.part import Product
from jaxptd.parts.scenario import Recomputed, Scenario
from jaxptd.parts.sizes import Sizes

# Rounds of a first matmul alone with collective matmul: forward, backward, and another gather of x
# for the gradient of the weights.
SOURCE_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class CrossAttentionShape(AttentionShape):
    """Attention with keys and values from another sequence.

    Args:
        source: S.
        source_statistics: those of that sequence's norm, as in `Norm`; 0 without a norm.
    """

    source: int = dataclasses.field(kw_only=True)
    source_statistics: int = 0

    layer = Imported("jaxptd.layers.attention", "CrossAttention")
    name: ClassVar[str] = "cross"
    title: ClassVar[str] = "cross-attention"
    first_title: ClassVar[str] = "q product"

    @property
    def key_tokens(self) -> int:
        return self.source

    @property
    def source_norm(self) -> Norm:
        """The norm of the source."""
        return Norm(self.hidden, self.source_statistics)

    @property
    def joined(self) -> bool:
        """False: queries come from other tokens."""
        return False

    def first(self, sizes: Sizes) -> int:
        """Columns of the queries' projection."""
        return self.second(sizes)

    def tokens_of(self, name: str, tokens: int) -> int:
        return self.of_keys(tokens) if name.startswith("kv.") else tokens

    def common_parameters(self, sharding: Sharding, stack: str) -> Named:
        """Adds the norm of the source."""
        yield from super().common_parameters(sharding, stack)
        yield from inside("source_norm", self.source_norm.parameters(sharding))

    # ---- bytes saved for backward --------------------------------------------------------------

    def kept_of_source(self, sizes: Sizes) -> Iterator[Kept]:
        """The source, normalised in each layer.

        No layer changes it, so without remat a loop over all layers normalises it once.
        """
        if not self.source_statistics:
            return
        source, again = sizes.with_tokens(self.source), by("none") if sizes.traces_layers else {}
        size = self.source_norm.kept(source)
        yield Kept("the source", source.stream, by("attention", "dots", "full") | again)
        yield Kept("statistics of the source's norm", size, by("attention", "dots") | again)
        yield Kept("input of the k, v product", source.taken, by("attention") | again)

    # ---- bytes sent ----------------------------------------------------------------------------

    def on_tp(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Adds the source, as it enters the projection of its keys and values.

        A loop whose layers save everything gathers it once for all layers.
        """
        yield from super().on_tp(step, again, times)
        layout, source = step.config.layout, step.with_tokens(self.source).sizes
        size = source.activations
        if layout.collective_matmul:
            hops = times * (SOURCE_ROUNDS + again.products) * (layout.tp - 1)
            yield Collective(PERMUTE, (Axis.TP,), hops, hops * size // layout.tp)
        elif layout.sequence_parallel:
            forward = step.micro_batches if _runs_once(step, again) else times
            gathers = forward + times * again.inputs
            yield Collective(ALL_GATHER, (Axis.TP,), gathers, gathers * size)
            yield Collective(REDUCE_SCATTER, (Axis.TP,), times, times * size)
        else:
            yield Collective(ALL_REDUCE, (Axis.TP,), times, times * size)

    def on_grid(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Adds the projection of keys and values, and the norm of the source."""
        source, forwards = step.with_tokens(self.source), 1 + again.products
        out = 2 * HeadSizes(self, step.sizes).made_keys
        yield from super().on_grid(step, again, times)
        yield from product(source, step.sizes.hidden, out, forwards=forwards, times=times)
        forward = step.micro_batches if _runs_once(step, again) else forwards * times
        yield from self.source_norm.on_grid(source, forward=forward, backward=times)

    def hops(self, layout: Layout) -> int:
        """Hops to all other devices."""
        return layout.ring_size - 1

    # ---- seconds -------------------------------------------------------------------------------

    def _first_products(self, work: Work, devices: int) -> Iterator[Product]:
        yield Product("q of another sequence", work.tokens, self.hidden, self.inner // devices)
        columns, tokens = 2 * self.key_columns, self.of_keys(work.tokens)
        yield Product("k, v of another sequence", tokens, self.hidden, columns // devices)


def _runs_once(step: Scenario, again: Recomputed) -> bool:
    """True if one loop over all layers does the work on the source that they share only once."""
    in_loop = step.config.model.scan_layers and not step.sizes.traces_layers
    return in_loop and again.nothing
