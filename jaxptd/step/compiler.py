"""What XLA is asked for beyond its defaults, for a training step. An evaluation is short."""

from typing import Any

from jax.sharding import Mesh

from jaxptd.config import Config
from jaxptd.mesh import on_gpus


def compiler_options(config: Config, mesh: Mesh) -> dict[str, Any] | None:
    """Options of XLA for GPUs; None elsewhere.

    Two collectives at a time, where it would schedule one and wait for the second: backward of a
    ring sends keys and values and the sums they bring home; products on a grid send along row and
    along col. And for fp8 cuBLASLt's 8-bit products, which its own kernels would come before.
    """
    if not on_gpus(mesh):
        return None
    layout, options = config.layout, dict[str, Any]()
    if layout.ring_size > 2 or layout.has_grid:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    if config.model.products == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False
    return options or None
