"""Formulas for traffic and memory are imported, and predict a step, without jax."""

import subprocess
import sys

CODE = """
import sys
import jaxptd.commands.command_line
from jaxptd.analysis import memory_model
from jaxptd.analysis.traffic import expected
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.layout import Layout
from jaxptd.models.stages import parameter_infos
from jaxptd.models.stages import make_plan
from jaxptd.zero.plan import StateShapes

model = ModelConfig(family="t5", vocab_size=13)
config = Config(model, Layout(pp=2, dp=2, tp=2, zero=2), train=TrainConfig(micro_batches=4))
infos, plan = parameter_infos(config), make_plan(config)
assert list(expected(config, infos, plan))
assert memory_model.state(config, StateShapes.of(config, infos))["gradients"]
assert memory_model.activations(config, plan)
print(sorted({"jax", "jaxlib", "flax", "optax", "orbax"} & set(sys.modules)))
"""


def test_formulas_need_no_jax() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
