"""Schedules that are drawn: tables in which each stage runs some ready operation, or none."""

import contextlib
import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.atomic_files import write_whole
from jaxptd.pipeline.table import B, F, Schedule, W, to_csv


def drawn_table(kind: str, *, stages: int, micro_batches: int) -> Schedule:
    """A table of a kind; the same one each time.

    Args:
        kind: `own.csv`; `own-split.csv`, where backward is split; `own-v.csv`, in a v.
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
    """The file of `drawn_table`, written if it is not there."""
    path = folder / f"{stages}x{micro_batches}-{kind}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = drawn_table(kind, stages=stages, micro_batches=micro_batches)
        write_whole({path: to_csv(table).encode()}, lambda _: contextlib.nullcontext())
    return path
