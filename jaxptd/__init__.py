"""jaxptd: transformers on many devices, every layout proved equal to one device.

    import jaxptd

    jaxptd.simulate(8)  # on a machine without GPUs
    config = jaxptd.load_config("test-tiny", ["--layout.dp=2", "--layout.tp=4"])
    run = jaxptd.train(config)  # a Run: run.state, run.metrics, run.sample("def "), ...
    jaxptd.verify(config)  # the layout computes what one device computes
    jaxptd.comms(config), jaxptd.memory(config)  # what a step moves, and what a device holds
    jaxptd.plan(config, gpus=64, gpu="h200")  # the fastest layouts, by prediction

Names exported here are stable; everything else may change between versions. A name's module is
imported on first use, so `import jaxptd` is fast and starts no device.

`train`, `verify`, `comms`, `memory`, `profile` and `generate` are modules that can also be called
like the function of that name.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from jaxptd import errors

if TYPE_CHECKING:
    from jaxptd import hf as hf
    from jaxptd import plot as plot
    from jaxptd.api import Run as Run
    from jaxptd.api import from_hf as from_hf
    from jaxptd.api import lm_eval_model as lm_eval_model
    from jaxptd.api import load as load
    from jaxptd.commands.command_line import load_config as load_config
    from jaxptd.comms import comms as comms
    from jaxptd.config import CheckpointConfig as CheckpointConfig
    from jaxptd.config import Config as Config
    from jaxptd.config import DataConfig as DataConfig
    from jaxptd.config import ModelConfig as ModelConfig
    from jaxptd.config import OptimizerConfig as OptimizerConfig
    from jaxptd.config import ProcessesConfig as ProcessesConfig
    from jaxptd.config import TrainConfig as TrainConfig
    from jaxptd.data import load_tokenizer as load_tokenizer
    from jaxptd.data import open_data as open_data
    from jaxptd.errors import UserError as UserError
    from jaxptd.generate import generate as generate
    from jaxptd.kernels.grouped import grouped_matmul as grouped_matmul
    from jaxptd.memory import memory as memory
    from jaxptd.mesh import Axis as Axis
    from jaxptd.mesh import Layout as Layout
    from jaxptd.mesh import describe_mesh as describe_mesh
    from jaxptd.mesh import make_mesh as make_mesh
    from jaxptd.mesh import rank_groups as rank_groups
    from jaxptd.models.families import register_family as register_family
    from jaxptd.models.gpt import GPT as GPT
    from jaxptd.parts.mlp import register_mlp as register_mlp
    from jaxptd.pipeline.schedules import SCHEDULES as SCHEDULES
    from jaxptd.pipeline.schedules import Schedule as Schedule
    from jaxptd.pipeline.schedules import make_schedule as make_schedule
    from jaxptd.plan import plan as plan
    from jaxptd.profile import profile as profile
    from jaxptd.run.devices import simulate as simulate
    from jaxptd.run.devices import use_devices as use_devices
    from jaxptd.step import Program as Program
    from jaxptd.train import train as train
    from jaxptd.verify import verify as verify

__version__ = "0.1.0.dev0"

_MODULES = ("comms", "generate", "hf", "memory", "plan", "plot", "profile", "train", "verify")
_HOMES = {
    "jaxptd.api": ("Run", "from_hf", "lm_eval_model", "load"),
    "jaxptd.config": (
        "CheckpointConfig",
        "Config",
        "DataConfig",
        "ModelConfig",
        "OptimizerConfig",
        "ProcessesConfig",
        "TrainConfig",
    ),
    "jaxptd.commands.command_line": ("load_config",),
    "jaxptd.data": ("load_tokenizer", "open_data"),
    "jaxptd.errors": ("UserError",),
    "jaxptd.kernels.grouped": ("grouped_matmul",),
    "jaxptd.layout": ("Layout",),
    "jaxptd.mesh": ("Axis", "describe_mesh", "make_mesh", "rank_groups"),
    "jaxptd.models.families": ("register_family",),
    "jaxptd.models.gpt": ("GPT",),
    "jaxptd.parts.mlp": ("register_mlp",),
    "jaxptd.pipeline.schedules": ("SCHEDULES", "Schedule", "make_schedule"),
    "jaxptd.run.devices": ("simulate", "use_devices"),
    "jaxptd.step": ("Program",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted((*_HOME, *_MODULES))]


if sys.argv[:1] == ["-m"]:  # Python looks for the module of, say, `python -m jaxptd.train`
    errors.say_errors_of_imports()


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _HOME:
        raise AttributeError(f"module 'jaxptd' has no attribute {name!r}")
    try:
        module = importlib.import_module(_HOME.get(name, f"jaxptd.{name}"))
    except ValueError as error:
        if not (line := errors.environment_error(error)):
            raise
        raise errors.UserError(line) from None
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
