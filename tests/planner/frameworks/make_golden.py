"""Writes the golden files: `python tests/planner/frameworks/make_golden.py`."""

import contextlib
import io
from pathlib import Path

from jaxptd import plan

GOLDEN = Path(__file__).parent / "golden"
CASES = {  # the second pins its axes, so that its output does not depend on the cost model
    "llama3-8b-8": ["--config", "llama3-8b", "--gpus", "8", "--gpu", "h100"],
    "llama3-70b-512": [
        *("--config", "llama3-70b", "--gpus", "512", "--gpu", "h100"),
        *("--train.global_batch_size", "512"),
    ],
}
PINS = {
    "megatron": ["--layout.tp", "4", "--layout.pp", "4", "--layout.cp", "1"],
    "torchtitan": ["--layout.tp", "8", "--layout.pp", "4", "--layout.cp", "1"],
    "maxtext": ["--layout.tp", "2", "--layout.pp", "1", "--layout.cp", "2"],
    "deepspeed": ["--layout.cp", "4"],
}
SUFFIXES = {"megatron": ".sh", "torchtitan": ".toml", "maxtext": ".yml", "deepspeed": ".json"}


def printed(case: str, framework: str) -> str:
    """The config that the command prints."""
    pins = PINS[framework] if case == "llama3-70b-512" else []
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        plan.main([*CASES[case], *pins, "--print", framework, "--quiet"])
    return out.getvalue()


def path_of(case: str, framework: str) -> Path:
    """The golden file."""
    return GOLDEN / f"{case}{SUFFIXES[framework]}"


if __name__ == "__main__":
    for framework in PINS:
        for case in CASES:
            path_of(case, framework).write_text(printed(case, framework))
