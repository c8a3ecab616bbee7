"""XLA's options: those of a command line, and a set that compiles for CPUs in less time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxptd.analysis.compiled_step import CPU_OPTIONS, UNOPTIMISED
from jaxptd.errors import UserError

QUICK: dict[str, Any] = CPU_OPTIONS | UNOPTIMISED
# For GPUs that are absent: code that is not optimised, of which memory is read. Temporaries are
# those of the same program, as buffers are assigned before.
QUICK_ON_GPUS: dict[str, Any] = UNOPTIMISED | {"xla_gpu_disable_gpuasm_optimizations": True}
# Nor does XLA try configurations of a product, to find one that works, or make machine code: our
# `ptxas` writes none. Small products in float32 have no configuration by default, and then XLA
# refuses.
UNTRIED = QUICK_ON_GPUS | {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_cuda_data_dir": str(Path(__file__).with_name("cuda")),
}


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """Parses `name=value` words into XLA's options.

    Raises:
        UserError: a word is not of that form.
    """
    for word in words:
        if "=" not in word:
            raise UserError(f"--compiler {word}: write it as name=value")
    return dict(word.split("=", 1) for word in words)
