"""XLA's options for a training step; an evaluation is compiled with the defaults."""

from typing import Any

from jax.sharding import Mesh

from jaxptd.config import Config
from jaxptd.mesh import on_gpus


def compiler_options(config: Config, mesh: Mesh) -> dict[str, Any] | None:
    """Chooses XLA's options on GPUs; None elsewhere.

    Two collectives at a time, where XLA would by default finish one before it starts the next:
    backward of a ring sends keys and values, and also their gradients' sums; products on a grid
    send along row and along col. For fp8, cuBLASLt's 8-bit products: XLA would prefer its Triton
    kernels.
    """
    if not on_gpus(mesh):
        return None
    layout, options = config.layout, dict[str, Any]()
    if layout.ring_size > 2 or layout.has_grid:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    if config.model.products == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False
    return options or None
