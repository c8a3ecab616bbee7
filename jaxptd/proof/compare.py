"""Compares a case with one device and reports the outcome."""

import contextlib
import dataclasses
import itertools
import json
import random
import shlex
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxptd.analysis import verification
from jaxptd.analysis.compiled_step import UNOPTIMISED
from jaxptd.analysis.verification import Reference
from jaxptd.atomic_files import write_whole
from jaxptd.config import Config, ModelConfig, flat, with_fields
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.pipeline.table import B, F, Schedule, W, to_csv
from jaxptd.proof.values import FIXED, HOW, plain


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a comparison.

    Args:
        outcome: equal, refused, crashed or unequal.
        words: the verdict, or the error in one line.
        worst: the largest relative difference of a gradient, if any.
    """

    outcome: str
    words: str
    worst: float = 0.0


class Comparer:
    """Compares cases with one device; keeps that device's last step for cases that share it."""

    def __init__(self) -> None:
        self._key: Config | None = None
        self._reference: Reference | None = None

    def compare(self, config: Config) -> Ending:
        """Compares a case in its model's own precision."""
        dtype = config.model.dtype
        try:
            with jax.enable_x64(dtype == "float64"):
                report = verification.compared(config, self._one_device(config))
        except UserError as error:
            return Ending("refused", str(error))
        except Exception as error:  # any exception is a finding
            return Ending(
                "crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
        outcome = "equal" if report.equal else "unequal"
        return Ending(outcome, report.verdict, report.worst_gradient)

    def _one_device(self, config: Config) -> Reference:
        key = one_device_config(config)
        if key != self._key or self._reference is None:
            jax.clear_caches()
            self._reference = verification.one_device(
                key, dtype=key.model.dtype, options=UNOPTIMISED
            )
            self._key = key
        return self._reference


def one_device_config(config: Config) -> Config:
    """The config with every field that only affects how a step is computed at its plain value."""
    values = {name: plain(name) for name in HOW}
    model = {name.partition(".")[2]: x for name, x in values.items() if name.startswith("model.")}
    return dataclasses.replace(
        config,
        model=with_fields(config.model, model),
        layout=Layout(),
        train=dataclasses.replace(config.train, micro_batches=1),
    )


def command_line(config: Config) -> str:
    """The shortest command that compares a config: `jaxptd verify` with the non-default fields."""
    words, model = ["jaxptd verify"], config.model
    default = flat(Config(ModelConfig(family=model.family, positions=model.positions)))
    default |= {"model.family": ModelConfig.family, "model.positions": ModelConfig.positions}
    for name, value in flat(config).items():
        unread = name in FIXED and name != "train.platform"
        if value != default.get(name) and not unread:
            words.append(f"--{name} {_word(value)}")
    return " ".join(words)


def _word(value: Any) -> str:
    texts = isinstance(value, tuple) and any(isinstance(each, str) for each in value)
    if texts or isinstance(value, dict):
        return shlex.quote(json.dumps(value, separators=(",", ":")))
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- random schedules ----------------------------------------------------------------------------


def drawn_table(kind: str, *, stages: int, micro_batches: int) -> Schedule:
    """A schedule table of this kind, the same one each time.

    Args:
        kind: `own.csv`, `own-split.csv` (split backward), or `own-v.csv` (v-shaped placement).
        stages: p.
        micro_batches: m.
    """
    draw = random.Random(f"{kind} {stages} {micro_batches}")
    placement: Any = "v" if "-v" in kind else "loop"
    chunks = 2 if placement == "v" else 1
    empty = np.zeros((0, stages, 3), np.int32)
    schedule = Schedule(kind, stages, micro_batches, chunks, placement, empty)
    kinds = [F, B, W] if "-split" in kind else [F, B]
    todo = sorted(itertools.product(kinds, range(schedule.parts), range(micro_batches)))
    done: set[tuple[Any, int, int]] = set()
    rows = []
    while todo:
        row, now = [(0, 0, 0)] * stages, []
        for stage in range(stages):
            able = [
                (operation, part, i)
                for operation, part, i in todo
                if schedule.where(part)[0] == stage
                and all((*need, i) in done for need in schedule.needs(operation, part))
            ]
            if able and draw.random() > 0.2:
                operation, part, i = draw.choice(able)
                row[stage] = (int(operation), i, schedule.where(part)[1])
                now.append((operation, part, i))
        done.update(now)
        todo = [cell for cell in todo if cell not in done]
        rows.append(row)
    return dataclasses.replace(schedule, table=np.array(rows, np.int32))


def table_file(folder: Path, kind: str, *, stages: int, micro_batches: int) -> Path:
    """The file of `drawn_table`, written if missing."""
    path = folder / f"{stages}x{micro_batches}-{kind}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = drawn_table(kind, stages=stages, micro_batches=micro_batches)
        write_whole({path: to_csv(table).encode()}, lambda _: contextlib.nullcontext())
    return path
