"""Costs of a ring's exchange by kind: bytes sent, bytes saved, and bytes held in backward.

The rows of `context_parallel.py` name these classes. Letters: b sequences of a micro-batch on one
device, S tokens of the keys, K heads of keys and values, H head size.
Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889; Llama Team, arXiv
2407.21783, section 3.3.2 (gathered).
"""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from jaxptd.costs.collective import ALL_GATHER, PERMUTE, REDUCE_SCATTER, Collective
from jaxptd.costs.kept import Kept
from jaxptd.layout import Axis, Layout
from jaxptd.parts.attention import HeadSizes
from jaxptd.parts.scenario import Recomputed, Scenario


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Costs of exchanging blocks of keys and values around one ring.

    Attributes:
        rings: how many: one for both keys and values, or one each.
    """

    own: HeadSizes
    rings: ClassVar[int] = 1

    def axes(self, layout: Layout) -> tuple[Axis, ...]:
        """The axes of the ring."""
        return (Axis.CP, Axis.ROW) if layout.ring_size > layout.cp else (Axis.CP,)

    def block(self, step: Scenario) -> int:
        """Elements that a device exchanges in attention: keys and values, or latent vectors."""
        tokens = step.sizes.tokens * step.config.layout.cp // step.config.layout.ring_size
        return self.own.part.of_keys(tokens) * self.own.part.exchanged(self.own)

    def passes_again(self, again: Recomputed) -> int:
        """Forward passes of its rings that backward repeats."""
        return int(again.kernel)

    def sent(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """The blocks that travel.

        Each has b*S*K*H/(cp*tp) elements, or b*S*K*H/(cp*row*col). Ulysses splits heads instead of
        tokens, which changes no block, except of latent vectors, which all heads share.
        """
        layout, sizes, rings = step.config.layout, step.sizes, self.rings
        axes, row = self.axes(layout), layout.ring_size // layout.cp
        block, hops = self.block(step) // rings, self.own.part.hops(layout)
        both_passes = times * hops * (2 * rings + self.passes_again(again))
        yield Collective(PERMUTE, axes, both_passes, both_passes * block * sizes.itemsize)
        # The last hop of gradients leads back to their owner: over cp alone where its row is the
        # same.
        back = axes if hops % row else (Axis.CP,)
        for over, number in ((axes, hops - 1), (back, 1)):
            once = times * rings * number if hops else 0
            yield Collective(PERMUTE, over, once, once * block * sizes.master_itemsize)

    def at_once(self, layout: Layout) -> int:
        """Devices whose keys and values a device has at the same time."""
        return 1

    def kept(self, output: int) -> Iterator[Kept]:
        """Tensors saved for backward; output: bytes of attention's output."""
        return self.own.kernel_kept(output)

    def in_backward(self, queries: int, kv: int) -> int:
        """Bytes of float32 gradient sums: per hop, those of k and v that arrive and leave.

        Args:
            queries: bytes of a device's queries.
            kv: bytes of a device's keys and values, or of what it exchanges instead.
        """
        sizes = self.own.sizes
        sums = queries + kv * (2 if sizes.config.layout.ring_size > 2 else 1)
        return sums * sizes.master_itemsize // sizes.itemsize + kv


class WholeRows(Blocks):
    """Costs of RSA: separate rings for keys and values, and whole rows of scores."""

    rings: ClassVar[int] = 2

    def passes_again(self, again: Recomputed) -> int:
        return again.scores + again.values

    def kept(self, output: int) -> Iterator[Kept]:
        return self.own.rows_kept(output)

    def in_backward(self, queries: int, kv: int) -> int:
        """Adds the scores, in both precisions."""
        own, sizes = self.own, self.own.sizes
        rows = sizes.rows * own.heads * own.part.key_tokens
        both = sizes.itemsize + sizes.master_itemsize
        return super().in_backward(queries, kv) + rows * both


class Gathered(Blocks):
    """Costs of gathering all keys and values, in each forward pass and again in backward."""

    def sent(self, step: Scenario, again: Recomputed, times: int) -> Iterator[Collective]:
        """Whole keys and values, and their gradients: 2*b*S*K*H/tp elements, or 2*b*S*K*H/col."""
        sizes, axes = step.sizes, self.axes(step.config.layout)
        whole = self.block(step) * step.config.layout.ring_size
        passes = times * (2 + self.passes_again(again))
        yield Collective(ALL_GATHER, axes, passes, passes * whole * sizes.itemsize)
        yield Collective(REDUCE_SCATTER, axes, times, times * whole * sizes.master_itemsize)

    def at_once(self, layout: Layout) -> int:
        return layout.ring_size

    def in_backward(self, queries: int, kv: int) -> int:
        """Bytes of whole keys and values, of their gradient sums, and of the queries'."""
        sizes = self.own.sizes
        whole = kv * sizes.config.layout.ring_size
        return whole + (queries + whole) * sizes.master_itemsize // sizes.itemsize
