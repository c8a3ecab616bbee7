"""Seconds of attention between its projections, of a micro-batch on one device.

Letters: T queries and S keys of a device, H head size.
"""

import dataclasses
from typing import TYPE_CHECKING

from jaxptd.costs import kernels
from jaxptd.costs.program import Work
from jaxptd.costs.terms import Term

if TYPE_CHECKING:  # which imports this file
    from jaxptd.parts.attention import AttentionShape

# Bytes per score of unfused attention. The causal softmax reads the visible half and writes zeros
# to the rest (Megatron-LM's scaled_upper_triang_masked_softmax); dropout reads and writes all, and
# its mask.
SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 3, 4
SCORE_DROPOUT = 5


@dataclasses.dataclass(frozen=True)
class AttentionWork:
    """Attention of a micro-batch: a fused kernel, or scores that pass through memory."""

    part: "AttentionShape"
    work: Work

    @property
    def is_fused(self) -> bool:
        """True if a kernel computes it; fused kernels support no bias by distance."""
        return self.work.implementation.attention == "flash" and not self.part.buckets

    @property
    def forward(self) -> list[Term]:
        if self.is_fused:
            return self._flash(backward=False)
        heads, T, S = self._scores
        a, H = self.work.accelerator, self._head_size
        return [
            _named(kernels.product(a, T, S, H, batch=heads), "scores forward"),
            self._softmax(SOFTMAX_FORWARD, "softmax forward"),
            _named(kernels.product(a, T, H, S, batch=heads), "context forward"),
        ]

    @property
    def backward(self) -> list[Term]:
        if self.is_fused:
            return self._flash(backward=True)
        heads, T, S = self._scores
        a, H = self.work.accelerator, self._head_size
        of_scores = _named(kernels.product(a, T, S, H, batch=heads), "scores backward")
        of_heads = _named(kernels.product(a, T, H, S, batch=heads), "context backward")
        softmax = self._softmax(SOFTMAX_BACKWARD, "softmax backward")
        return [of_scores, of_heads, of_heads, of_heads, softmax]

    @property
    def visible(self) -> float:
        """Share of the busiest device's scores that are not masked, the layers' mean."""
        reaches = self.part.reaches
        return sum(self._visible(reach) for reach in reaches) / len(reaches)

    def _visible(self, reach: int) -> float:
        """`visible` where a token sees at most `reach` tokens: itself and earlier ones.

        In a ring of contiguous parts the last device sees nearly all.
        """
        keys = self.part.key_tokens
        if not self.part.causal:
            return min(1.0, reach / keys)
        parallelism = self.work.parallelism
        ring = parallelism.cp * parallelism.row
        if not self.work.implementation.balanced and ring > 1 and reach == keys:
            return 1 - 1 / (2 * ring)
        return reach / keys * (1 - reach / (2 * keys))

    @property
    def _head_size(self) -> int:
        """H."""
        return self.part.attended(self.work.parallelism.absorbed)[1]

    @property
    def _scores(self) -> tuple[int, int, int]:
        """A device's heads times sequences, its queries, and its keys."""
        part, parallelism = self.part, self.work.parallelism
        inner = parallelism.inner * parallelism.ulysses
        heads = parallelism.micro_batch * part.heads // inner
        return max(1, heads), part.tokens // (parallelism.cp * parallelism.row), part.key_tokens

    def _flash(self, *, backward: bool) -> list[Term]:
        heads, T, S = self._scores
        H = self._head_size
        flops = 4.0 * heads * T * S * H * self.visible
        term = kernels.flash(self.work.accelerator, flops, H, backward=backward)
        return [term.named("attention backward" if backward else "attention forward")]

    def _softmax(self, each: int, name: str) -> Term:
        heads, T, S = self._scores
        dropout = self.work.implementation.dropout
        size = (each + SCORE_DROPOUT * dropout) * heads * T * S
        return _named(kernels.moved(self.work.accelerator, size, 1 + dropout), name)


def _named(term: Term, name: str) -> Term:
    return term.named(name, "attention")
