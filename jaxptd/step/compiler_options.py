"""XLA's options beyond its defaults for a training step, chosen by layout, ZeRO and precision."""

from typing import Any

from jaxptd.config import Config
from jaxptd.config.xla import GPU_MEMORY, permutes
from jaxptd.zero.plan import layers_plan

_SCHEDULED = 0.80  # of a GPU's memory: on so much of it XLA's scheduler counts, times an option


def compiler_options(config: Config, *, on_gpus: bool) -> dict[str, Any] | None:
    """Chooses options for compiling a training step on GPUs; None elsewhere.

    The scheduler may count on all memory that a run takes: where it believes a step to be larger
    than the memory, it lets no collective overlap with work. Two collectives at a time, where XLA
    would by default finish one before it starts the next: backward of a ring sends keys and values,
    and also their gradients' sums; products on a grid send along row and along col; a loop over
    layers gathers a layer and reduce-scatters the gradients of another. For fp8, cuBLASLt's 8-bit
    products: XLA would prefer its Triton kernels.

    XLA joins products of one operand, and splits the result by copies; those of queries, keys and
    values, whose biases they can add as they write, stay apart. So do the steps of a product whose
    blocks arrive one after another.

    A loop over layers writes each slice of what it keeps for backward, and of its gradients. XLA
    fills them with zeros before unless it is told to look whether anything would read those. With
    moments on the host it then needs more memory, so there it may fill them.

    XLA copies slices into and out of a loop's stacks beside other kernels, unless its pass for that
    is off; where a loop has its blocks it then starts a trip's message too late to be hidden.

    A trip of a loop that fetches layers copies the next one's parameters, and its own gradients, to
    where the next trip reads them. Of two trips in one only the second does.

    A permute joins the devices that it connects, and not by default all of them, which by XLA's own
    account makes one inside a node ten to twenty times slower. XLA asks that a group of devices is
    part of one division of all devices only, and may hang otherwise: so it is with rings along axes
    and with the hops of pipelines, but not when Cannon's algorithm moves blocks to their start.
    """
    if not on_gpus:
        return None
    layout, plan = config.layout, layers_plan(config)
    options: dict[str, Any] = {
        "xla_gpu_memory_limit_slop_factor": round(100 * GPU_MEMORY / _SCHEDULED),
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": not layout.hosts_moments,
    }
    moves = plan.prefetches or plan.reduce == "last_microbatch"
    if layout.ring_size > 2 or layout.has_grid or moves:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    if plan.gather == "first_microbatch":
        options["xla_disable_hlo_passes"] = "dynamic-slice-copy-fusion-async-wrapper"
    if plan.joins_trips:
        options["xla_gpu_enable_while_loop_double_buffering"] = True
    if permutes(layout) and layout.matmul2d != "cannon":
        options["xla_gpu_collective_permute_connected_components"] = True
    if config.model.products == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False
    return options
