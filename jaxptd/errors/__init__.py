"""Errors of a person's input, and how a command says them: one line, and an exit code."""

from jaxptd.errors.messages import (
    BAD_INPUT,
    BUG,
    INTERRUPTED,
    LOST,
    QUOTED,
    TERMINATED,
    ArgumentError,
    UserError,
    did_you_mean,
    install,
    nearest,
    quoted,
)
from jaxptd.errors.parser import Parser
from jaxptd.errors.running import (
    FULL,
    discard,
    of_environment,
    print_error,
    run_command,
    say_errors_of_imports,
)
from jaxptd.errors.small_files import read_small

__all__ = [
    "BAD_INPUT",
    "BUG",
    "FULL",
    "INTERRUPTED",
    "LOST",
    "QUOTED",
    "TERMINATED",
    "ArgumentError",
    "Parser",
    "UserError",
    "did_you_mean",
    "discard",
    "install",
    "nearest",
    "of_environment",
    "print_error",
    "quoted",
    "read_small",
    "run_command",
    "say_errors_of_imports",
]
