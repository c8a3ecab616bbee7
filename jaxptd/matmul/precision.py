"""The precision of a program's products."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

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
