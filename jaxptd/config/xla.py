"""XLA's flags for a whole process, by layout; those of a step: `step/program.py`."""

from jaxptd.layout import Layout

# Flags for simulated devices. XLA ends the process at once for a flag that it does not know; the
# jaxlib of every version of jax in pyproject.toml knows these.
# On a slow or busy machine, simulated devices reach a collective at very different times: by
# default XLA warns after 20 s and ends the process after 40.
PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    " --xla_cpu_collective_timeout_seconds=1200"
)
# XLA's CPU runtime orders collectives by when they start, and all permutes share one rendezvous. A
# loop with a multithreaded kernel counts as done once started: then a permute that does not wait
# for the loop, such as one of a weight matrix, runs between the loop's permutes, at different
# points on different devices, and the process hangs or aborts. So XLA must not split its kernels
# over threads, and runs matmuls itself; sums stay with its library, which adds in a more accurate
# order. Large matmuls and sums are still split: no flag turns that off.
KERNELS_UNSPLIT = (
    "--xla_disable_hlo_passes=cpu-parallel-task-assigner"
    " --xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE"
)
# With XLA's scheduler for concurrency, jaxlib 0.10 runs independent permutes at the same time (the
# two rings of `layout.ring: rsa`, those of a grid, blocks and sums of `layout.collective_matmul`),
# and the process hangs or aborts.
# Without that scheduler rings need less memory; unrolled layers without a ring need more.
ONE_PERMUTE_AT_A_TIME = "--xla_cpu_enable_concurrency_optimized_scheduler=false"

# The share of a GPU's memory that JAX takes for a run (its default is 75 %); the rest is for
# fragmentation and for other users of memory.
GPU_MEMORY = 0.92


def process_flags(layout: Layout) -> tuple[str, ...]:
    """Chooses flags for `XLA_FLAGS`, which XLA reads once, when the first device is started."""
    in_order = (KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME) if permutes(layout) else ()
    return PATIENCE, *in_order


def permutes(layout: Layout) -> bool:
    """True where rings or a pipeline may run; on every grid, to keep the rule short."""
    return layout.pp * layout.cp * layout.row * layout.col > 1 or layout.collective_matmul
