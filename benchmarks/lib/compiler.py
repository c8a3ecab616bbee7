"""XLA's options: those of a command line, and a set that compiles for CPUs in less time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxptd.analysis.compiled_step import CPU_OPTIONS, UNOPTIMISED
from jaxptd.errors import UserError

QUICK: dict[str, Any] = CPU_OPTIONS | UNOPTIMISED
# For GPUs that are absent: memory, bytes and FLOPs are read of a program that is not run. They are
# settled before its code, so that LLVM need not optimise any, and a `ptxas` of ours makes none.
QUICK_ON_GPUS: dict[str, Any] = UNOPTIMISED | {
    "xla_gpu_cuda_data_dir": str(Path(__file__).with_name("cuda"))
}
# Nor does XLA compile a product with several configurations, to find one that works. Small products
# in float32 have none by default, and then it refuses.
UNTRIED = QUICK_ON_GPUS | {"xla_gpu_autotune_level": 0}


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """Parses `name=value` words into XLA's options.

    Raises:
        UserError: a word is not of that form.
    """
    for word in words:
        if "=" not in word:
            raise UserError(f"--compiler {word}: write it as name=value")
    return dict(word.split("=", 1) for word in words)
