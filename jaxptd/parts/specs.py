"""The mesh axes that shard matrices and activations, and the specs of parameters.

Letters: B batch, T position, D model, F hidden, N heads, H head size, V vocabulary.

| field          | dims that it shards                    | 1D         | grid  |
|----------------|----------------------------------------|------------|-------|
| `inner`        | F, N (or H), V: the output of a        | tp         | col   |
|                | column-parallel product                |            |       |
| `hidden`       | D of activations                       | none       | col   |
| `contraction`  | the dim of a weight that is summed     | as of the  | row   |
|                | over                                   | activation |       |
| `tokens`       | T of the residual stream, beyond cp    | none or tp | row   |
| `logit_tokens` | T of the logits, beyond cp             | none       | row   |
"""

import dataclasses
from typing import Self

from jaxptd.layout import Axis, Layout
from jaxptd.shapes import Spec


@dataclasses.dataclass(frozen=True)
class Specs:
    """Which mesh axis shards which dim of weights and activations.

    Args:
        inner: axis of the dim between the two matmuls of a pair, and of V.
        hidden: axis of D in activations; None: every device holds all of D.
        contraction: axis of a weight's contracted dim; None: the axis that shards the same dim of
            the activation.
        tokens: axes of T in the residual stream, beyond cp.
        logit_tokens: axes of T in the logits, beyond cp.
        experts: axes of the experts; with tp among them, each is whole on a device.
        head_dim: which of (N, H) is sharded: 0 leaves whole heads on each device, 1 a slice of
            every head.
    """

    inner: Axis
    hidden: Axis | None = None
    contraction: Axis | None = None
    tokens: tuple[Axis, ...] = ()
    logit_tokens: tuple[Axis, ...] = ()
    head_dim: int = 0
    experts: tuple[Axis, ...] = (Axis.EP,)

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """The axes of a layout: 1D over tp, or 2D on its grid."""
        if not layout.has_grid:
            tokens = (Axis.TP,) if layout.sequence_parallel else ()
            return cls(inner=Axis.TP, tokens=tokens, experts=layout.expert_axes)
        return cls(
            inner=Axis.COL,
            hidden=Axis.COL,
            contraction=Axis.ROW,
            tokens=(Axis.ROW,),
            logit_tokens=(Axis.ROW,),
            head_dim=0 if layout.attention2d == "heads" else 1,
        )

    def column_spec(self, out_dims: int, shard_dim: int) -> Spec:
        """Spec of `w[D, *out]` with dim `shard_dim` of `out` sharded."""
        return (self.contraction or self.hidden, *self.inner_spec(out_dims, shard_dim))

    def row_spec(self, in_dims: int, shard_dim: int) -> Spec:
        """Spec of `w[*in, D]` with dim `shard_dim` of `in` sharded."""
        axis = self.contraction or self.inner
        return (*_one_axis(axis, in_dims, shard_dim), self.hidden)

    def square_spec(self) -> Spec:
        """Spec of `w[D, D']` whose result is sharded like its argument."""
        return (self.contraction, self.hidden)

    def inner_spec(self, dims: int, shard_dim: int) -> Spec:
        """Spec of the bias of a column-parallel matmul, `b[*out]`."""
        return _one_axis(self.inner, dims, shard_dim)

    def hidden_spec(self) -> Spec:
        """Spec of a vector as wide as the residual stream, `b[D]`."""
        return (self.hidden,)

    def table_spec(self) -> Spec:
        """Spec of `table[V, D]`: its transpose is the weight of the column-parallel logits."""
        return (self.inner, self.contraction or self.hidden)

    def head_spec(self) -> Spec:
        """Spec of a vector as wide as a head, `w[H]`."""
        return (self.head_slices,)

    def by_head_spec(self) -> Spec:
        """Spec of a vector with one element per head, `b[N]`."""
        return (None if self.head_dim else self.inner,)

    def position_spec(self) -> Spec:
        """Spec of a table of positions, `table[T, D]`."""
        return (self.contraction, self.hidden)

    @property
    def head_axes(self) -> tuple[Axis, ...]:
        """The axes that shard the heads."""
        return () if self.head_dim else (self.inner,)

    @property
    def score_axes(self) -> tuple[Axis, ...]:
        """The axes that shard scores but neither heads nor queries: those of keys in blocks."""
        return (self.inner,) if self.head_dim else ()

    @property
    def head_slices(self) -> Axis | None:
        """The axis that shards H, if each device holds a slice of every head."""
        return self.inner if self.head_dim else None


def _one_axis(axis: Axis, dims: int, shard_dim: int) -> Spec:
    return tuple(axis if dim == shard_dim else None for dim in range(dims))
