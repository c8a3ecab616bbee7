"""The cost of sharding a sequence: rings, gathered keys and values, tensor parallelism.

`python -m benchmarks.context [--devices 8 --lengths 2048 8192 --out FILE]`

Counts the bytes that one layer of a small GPT sends in the jaxpr of its training step, and fails if
they differ from the closed forms in `costs.py`. Temporary memory is that of the same step, compiled
for simulated CPU devices in float32. Nothing is run or timed. `python -m benchmarks.pictures ring`
draws its pictures from the same closed forms.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.context.costs import LINKS, Plan, count, messages, plans, tokens_to_hide
from benchmarks.lib.pages import head, joined, mib, parser, renew
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import run_command
from jaxptd.mesh import Layout
from jaxptd.run.devices import prepare

MODEL = ModelConfig(num_layers=2, hidden_size=256, num_heads=8, vocab_size=256)


def memory(plan: Plan, model: ModelConfig) -> Any:
    """XLA's memory analysis of the compiled training step, for one device."""
    return compile_step(plan.program(model)).memory_analysis()


def traffic_table(n: int, model: ModelConfig) -> str:
    """Makes the table of bytes and messages of one layer, counted and checked with the formula."""
    unit = model.seq_length * model.hidden_size * (n - 1) / n
    rows = [["one layer", "forward", "backward", "messages", "bytes sent / (B T D (n-1)/n)"]]
    for plan in plans(n):
        found = count(plan, model, 1)
        cells, sent, sends = [], [], 0
        for each in found.values():
            cells.append(", ".join(f"{c.count} {c.kind}" for c in each))
            sent.append(sum(c.wire_bytes({"cp": n, "tp": n}) for c in each) / unit)
            sends += messages(each, n)
        total = f"{sent[0]:g} + {sent[1]:g} = **{sum(sent):g}**"
        rows.append([plan.name, *cells, f"{sends}", total])
    return table(rows)


def memory_table(n: int, lengths: Sequence[int]) -> str:
    """Makes the table of a step's temporary memory at each length, and of its state."""
    head = ["float32", "state, MiB", *(f"temporary, MiB, T={length:,}" for length in lengths)]
    rows = [head]
    for plan in plans(n):
        found = [memory(plan, dataclasses.replace(MODEL, seq_length=each)) for each in lengths]
        temporary = [mib(each.temp_size_in_bytes) for each in found]
        rows.append([plan.name, mib(found[0].argument_size_in_bytes), *temporary])
    return table(rows)


def hiding_table() -> str:
    """Makes the table of how many tokens per device are needed to hide hops."""
    shares = (1.0, 0.75, 0.5)
    rows = [["ring", "pass", "link", *(f"attention at {share:.0%} of peak" for share in shares)]]
    for ring in ("zigzag", "blockwise"):
        for which in ("forward", "backward"):
            for name, link in LINKS.items():
                found = [tokens_to_hide(which, ring, link=link, efficiency=x) for x in shares]
                rows.append([ring, which, name, *(f"{x:,.0f}" for x in found)])
    return table(rows)


def page(n: int, lengths: Sequence[int]) -> str:
    """Makes the tables: what moves, what is saved, and how many tokens hide the hops."""
    counted = dataclasses.replace(MODEL, seq_length=lengths[0], dtype="bfloat16")
    return joined(versions(), traffic_table(n, counted), memory_table(n, lengths), hiding_table())


def main(argv: Sequence[str] | None = None) -> int:
    """Counts what a sharded sequence moves, and compiles it to see what memory it needs."""
    made = parser("context", main)
    made.add_argument("--devices", type=int, default=8, help="n")
    made.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="T")
    options = made.parse_args(argv)
    prepare(Config(MODEL, Layout(cp=options.devices), train=TrainConfig(platform="cpu")))
    text = page(options.devices, options.lengths)
    print(text)
    if options.out:
        title = f"A sequence sharded over {options.devices} devices: what moves and what is saved"
        renew(Path(options.out), head(title, "context") + text)
    return 0


if __name__ == "__main__":
    run_command(main)
