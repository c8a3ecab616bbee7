"""Shows what overlaps with each hop of the ring, in a training step compiled for H200s.

`python -m benchmarks.context.overlap --config configs/gpt-1.3b-131k.yaml [--layout.cp 8 --compiler
a=b --out FILE]`

Reads the collective-permutes from the schedule; `jaxptd/analysis/hlo/timeline.py` explains how.
"""

import collections
from collections.abc import Sequence

from benchmarks.lib.compiler import compile_only, compiler_options, on_h200s
from benchmarks.lib.pages import append, head, joined, parser
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hlo.timeline import Move, moves
from jaxptd.analysis.report import table
from jaxptd.commands.command_line import parse
from jaxptd.costs.collective import PERMUTE
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import run_command

HEAD = ("pass", "executions", "MiB each", "overlapping attention kernels", "other matmuls")
HEAD += ("overlaps with",)
WORDS = {"attention": "attention", "products": "matmuls", "nothing": "nothing"}
PASSES = ("forward", "forward again", "backward")


def rows(found: Sequence[Move]) -> list[tuple[str, ...]]:
    """The table's rows: one for each group of identical permutes."""
    alike: collections.Counter[tuple] = collections.Counter()
    for each in found:
        work = (each.over.attention, each.over.products, WORDS[each.hidden_by])
        alike[PASSES.index(each.of), each.bytes, *work] += each.count
    return [
        (PASSES[of], str(count), f"{size / 2**20:,.0f}", *map(str, work))
        for (of, size, *work), count in sorted(alike.items())
    ]


def summary(found: Sequence[Move]) -> str:
    """Counts the permutes of a step, and their bytes, by what overlaps with them."""
    shares = []
    for what, word in WORDS.items():
        those = [each for each in found if each.hidden_by == what]
        mib = sum(each.count * each.bytes for each in those) / 2**20
        shares.append(f"over {word} {sum(each.count for each in those)} ({mib:,.0f} MiB)")
    return f"Permutes of a step: {', '.join(shares)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Shows what overlaps with each permute of a training step compiled for H200s."""
    made = parser("context.overlap", main, config=True)
    made.add_argument("--compiler", nargs="+", default=[], help="XLA's options, name=value")
    config, options = parse(made, argv)
    compile_only()
    chosen = compiler_options(options["compiler"])
    step = compile_step(on_h200s(with_vocabulary(config)), chosen or None)
    found = [each for each in moves(step.as_text()) if each.kind == PERMUTE]
    text = joined(table([HEAD, *rows(found)]), summary(found))
    print(text)
    title = head("What overlaps with the hops of a ring", "context.overlap")
    append(options["out"], title, f"## {config.layout}\n\n{text}")
    return 0


if __name__ == "__main__":
    run_command(main)
