"""The precision of a program's products."""

import contextlib
from typing import Any

import jax
from jax.sharding import Mesh

from jaxptd.mesh import on_gpus


def exact_products(dtype: str, mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    """A context in which products of float32 are traced as such.

    GPUs would by default round each factor to TF32, which has ten bits after the first.

    Args:
        dtype: that the program computes in; coarser ones have products of their own.
        mesh: on which it runs.
    """
    if on_gpus(mesh) and dtype in ("float32", "float64"):
        return jax.default_matmul_precision("highest")
    return contextlib.nullcontext()
