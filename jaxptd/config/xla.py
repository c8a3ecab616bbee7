"""XLA's options beyond its defaults, chosen by layout and precision."""

from typing import Any

from jaxptd.config.run import Config
from jaxptd.layout import Layout

# Flags for simulated devices. XLA ends the process at once for a flag that it does not know; the
# jaxlib of every version of jax in pyproject.toml knows these.
# On a slow or busy machine simulated devices reach a collective at very different times: by default
# XLA warns after 20 s and ends the process after 40.
PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    " --xla_cpu_collective_timeout_seconds=1200"
)
# XLA's runtime for CPUs keeps collectives in order by when they start, and all permutes meet at one
# place. A loop with a kernel that runs on several threads counts as done when it has started: then
# a permute that does not wait for the loop, such as of a matrix of weights, runs between those of
# its trips, on one device earlier than on another, and the process hangs or aborts. So XLA splits
# none of its kernels over threads and leaves products to itself; sums stay with its library, which
# adds in a more accurate order. Large products and sums are still split: no flag turns that off.
KERNELS_UNSPLIT = (
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner"
    " --xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"
)
# With XLA's scheduler for concurrency, jaxlib 0.10 runs independent permutes at the same time (the
# two rings of `layout.ring: rsa`, those of a grid, blocks and sums of `layout.collective_matmul`),
# and the process hangs or aborts.
# Without that scheduler rings need less memory; unrolled layers without a ring need more.
ONE_PERMUTE_AT_A_TIME = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

# The share of a GPU's memory that JAX takes for a run, of its own accord three quarters; what is
# left is for fragments, and for what is not JAX's.
GPU_MEMORY = 0.92
_SCHEDULED = 0.80  # of a GPU's memory: on so much of it XLA's scheduler counts, times an option


def process_flags(layout: Layout) -> tuple[str, ...]:
    """Chooses flags for `XLA_FLAGS`, which XLA reads once, when the first device is started."""
    in_order = (KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME) if _permutes(layout) else ()
    return PATIENCE, *in_order


def _permutes(layout: Layout) -> bool:
    """True where rings or a pipeline may run; on every grid, to keep the rule short."""
    return layout.pp * layout.cp * layout.row * layout.col > 1 or layout.collective_matmul


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
    layout = config.layout
    options: dict[str, Any] = {
        "xla_gpu_memory_limit_slop_factor": round(100 * GPU_MEMORY / _SCHEDULED),
        "xla_gpu_dot_merger_threshold_mb": 0,
        "xla_gpu_enable_dus_accumulator_zero_init_elimination": not layout.hosts_moments,
    }
    moves = config.prefetches or config.scatters_last
    if layout.ring_size > 2 or layout.has_grid or moves:
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = 2
    if config.holds_blocks:
        options["xla_disable_hlo_passes"] = "dynamic-slice-copy-fusion-async-wrapper"
    if config.joins_trips:
        options["xla_gpu_enable_while_loop_double_buffering"] = True
    if _permutes(layout) and layout.matmul2d != "cannon":
        options["xla_gpu_collective_permute_connected_components"] = True
    if config.model.products == "fp8":
        options["xla_gpu_enable_triton_gemm"] = False
    return options
