"""Our steps of `benchmarks/gpu.py`, in a process of their own.

`python -m benchmarks.gpu_jaxptd --case 124m --steps 20` prints one JSON object: seconds of each
step, losses, bytes.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.gpu_cases import CASES, Case
from benchmarks.measure import random_batch
from jaxptd.errors import Parser, UserError, run_command
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

WARM_UP = 3


def run(case: Case, steps: int) -> dict[str, Any]:
    """Trains on one batch, again and again.

    Raises:
        UserError: JAX finds no GPU.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UserError("JAX finds no GPU; pip install 'jax[cuda13]'")
    program = Program(case.config, make_mesh(case.config.layout))
    state, batch = program.init_state(), program.place(random_batch(case.config))
    seconds, losses = [], []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(program.train_step(state, batch))
        seconds.append(time.perf_counter() - start)
        losses.append(float(metrics["loss"]))
    memory = device.memory_stats() or {}
    return {
        "seconds": seconds[WARM_UP:],
        "compiling": seconds[0],
        "losses": losses,
        "peak_bytes": memory.get("peak_bytes_in_use", 0),
        "device": device.device_kind,
        "versions": {"jax": jax.__version__},
        "attention": program.attention_kernel[0],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Times steps of a model on this machine's first GPU."""
    parser = Parser(prog="python -m benchmarks.gpu_jaxptd", description=main.__doc__)
    parser.add_argument("--case", choices=tuple(CASES), required=True)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(argv)
    print(json.dumps(run(CASES[options.case], options.steps)))
    return 0


if __name__ == "__main__":
    run_command(main)
