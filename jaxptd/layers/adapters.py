"""Low-rank adapters of a layer's matrices.

Beside a first matmul, x A is one more matrix of the matmul's gathered x, and each device multiplies
it with its columns of B. Beside a second one, each device's part of the sum is h W + scale (h A) B,
with its rows of W and of A. So adapters send nothing but the gradients of what is not sharded.
Letters: B batch, T position, R rank.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.collectives import alike
from jaxptd.layers.tensor_parallel import PackedWeight, matmul, separated
from jaxptd.params import normal, param, zeros
from jaxptd.parts.adapters import Adapter
from jaxptd.remat import SAVED_MATMUL_OUT
from jaxptd.shapes import ParamShape


class LowRank(nnx.Module):
    """The matrices of an adapter, `a[*rows, *parts, R]` and `b[R, *parts, *columns]`.

    Args:
        adapter: its description.
        shapes: of its parameters, by name.
        rows: number of a's dims that are rows.
        key: random key of a's initial values; b begins with zeros.

    Source: Hu et al., LoRA, arXiv 2106.09685.
    """

    a: nnx.Param
    b: nnx.Param

    def __init__(
        self, adapter: Adapter, shapes: Mapping[str, ParamShape], *, rows: int, key: Array
    ) -> None:
        self.scale, self.rows = adapter.scale, rows
        self.parts = len(shapes["a"].shape) - rows - 1
        size = math.prod(shapes["a"].shape[:rows])
        self.a = param(key, shapes["a"], normal((3 * size) ** -0.5))  # PEFT's deviation
        self.b = param(key, shapes["b"], zeros)

    @property
    def first(self) -> PackedWeight:
        """A, as one more weight that multiplies x."""
        return PackedWeight(self.a[...], parts=bool(self.parts))

    def of_each(self, products: Sequence[Array], low: Sequence[Array]) -> list[Array]:
        """Adds scale (x A) B to the product of each separate matrix.

        Args:
            products: h of each.
            low: x A of each.
        """
        added = _products([each * self.scale for each in low], self.b[...], several=self.parts > 0)
        return [h + each for h, each in zip(products, added, strict=True)]

    def of_all(self, h: Array, low: Sequence[Array]) -> Array:
        """Adds scale (x A) B to h, which has a dim for separate matrices, if there are any.

        low: x A of each.
        """
        if not self.parts:
            return self.of_each([h], low)[0]
        dim = low[0].ndim - 1
        return jnp.stack(self.of_each(separated(h, dim), low), dim)

    def beside(self, h: Array) -> tuple[Array, Array]:
        """h[B, T, *rows] -> (scale h A, B): this device's factors of what is added to h W."""
        low = checkpoint_name(matmul(h, self.a[...], self.rows), SAVED_MATMUL_OUT)
        return low * self.scale, self.b[...]


def _products(low: Sequence[Array], b: Array, *, several: bool) -> list[Array]:
    """Each x A times its matrix of B. Backward splits B again, or a scan would save copies."""
    if not several:
        return [matmul(low[0], b, 1)]

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)
    def of_parts(low: Sequence[Array], b: Array) -> list[Array]:
        matrices = separated(alike(low[0], b)[1], 1)
        return [matmul(*both, 1) for both in zip(low, matrices, strict=True)]

    return of_parts(low, b)
