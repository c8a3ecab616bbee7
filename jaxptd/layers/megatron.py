"""1D tensor parallelism: matrices sharded one way, over tp.

In `Megatron1D` a collective stands before the first and after the second product of a pair:
`copy_to` and `reduce_from`, or, with sequence parallelism, `all_gather` and `reduce_scatter`. In
`RingSteps1D` (sequence parallelism, too) gather and scatter run in steps inside the products.
For each method's purpose, and the letters, see `form.py`.

Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

import dataclasses
from collections.abc import Callable
from typing import final

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd import ring_attention
from jaxptd.attention.kernel import TAKEN, Kernel, Scores
from jaxptd.attention.ring import Tokens
from jaxptd.layers.axes import local_rows
from jaxptd.layers.form import Product, TensorParallel, product
from jaxptd.matmul.dot import Dot, dot
from jaxptd.matmul.padding import rounded_up
from jaxptd.matmul.ring import gather_product, product_scatter
from jaxptd.mesh import Axis

Enter = Callable[[Array, str], Array]
First = Callable[[Array, Array, Enter, Product], Array]  # as `keeping`


def keeping(x: Array, w: Array, enter: Enter, dot: Product) -> Array:
    """First product of a pair, x[B, T, D], w[D, F/tp] -> h[B, T, F/tp]; backward keeps all of x."""
    return dot(checkpoint_name(enter(x, Axis.TP), TAKEN), w, 1)


def gathering_again(*, scanned: bool) -> First:
    """`keeping` for sequence parallelism that keeps this device's x, which backward gathers again.

    The gradient of the weight needs all of x.

    scanned: in the body of a scan, where XLA cannot undo the second gather.
    """

    def first(x: Array, w: Array, enter: Enter, dot: Product) -> Array:
        return dot(enter(x, Axis.TP), w, 1)

    return jax.checkpoint(first, static_argnums=(2, 3), prevent_cse=not scanned)


@dataclasses.dataclass(frozen=True)
class TensorParallel1D(TensorParallel):
    """Everything but the two products of a pair.

    Args:
        size: number of devices along tp.
        enter: x as the residual stream has it -> x with all tokens, for a first product.
        leave: partial sums of a second product -> x as the residual stream has it.
    """

    size: int
    enter: Enter
    leave: Callable[[Array, str], Array]

    @property
    def inner_devices(self) -> int:
        return self.size

    def padded(self, size: int, each: int = 1) -> int:
        return rounded_up(size, self.size)

    def square(self, x: Array, w: Array) -> Array:
        """Every device has all of w: it multiplies the tokens that it has."""
        return product(x, w, 1)

    def logits(self, x: Array, w: Array) -> Array:
        return product(self.enter(x, Axis.TP), w, 1)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T], table[V/tp, D] -> x: each device adds the rows it has."""
        return self.leave(local_rows(table, tokens_BT, Axis.TP).astype(dtype), Axis.TP)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        return table[self.axes.local_tokens(position_T)].astype(dtype)

    def attend(
        self, q: Array, k: Array, v: Array, tokens: Tokens, *, kernel: Kernel, scores: Scores
    ) -> Array:
        return ring_attention.attend(q, k, v, tokens, ring=self.ring, kernel=kernel, scores=scores)


@final
@dataclasses.dataclass(frozen=True)
class Megatron1D(TensorParallel1D):
    """A collective before the first product of a pair and one after the second.

    Args:
        dot: the local product of a layer's matrix.
        first: the first product of a pair, with `enter` and `dot`.
    """

    dot: Product = product
    first: First = keeping

    def column_parallel(self, x: Array, w: Array) -> Array:
        """x[B, T, D], w[D, F/tp] -> h[B, T, F/tp]."""
        return self.first(x, w, self.enter, self.dot)

    def row_parallel(self, h: Array, w: Array, shard_dim: int) -> Array:
        """h[B, T, F/tp], w[F/tp, D] -> x[B, T, D]: partial sums of D, added over tp."""
        return self.leave(self.dot(h, w, w.ndim - 1), Axis.TP)


@final
@dataclasses.dataclass(frozen=True)
class RingSteps1D(TensorParallel1D):
    """Sequence parallelism whose gathers and scatters run in steps around a ring.

    Args:
        dot: the product of two blocks.
    """

    dot: Dot = dot

    def column_parallel(self, x: Array, w: Array) -> Array:
        """x[B, T/tp, D], w[D, F/tp] -> h[B, T, F/tp]."""
        return gather_product(x, w, Axis.TP, self.dot)

    def row_parallel(self, h: Array, w: Array, shard_dim: int) -> Array:
        """h[B, T, F/tp], w[F/tp, D] -> x[B, T/tp, D]."""
        return product_scatter(h, w, Axis.TP, self.dot)
