"""Random schedules, for properties that must hold for any table."""

import dataclasses
import random
from typing import Any

import numpy as np

from jaxptd.pipeline.placement import Stacks
from jaxptd.pipeline.table import B, F, Operation, Schedule, W


def random_schedule(seed: int) -> Schedule:
    """A table of random sizes: each stage runs a random ready operation, or none."""
    draw = random.Random(seed)
    placement: Any = draw.choice(["loop", "v"])
    p, m = draw.randint(1, 5), draw.randint(1, 5)
    chunks = 2 if placement == "v" else draw.randint(1, 3)
    empty = Schedule("random", p, m, chunks, placement, np.zeros((0, p, 3), np.int32))
    kinds = draw.choice([[F, B], [F, B, W]])
    lazy, prefer = draw.choice([0.0, 0.3, 0.7]), {kind: draw.random() for kind in kinds}
    todo = {(kind, q, i) for kind in kinds for q in range(empty.parts) for i in range(m)}
    done: set[tuple[Operation, int, int]] = set()
    rows = []
    while todo:
        row, now = [(0, 0, 0)] * p, []
        for s in range(p):
            mine = [cell for cell in sorted(todo) if empty.where(cell[1])[0] == s]
            able = [c for c in mine if {(*n, c[2]) for n in empty.needs(*c[:2])} <= done]
            if able and draw.random() >= lazy:
                kind, q, i = max(able, key=lambda cell: prefer[cell[0]] + draw.random() / 2)
                row[s] = (int(kind), i, empty.where(q)[1])
                now.append((kind, q, i))
        todo -= set(now)
        done |= set(now)
        rows.append(row)
    return dataclasses.replace(empty, table=np.array(rows, np.int32))


def random_stacks(schedule: Schedule, seed: int = 0) -> Stacks:
    """Layers of each part: 2 of one stack with seed 0, else random counts of two stacks, even 0."""
    draw = random.Random(f"{seed} {schedule.parts}")
    if seed == 0:
        return {"blocks": (2,) * schedule.parts}
    sizes = [[draw.randrange(4) for _ in range(schedule.parts)] for _ in range(2)]
    first, last = ((*each[:-1], max(1, each[-1])) for each in sizes)
    return {"first": first, "last": last}
