"""Numbers that the paper of 2D tensor parallelism publishes, as `published.csv` has them.

They were measured by its authors, with other software, on up to eight RTX 4090; nothing here is
ours. Source: Zhu and Dong, CAAI Trans. Intelligent Systems 20(5), 2025, sections 3.2 to 3.6.
"""

import csv
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).parent / "published.csv"
SECONDS = 3600  # of an hour, the unit of its times

Number = tuple[str, str, str]  # where it is, its row, its column


class Sizes(NamedTuple):
    """A model of table 3, and the GPUs that it was trained on."""

    layers: int
    hidden: int
    heads: int
    gpus: int


@functools.cache
def numbers() -> Mapping[Number, float]:
    """Every published number by (where, row, column)."""
    with PATH.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["where"], row["row"], row["column"]): float(row["value"]) for row in rows}


def measured(layout: str, column: str) -> float | None:
    """Figures of table 2: column memory, GB of one GPU, or time, hours; None: it has none."""
    return numbers().get(("table 2", layout, column))


def sizes(billion: float) -> Sizes:
    """The sizes that table 3 has for a model of so many parameters."""
    columns = ("layers", "hidden", "heads", "GPUs")
    return Sizes(*(int(numbers()["table 3", f"{billion:g}", column]) for column in columns))


def gain(column: str) -> float:
    """Change of a figure of table 2 from TP=4 to TP2D=4; -0.1: a tenth less."""
    tp, grid = (numbers()["table 2", layout, column] for layout in ("TP=4", "TP2D=4"))
    return grid / tp - 1


def weak_scaling(gpus: int, layout: str) -> float | None:
    """The efficiency that figure 7 has, 0 to 1; None: it has none."""
    found = numbers().get(("figure 7", f"{gpus} GPUs", layout))
    return None if found is None else found / 100


def speedup(model: str) -> float:
    """Time of TP over that of TP2D."""
    return numbers()["table 4", model, "speedup"]


def hours(model: str, layout: str) -> float:
    """Hours of the iterations after the warm-up; layout: TP or TP2D."""
    return numbers()["table 4", model, f"time {layout}"]


def iteration(model: str, layout: str) -> float:
    """Seconds of an iteration, if its times are those of the iterations that it names."""
    return SECONDS * hours(model, layout) / numbers()["section 3.4", "all", "iterations"]


def perplexity(layout: str) -> float:
    """Perplexity of GPT after the training."""
    return numbers()["figure 9", "GPT", f"perplexity {layout}"]


def communication(layout: str) -> float:
    """The share of an iteration of GPT; 0 to 1."""
    where = {"TP": "figure 11", "TP2D": "figure 12"}[layout]
    return numbers()[where, "GPT", f"communication {layout}"] / 100


def segmentation(layout: str, column: str) -> float:
    """Figures of table 5: column memory, GB of one GPU, or host memory, per cent of the host's."""
    return numbers()["table 5", layout, column]
