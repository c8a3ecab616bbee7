"""1D tensor parallelism: matrices sharded one way, over tp.

`TensorParallel1D` has a collective before the first and after the second matmul of a pair:
`copy_to` and `reduce_from`, or, with sequence parallelism, `all_gather` and `reduce_scatter`. In
`CollectiveMatmul1D` (also sequence parallelism) gather and scatter run in steps inside the matmuls.
`tensor_parallel.py` has each method's purpose, and the letters.

Source: Shoeybi et al., arXiv 1909.08053; Korthikanti et al., arXiv 2205.05198.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd.attention.attend import AttentionInputs, attend
from jaxptd.attention.kernel import Kernel, Scores
from jaxptd.collectives import alike, all_gather, as_varying, reduce_from, reduce_scatter
from jaxptd.layers.tensor_parallel import (
    NATIVE,
    ExpertSums,
    Factors,
    Matmul,
    MatmulPrecision,
    PackedWeight,
    TensorParallel,
    block_along,
    both_gradients,
    joined_products,
    local_rows,
    matmul,
    separated,
)
from jaxptd.matmul.padding import rounded_up
from jaxptd.matmul.precision import BlockMatmul, block_matmul
from jaxptd.matmul.ring import gather_product, product_scatter, visited_sums
from jaxptd.mesh import Axis
from jaxptd.remat import SAVED_MATMUL_IN


@dataclasses.dataclass(frozen=True)
class Base1D(TensorParallel):
    """Everything but the two matmuls of a pair.

    Args:
        size: number of devices along tp.
        gather_input: x as the residual stream has it -> x with all tokens, for a first matmul.
        reduce_output: partial sums of a second matmul -> x as the residual stream has it.
        samples_are_sharded: whether devices along ep have different samples, as in training.
    """

    size: int
    gather_input: Callable[[Array, str], Array]
    reduce_output: Callable[[Array, str], Array]
    samples_are_sharded: bool = True

    @property
    def inner_devices(self) -> int:
        return self.size

    def padded(self, size: int, each: int = 1) -> int:
        return rounded_up(size, self.size)

    def square(self, x: Array, w: Array) -> Array:
        """Every device has all of w and multiplies its own tokens."""
        return matmul(x, w, 1)

    def logits(self, x: Array, w: Array) -> Array:
        x, w = both_gradients(x, w.astype(x.dtype))  # the matmul's gradient is rounded to it
        return matmul(self.gather_input(x, Axis.TP), w, 1)

    def lookup(self, tokens_BT: Array, table: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T], table[V/tp, D] -> x: each device adds the rows it has."""
        return self.reduce_output(local_rows(table, tokens_BT, Axis.TP).astype(dtype), Axis.TP)

    def positions(self, position_T: Array, table: Array, dtype: DTypeLike) -> Array:
        return table[block_along(position_T, self.axes.tokens, -1)].astype(dtype)

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        inputs: AttentionInputs,
        *,
        kernel: Kernel,
        scores: Scores,
    ) -> Array:
        return attend(q, k, v, inputs, ring=self.ring, kernel=kernel, scores=scores)


@dataclasses.dataclass(frozen=True)
class TensorParallel1D(Base1D):
    """A collective before the first matmul of a pair and one after the second.

    Backward needs a first matmul's whole input, which layers save or gather a second time.

    Args:
        precision: multiplies a layer's matrices.
    """

    precision: MatmulPrecision = NATIVE

    def column_parallel(self, x: Array, weights: Sequence[PackedWeight]) -> list[Array]:
        """x[B, T, D], each w[D, F/tp] -> h[B, T, F/tp]."""
        multiply, parts = self.precision.matmul, [packed.parts for packed in weights]
        if not self.precision.apart:
            return joined_products(self._of_all_tokens(lambda x, w: multiply(x, w, 1)), x, weights)
        products: Any = partial(_products, multiply=multiply, parts=parts)
        if any(parts):
            # Backward splits a w of several matrices again, or a scan would save copies. All
            # matmuls share one checkpoint, or x would be saved for each.
            policy = jax.checkpoint_policies.nothing_saveable
            products = jax.checkpoint(products, policy=policy, prevent_cse=False)
        found = self._of_all_tokens(products)(x, [packed.w for packed in weights])
        pairs = zip(found, weights, strict=True)
        return [h for products, packed in pairs for h in packed.with_biases(products)]

    def _of_all_tokens(self, multiply: Callable[[Array, Any], Any]) -> Callable[[Array, Any], Any]:
        """Makes `multiply(x, w)` gather x's tokens first."""
        return lambda x, w: multiply(
            checkpoint_name(self.gather_input(x, Axis.TP), SAVED_MATMUL_IN), w
        )

    def row_parallel(
        self, h: Array, w: Array, shard_dim: int, beside: Factors | None = None
    ) -> Array:
        """h[B, T, F/tp], w[F/tp, D] -> x[B, T, D]: partial sums of D, added over tp."""
        y = self.precision.matmul(h, w, w.ndim - 1)
        return self.reduce_output(y if beside is None else y + matmul(*beside, 1), Axis.TP)

    def visit_experts(
        self, sums: ExpertSums, x: Array, weight: Array, expert: Array, w: Any
    ) -> Array:
        """Gathers over tp and then over ep, and scatters the sums in the other order, so that tp
        moves the tokens of one device only.

        Backward has x, weights and choices of own tokens, and gathers them again.
        """
        scatter = partial(reduce_scatter, dim=0) if self.samples_are_sharded else reduce_from
        y = sums((self._at_experts(x), self._at_experts(weight)), self._at_experts(expert), w)
        return self.reduce_output(scatter(y, Axis.EP), Axis.TP)

    def _at_experts(self, x: Array) -> Array:
        """x[B, T, ..] as the residual stream has it -> x[ep B, T, ..]."""
        x = self.gather_input(x, Axis.TP)
        return all_gather(x, Axis.EP, 0) if self.samples_are_sharded else as_varying(x, [Axis.EP])


@final
@dataclasses.dataclass(frozen=True)
class GatheringAgain1D(TensorParallel1D):
    """Sequence parallelism whose layers save their device's x; backward gathers all of it again.

    The gradient of a first matmul's matrix needs all of x.

    Args:
        scanned: whether it runs in the body of a scan, where XLA cannot undo the second gather.
    """

    scanned: bool = False

    def _of_all_tokens(self, multiply: Callable[[Array, Any], Any]) -> Callable[[Array, Any], Any]:
        again = partial(jax.checkpoint, prevent_cse=not self.scanned)
        return again(lambda x, w: multiply(self.gather_input(x, Axis.TP), w))


def _products(
    x: Array, arrays: Sequence[Array], *, multiply: Matmul, parts: Sequence[bool]
) -> list[list[Array]]:
    """x times each matrix of each w; parts: whether each w has several matrices."""
    found = []
    for w, several in zip(arrays, parts, strict=True):
        # The whole w is typed as x, so that its gradient is one sum over devices.
        each_x, each_w = alike(x, w) if several else (x, w)
        matrices = separated(each_w, 1) if several else [each_w]
        found.append([multiply(each_x, matrix, 1) for matrix in matrices])
    return found


@final
@dataclasses.dataclass(frozen=True)
class CollectiveMatmul1D(Base1D):
    """Sequence parallelism whose gathers and scatters run in steps around a ring.

    Args:
        block_matmul: multiplies two blocks.
    """

    block_matmul: BlockMatmul = block_matmul

    def column_parallel(self, x: Array, weights: Sequence[PackedWeight]) -> list[Array]:
        """x[B, T/tp, D], each w[D, F/tp] -> h[B, T, F/tp]."""
        return joined_products(
            lambda x, w: gather_product(x, w, Axis.TP, self.block_matmul), x, weights
        )

    def row_parallel(
        self, h: Array, w: Array, shard_dim: int, beside: Factors | None = None
    ) -> Array:
        """h[B, T, F/tp], w[F/tp, D] -> x[B, T/tp, D]; factors beside them share the rounds."""
        return product_scatter(h, w, Axis.TP, self.block_matmul, beside)

    def visit_experts(
        self, sums: ExpertSums, x: Array, weight: Array, expert: Array, w: Any
    ) -> Array:
        """Tokens pass around the ring of all devices along ep and tp."""
        return visited_sums(sums, (x, weight), expert, w, (Axis.EP, Axis.TP))
