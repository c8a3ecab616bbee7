"""The precision of a program's products."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

import jax
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxptd.mesh import on_gpus

R = TypeVar("R")


def exact_products(run: Callable[..., R], dtype: str, mesh: Mesh) -> Callable[..., R]:
    """`run`, with products of float32 traced as such.

    GPUs would by default round each factor to TF32, which has ten bits after the first.

    Args:
        run: computes with products.
        dtype: that it computes in; coarser ones have products of their own.
        mesh: on which it runs.
    """
    if not on_gpus(mesh) or dtype not in ("float32", "float64"):
        return run

    @wraps(run)
    def exactly(*args: Any, **kwargs: Any) -> R:
        with jax.default_matmul_precision("highest"):
            return run(*args, **kwargs)

    return exactly


# ---- the product of two blocks on one device -----------------------------------------------------

Dims = tuple[tuple[int, ...], tuple[int, ...]]  # of a and of b, that are contracted
ROWS_BY_COLUMNS: Dims = ((1,), (0,))  # A B
ROWS_BY_ROWS: Dims = ((1,), (1,))  # A B^T
COLUMNS_BY_COLUMNS: Dims = ((0,), (0,))  # A^T B


class BlockMatmul(Protocol):
    """A way to multiply two blocks."""

    def __call__(
        self, a: Array, b: Array, dims: Dims, dtype: DTypeLike, *, gradient: int | None = None
    ) -> Array:
        """The other dims of a, then those of b; a result in `dtype`.

        Args:
            a: a block.
            b: another.
            dims: that are contracted.
            dtype: of the result; sums are in float32 at least.
            gradient: the operand that is the gradient of a result: 0, a, or 1, b; None: neither is,
                as in forward.
        """


def block_matmul(
    a: Array, b: Array, dims: Dims, dtype: DTypeLike, *, gradient: int | None = None
) -> Array:
    """A product in the precision of the blocks; hardware sums in float32 at least."""
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=dtype)
