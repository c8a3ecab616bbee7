"""Numbers that papers publish, the model sizes of the 2D paper, and parameters counted here.

`published.csv` holds those of the paper on 2D tensor parallelism. Its authors measured them with
other software on up to eight RTX 4090; nothing there is ours. Source: Zhu and Dong, CAAI Trans.
Intelligent Systems 20(5), 2025, sections 3.2 to 3.6.
"""

import csv
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxptd.commands.command_line import load_config
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program

PATH = Path(__file__).parent / "published.csv"
Number = tuple[str, str, str]  # where it is, its row, its column
CONFIGS = {"0.54": "gpt2-0.54b", "1.2": "gpt2-1.2b", "2.5": "gpt2-2.5b", "4.2": "gpt2-4.2b"}


@functools.cache
def numbers() -> Mapping[Number, float]:
    """Every published number by (where, row, column)."""
    with PATH.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["where"], row["row"], row["column"]): float(row["value"]) for row in rows}


def communication(layout: str) -> float:
    """The share of communication in a GPT iteration, from 0 to 1."""
    where = {"TP": "figure 11", "TP2D": "figure 12"}[layout]
    return numbers()[where, "GPT", f"communication {layout}"] / 100


def iteration(model: str, layout: str) -> float:
    """Seconds of an iteration, if the paper's hours are for the iterations that it names."""
    hours = numbers()["table 4", model, f"time {layout}"]
    return 3600 * hours / numbers()["section 3.4", "all", "iterations"]


# ---- models -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PaperModel:
    """A model of the paper's table 4 and figure 10."""

    name: str
    family: str
    config: str  # the packaged one with 2.5 B parameters
    # Additional fields of `ModelConfig` for its small model in figure 10.
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


MODELS = (
    PaperModel("GPT", "gpt", "gpt2-2.5b"),
    PaperModel("BERT", "bert", "bert-2.5b"),
    PaperModel("T5", "t5", "t5-2.5b", {"encoder_decoder.seq_length": 32}),
)


def chosen(names: Sequence[str] | None) -> list[PaperModel]:
    """The models with these names; all models if there are none."""
    return [model for model in MODELS if not names or model.name in names]


@functools.cache
def parameters(config: str) -> int:
    """The number of parameters of a packaged config's model, on one device."""
    alone = dataclasses.replace(load_config(config), layout=Layout())
    infos = Program(alone, make_mesh(Layout())).infos
    return sum(math.prod(info.shape) for info in infos.values())


SIZES = ("published, billion", "layers", "hidden", "heads", "GPUs", "counted here, billion")
SIZES += ("12 L H^2", "config")


def sizes() -> list[list[str]]:
    """Table 3: a row for each model, with its number of parameters here."""
    rows = []
    for size, config in CONFIGS.items():
        wanted = [
            int(numbers()["table 3", size, name]) for name in ("layers", "hidden", "heads", "GPUs")
        ]
        model = load_config(config).model
        ours = [model.num_layers, model.hidden_size, model.num_heads]
        assert ours == wanted[:3], f"configs/{config}.yaml: {ours}"
        counted = f"{parameters(config) / 1e9:.2f}", f"{12 * ours[0] * ours[1] ** 2 / 1e9:.2f}"
        rows.append([f"{float(size):.2f}", *map(str, wanted), *counted, f"`{config}`"])
    return rows
