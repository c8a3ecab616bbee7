"""Memory of a pipeline's step as its number of micro-batches grows, and what a tick copies.

Makes the output of `python -m benchmarks.pipeline --memory`.
"""

import dataclasses
from collections.abc import Sequence

from benchmarks.lib.compiler import QUICK
from benchmarks.lib.measure import mib
from benchmarks.pipeline.gpu import activation
from benchmarks.pipeline.programs import (
    MODEL,
    PEER,
    STAGES,
    kept_by_a_layer,
    kept_by_the_peer,
    pools_of,
    program_of,
    ticks_of_the_peer,
    words,
)
from benchmarks.pipeline.text import tick
from jaxptd.analysis.report import table, versions
from jaxptd.config import Remat
from jaxptd.pipeline.statistics import peak

MEMORY: tuple[str, ...] = (
    "program",
    "remat",
    "m",
    "held, micro-batches",
    "kept for backward, MiB",
    "by theory",
)
MEMORY += ("mail, MiB", "temporary, MiB", "less kept and mail")
MEMORY += ("copied a tick, KiB: gradients, weights, pools", "of anything else")
COMPILED: tuple[tuple[str, Remat], ...] = (
    ("gpipe", "none"),
    (PEER, "none"),
    ("1f1b", "none"),
    ("interleaved", "none"),
    ("zb-h1", "none"),
    ("gpipe", "full"),
    (PEER, "full"),
    ("1f1b", "full"),
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device of a compiled step: kept and mail as the program carries them."""

    name: str
    remat: str
    m: int
    held: float
    kept: int | None
    theory: int | None
    mail: int
    temporary: int
    copied: tuple[int, int]

    @property
    def row(self) -> list[str]:
        held = f"{self.held:.4g}" if self.held else ""
        kept, theory = ("" if size is None else mib(size) for size in (self.kept, self.theory))
        carried = self.theory if self.kept is None else self.kept
        rest = mib(self.temporary - (carried or 0) - self.mail)
        copied = (f"{size / 1024:.0f}" for size in self.copied)
        sizes = (held, kept, theory, mib(self.mail), mib(self.temporary), rest)
        return [self.name, self.remat, str(self.m), *sizes, *copied]


def memory(name: str, remat: Remat, m: int) -> Memory:
    """Compiles a step and reads its memory; nothing is run."""
    program = program_of(name, remat, m)
    step = program.train_step.lower(program.abstract_state, program.abstract_batch)
    compiled = step.compile(compiler_options=QUICK)
    text, temporary = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
    shape = activation(program.config)
    plan = program.resolved.plan
    schedule, slots = plan.schedule, plan.slots
    if name == PEER:
        at = tick(text, ticks_of_the_peer(program), shape)
        kept = kept_by_the_peer(program)
        return Memory(name, remat, m, 0, None, kept, 0, temporary, (at.carried, at.others))
    at, pools = tick(text, schedule.ticks, shape), pools_of(program)
    kept_by_part = kept_by_a_layer(program) * plan.depth("blocks")
    theory = None if schedule.splits else slots["saved_blocks"] * kept_by_part
    held = peak(schedule).max()
    copied = (at.carried, at.others)
    return Memory(name, remat, m, held, pools.kept, theory, pools.mail, temporary, copied)


def compared(found: Sequence[Memory]) -> str:
    """Reports how temporary memory grows with m in each program, and 1f1b's beside gpipe's."""
    lines = []
    for name, remat in COMPILED:
        those = [each for each in found if (each.name, each.remat) == (name, remat)]
        few, many = those[0], those[-1]
        slope = (many.temporary - few.temporary) / (many.m - few.m)
        lines.append(f"- {name}, remat {remat}: {slope / 2**20:.2f}")
    gpipe, ours = (
        max((each for each in found if (each.name, each.remat) == (name, "none")), key=_m)
        for name in ("gpipe", "1f1b")
    )
    kept, temporary = (ours.kept or 0) / (gpipe.kept or 1), ours.temporary / gpipe.temporary
    lines.append(
        f"\nAt m={ours.m}, remat none, 1f1b keeps {kept:.3f} of what gpipe keeps (p/m = "
        f"{STAGES / ours.m:.3f}), and its temporary memory is {temporary:.3f} of gpipe's."
    )
    return "\n".join(lines)


def _m(found: Memory) -> int:
    return found.m


def report(times: Sequence[int] = (1, 2, 4)) -> str:
    """The second table."""
    found = [memory(name, remat, STAGES * n) for name, remat in COMPILED for n in times]
    stage = kept_by_a_layer(program_of("gpipe", "none", STAGES)) * MODEL.num_layers // STAGES
    few, many = times[0] * STAGES, times[-1] * STAGES
    return (
        f"{versions()} {STAGES} simulated devices.\n\n{words()} A stage's layers keep "
        f"{mib(stage)} MiB of a micro-batch, by formula. Kept: what the program carries from tick "
        "to tick, in all slots, between the halves of backward too; by theory: slots times that "
        "(with remat full one slot: backward begins with a forward), of the peer ticks, m+p-1, "
        "times that (with remat full: of the inputs). Copied: by copy instructions of both loops "
        "over ticks if there are two.\n\n"
        f"{table([MEMORY, *(each.row for each in found)])}\n\n"
        f"Growth of temporary memory from m={few} to m={many}, MiB a micro-batch:\n\n"
        f"{compared(found)}\n"
    )
