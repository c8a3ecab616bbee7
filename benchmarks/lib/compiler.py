"""XLA's options: those of a command line, and a set that compiles for CPUs in less time."""

from collections.abc import Sequence
from typing import Any

from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.errors import UserError

# Slow code, compiled in half the time; memory is the same, as buffers are assigned before.
QUICK: dict[str, Any] = CPU_OPTIONS | {"xla_backend_optimization_level": 0}
QUICK |= {"xla_llvm_disable_expensive_passes": True}


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """Parses `name=value` words into XLA's options.

    Raises:
        UserError: a word is not of that form.
    """
    for word in words:
        if "=" not in word:
            raise UserError(f"--compiler {word}: write it as name=value")
    return dict(word.split("=", 1) for word in words)
