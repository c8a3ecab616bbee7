"""The precision of a program's matmuls."""

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
    """Wraps `run` so that its matmuls in float32 are exact.

    By default GPUs round each operand to TF32, with a 10-bit mantissa.

    Args:
        run: the function to trace.
        dtype: the type that it computes in; `run` is returned as is for types below float32.
        mesh: the mesh on which it runs.
    """
    if not on_gpus(mesh) or dtype not in ("float32", "float64"):
        return run

    @wraps(run)
    def exactly(*args: Any, **kwargs: Any) -> R:
        with jax.default_matmul_precision("highest"):
            return run(*args, **kwargs)

    return exactly


# ---- the matmul of two blocks on one device ------------------------------------------------------

Dims = tuple[tuple[int, ...], tuple[int, ...]]  # contracted dims of a and of b
ROWS_BY_COLUMNS: Dims = ((1,), (0,))  # A B
ROWS_BY_ROWS: Dims = ((1,), (1,))  # A B^T
COLUMNS_BY_COLUMNS: Dims = ((0,), (0,))  # A^T B


class BlockMatmul(Protocol):
    """A way to multiply two blocks."""

    def __call__(
        self, a: Array, b: Array, dims: Dims, dtype: DTypeLike, *, gradient: int | None = None
    ) -> Array:
        """Contracts a with b: a's other dims, then b's.

        Args:
            a: a block.
            b: another.
            dims: the dims to contract.
            dtype: of the result; accumulation is in float32 or wider.
            gradient: which operand is the gradient of a result: 0 (a), 1 (b) or None, as in
                forward.
        """


def block_matmul(
    a: Array, b: Array, dims: Dims, dtype: DTypeLike, *, gradient: int | None = None
) -> Array:
    """Multiplies in the blocks' precision; hardware accumulates in float32 or wider."""
    return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=dtype)
