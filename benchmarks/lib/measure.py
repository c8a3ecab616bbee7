"""Shared by the benchmarks: a compiled training step and its numbers, tables, files."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.lib.partitioned import with_reduce_scatters
from jaxptd.analysis.collective import Collective, add_up
from jaxptd.analysis.hlo import collectives_from_hlo

TOLERANCE = 1e-5  # relative, float32: another order of sums


class DifferentError(AssertionError):
    """Programs that are compared do not compute the same thing."""


def collectives(compiled: Any, mesh: Mesh) -> list[Collective]:
    """A compiled step's collectives by kind and axes; sliced all-reduces are reduce-scatters."""
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    return add_up(collectives_from_hlo(with_reduce_scatters(compiled.as_text()), sizes))


def ring_bytes(compiled: Any, mesh: Mesh) -> int:
    """Bytes that each device sends in a step if every collective runs as a ring."""
    sizes = {str(axis): size for axis, size in mesh.shape.items()}
    return sum(each.wire_bytes(sizes) for each in collectives(compiled, mesh))


@dataclasses.dataclass
class Run:
    """A compiled step with its state: `step` runs it once."""

    compiled: Any
    state: Any
    batch: Any
    seconds: list[float] = dataclasses.field(default_factory=list)

    def step(self) -> dict[str, float]:
        """Runs and times one step; returns its loss and gradient norm."""
        start = time.perf_counter()
        self.state, metrics = jax.block_until_ready(self.compiled(self.state, self.batch))
        self.seconds.append(time.perf_counter() - start)
        return {name: float(metrics[name]) for name in ("loss", "grad_norm")}


def write(path: Path, text: str) -> None:
    """Writes a file aside and moves it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(path.suffix + ".part")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def append(path: Path, introduction: str, section: str) -> None:
    """Appends a section to a file, or to the introduction of a new one."""
    last_section(path, introduction)(section)


def last_section(path: Path, introduction: str) -> Callable[[str], None]:
    """A function that appends a section, and when called again writes it anew.

    So a run that takes long can write what it has after each row.
    """
    before = path.read_text(encoding="utf-8") + "\n" if path.exists() else introduction
    return lambda section: write(path, before + section)


def mib(size: float) -> str:
    return f"{size / 2**20:.1f}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def compared(ours: float, peers: float, form: Any) -> str:
    """Formats `ours / peer = ratio`; two zeros have no ratio."""
    ratio = f" = **{ours / peers:.2f}**" if peers else ""
    return f"{form(ours)} / {form(peers)}{ratio}"


def rows_by_axes(found: Sequence[Collective], sizes: Mapping[str, int]) -> str:
    """Formats `all-gather tp 98 (1,540 MiB), ...`: kind, axes, executions and ring bytes."""
    return ", ".join(
        f"{each.kind} {'x'.join(each.axes)} {each.count} ({sent / 2**20:,.0f} MiB)"
        for each in found
        if (sent := each.wire_bytes(sizes)) >= 2**20
    )
