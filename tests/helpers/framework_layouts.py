"""Layouts of every framework that together print every name that can appear in its config."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

from jaxptd.commands.command_line import load_config
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.planner.frameworks.framework import Framework, Setup, Workload
from jaxptd.planner.frameworks.planning import FRAMEWORKS
from jaxptd.planner.frameworks.search import setups

FOLDER = Path(__file__).parents[1] / "planner" / "frameworks"
ALONE = [  # a plan ignores the config's layout, which has to fit the batch all the same
    *("--layout.dp=1", "--layout.tp=1", "--layout.pp=1", "--layout.ep=1", "--layout.zero=0"),
    *("--layout.sequence_parallel=false", "--layout.collective_matmul=false"),
    *("--layout.schedule=1f1b", "--train.micro_batches=1"),
]
ROPE = [
    *("--model.rope.scaling=llama3", "--model.rope.factor=8"),
    "--model.rope.original_length=8192",
]
QWEN2_MOE = [
    *("--model.family=qwen2_moe", "--model.moe.shared_ffn_hidden_size=4096"),
    "--model.moe.normalize=false",
]
DOTS1 = [
    *("--model.family=dots1", "--model.moe.first_dense=1"),
    *("--model.moe.num_experts=8", "--model.moe.num_groups=4", "--model.moe.top_groups=2"),
    *("--model.moe.bias_rate=1e-3", "--model.moe.z_loss=1e-3", "--model.moe.balance_loss=1e-4"),
]
# Config, its overrides, GPUs. Layouts with experts are printed before the cost model covers them.
MODELS = (
    ("llama3-8b", [], 16),
    ("llama3-8b", ["--model.num_layers=30", "--optimizer.decay=wsd"], 16),
    ("llama3-8b", ["--optimizer.decay=constant"], 8),
    ("llama3-8b", ROPE, 8),
    ("llama3-8b", ["--model.family=mistral", "--model.window=4096"], 8),
    ("qwen3-0.6b", ["--model.family=qwen2"], 8),
    ("qwen3-0.6b", [], 8),
    ("gpt2-1.5b", ["--model.activation=gelu"], 8),
    ("mixtral-8x7b", [], 32),
    ("mixtral-8x7b", QWEN2_MOE, 32),
    ("mixtral-8x7b", DOTS1, 32),
    ("qwen3-30b-a3b", [], 16),
)
EACH = 29  # take every 29th layout


def workload(config: str, overrides: list[str], gpus: int, gpu: str = "h100") -> Workload:
    """A model and its devices."""
    made = load_config(config, [*ALONE, *overrides])
    return Workload(made, Cluster(find_accelerator(gpu)), gpus)


def takes(framework: Framework, load: Workload) -> bool:
    """True if a framework trains such a model."""
    try:
        framework.check(load)
    except UserError:
        return False
    return True


def some_of(name: str) -> Iterator[tuple[Workload, Setup]]:
    """Layouts of each model that a framework supports, whether they fit in memory or not."""
    framework = FRAMEWORKS[name]
    for config, overrides, gpus in MODELS:
        load = workload(config, overrides, gpus)
        if takes(framework, load):
            every = (setup for family in setups(framework, load) for setup in family)
            yield from ((load, setup) for n, setup in enumerate(every) if n % EACH == 0)


def read(name: str, text: str) -> dict:
    """The settings of a framework's config, by name; those in sections as `section.name`."""
    if name == "megatron":
        words = text.replace("\\\n", " ").split("pretrain_gpt.py")[1]
        found = re.findall(r"(--[a-z0-9-]+)((?: (?!--)\S+)*)", words)
        return {flag: value.strip() or True for flag, value in found}
    if name == "maxtext":
        return yaml.safe_load(text)
    return dict(_flat(tomllib.loads(text) if name == "torchtitan" else json.loads(text)))


def _flat(values: dict, before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        yield before + key, value
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key}.")
