"""Planning and predicting measured steps do not import jax, which would double start-up time."""

import subprocess
import sys

CODE = """
import contextlib, io, pathlib, sys
import jaxptd.plan
import jaxptd.commands.validate
from jaxptd.hardware import find_accelerator
from jaxptd.planner.rows import read_rows

with contextlib.redirect_stdout(io.StringIO()):  # as a person runs it
    jaxptd.plan.main(["--config", "llama3-70b", "--gpus", "64", "--gpu", "h200", "--layout.tp=8"])

read_rows(pathlib.Path("benchmarks/published/megatron_table1.csv"))[0].predict(find_accelerator("a100"))
print(sorted({"jax", "jaxlib", "flax", "optax", "orbax", "matplotlib"} & set(sys.modules)))
"""


def test_a_prediction_needs_no_jax() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
