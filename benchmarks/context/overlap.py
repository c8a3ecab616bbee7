"""The work that overlaps with each hop of the ring, in a training step compiled for H200s.

`python -m benchmarks.context.overlap --config configs/gpt-1.3b-131k.yaml [--layout.cp 8 --compiler
a=b]`

Reads the collective-permutes from the schedule; see `jaxptd/analysis/hlo/timeline.py`.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.lib.compiler import compiler_options
from jaxptd.analysis.collective import PERMUTE
from jaxptd.analysis.hlo.timeline import Move as Permute
from jaxptd.analysis.hlo.timeline import Work, moves
from jaxptd.analysis.report import table
from jaxptd.commands.command_line import make_parser, parse
from jaxptd.compiling import gpus
from jaxptd.config import Config
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

__all__ = ["Permute", "Work", "permutes", "rows", "summary"]

HEAD = (
    "pass",
    "executions",
    "MiB each",
    "overlapping attention kernels",
    "other products",
    "overlaps with",
)
PASSES = ("forward", "forward again", "backward")


def permutes(text: str) -> list[Permute]:
    """Lists the permutes of a scheduled program, in the order in which they run."""
    return [each for each in moves(text) if each.kind == PERMUTE]


def compile_for_h200(config: Config, options: dict[str, Any] | None = None) -> Any:
    """Compiles the training step of a config for H200s; no GPU is needed."""
    mesh = make_mesh(config.layout, gpus(config.layout.num_devices))
    program: Any = Program(config, mesh)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    return lowered.compile(compiler_options=options or None)


def rows(found: Sequence[Permute]) -> list[tuple[str, ...]]:
    """The table's rows: one for all permutes that are alike."""
    alike: collections.Counter[tuple] = collections.Counter()
    for each in found:
        work = (each.over.attention, each.over.products, each.hidden_by)
        alike[PASSES.index(each.of), each.bytes, *work] += each.count
    return [
        (PASSES[of], str(count), f"{size / 2**20:,.0f}", *map(str, work))
        for (of, size, *work), count in sorted(alike.items())
    ]


def summary(found: Sequence[Permute]) -> str:
    """Counts the permutes of a step, and their bytes, by the work that overlaps with them."""
    shares = []
    for what in ("attention", "products", "nothing"):
        those = [each for each in found if each.hidden_by == what]
        mib = sum(each.count * each.bytes for each in those) / 2**20
        shares.append(f"over {what} {sum(each.count for each in those)} ({mib:,.0f} MiB)")
    return f"Permutes of a step: {', '.join(shares)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Shows the work that overlaps with each permute of a training step compiled for H200s."""
    parser = make_parser("python -m benchmarks.context.overlap", main.__doc__ or "")
    parser.add_argument("--compiler", nargs="+", default=[], help="XLA's options, name=value")
    config, options = parse(parser, argv)
    jax.config.update("jax_platforms", "cpu")  # the step is only compiled for GPUs
    chosen = compiler_options(options["compiler"])
    found = permutes(compile_for_h200(with_vocabulary(config), chosen).as_text())
    print(table([HEAD, *rows(found)]))
    print(summary(found))
    return 0


if __name__ == "__main__":
    run_command(main)
