"""What benchmarks on a GPU share: the device, and answers of processes of their own."""

import json
import subprocess
import sys
from typing import Any

import jax

from jaxptd.errors import UserError


def first_gpu() -> Any:
    """The first device, a GPU.

    Raises:
        UserError: JAX finds no GPU.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UserError("JAX finds no GPU; pip install 'jax[cuda13]'")
    return device


def answer(module: str, *arguments: str) -> dict[str, Any]:
    """Runs `python -m module` -> the JSON of its last line; {"error": words} if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        return {"error": lines[-1].removeprefix("error: ")[:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])
