"""The planner is imported, and predicts a step, without jax."""

import subprocess
import sys

CODE = """
import sys
import jaxptd.planner.__main__
import jaxptd.planner.validate
import jaxptd.run.metrics
from jaxptd.hardware import find_accelerator
from jaxptd.planner.published.rows import table_1

table_1()[0].predict(find_accelerator("a100"))
print(sorted({"jax", "jaxlib", "flax", "optax", "orbax", "matplotlib"} & set(sys.modules)))
"""


def test_a_prediction_needs_no_jax() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
