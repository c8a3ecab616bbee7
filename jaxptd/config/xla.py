"""XLA's flags for a whole process, by layout; those of a step: `step/program.py`."""

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


def process_flags(layout: Layout) -> tuple[str, ...]:
    """Chooses flags for `XLA_FLAGS`, which XLA reads once, when the first device is started."""
    in_order = (KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME) if permutes(layout) else ()
    return PATIENCE, *in_order


def permutes(layout: Layout) -> bool:
    """True where rings or a pipeline may run; on every grid, to keep the rule short."""
    return layout.pp * layout.cp * layout.row * layout.col > 1 or layout.collective_matmul
