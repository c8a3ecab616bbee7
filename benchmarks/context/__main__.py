"""The cost of sharding a sequence: rings, gathered keys and values, tensor parallelism.

`python -m benchmarks.context [--devices 8 --lengths 2048 8192 --out FILE --pictures docs/pictures]`

Counts the bytes that one layer of a small GPT sends, in the jaxpr of its training step, and stops
if they differ from the closed forms of `formulas.py`. Temporary memory is that of the same step,
compiled for simulated CPU devices in float32. Nothing is run or timed. The pictures are drawn from
the same closed forms.

*all-gather*, the peer, is a causal attention with the same interface as `ring_attention.attend`. It
gathers k and v, and again in backward, where it sums dk and dv in float32 and scatters them. The
GPT uses it instead of the ring.

Letters: B batch, T query, S key, D model, N heads, H head size, n devices.
Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889; Korthikanti et al., arXiv
2205.05198; Llama Team, arXiv 2407.21783, section 3.3.2 (all-gathered keys and values).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.context.formulas import LINKS, PEAK, Pass, messages, moves, tokens_to_hide
from benchmarks.context.plans import Plan, plans
from benchmarks.lib.measure import mib, write
from jaxptd.analysis.collective import Collective, subtract
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.count import collectives_of, per_layer
from jaxptd.analysis.report import table, versions
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.errors import Parser, run_command
from jaxptd.mesh import Layout
from jaxptd.run.devices import prepare

# ---- counted ------------------------------------------------------------------------------------


def count(plan: Plan, model: ModelConfig, batch: int) -> dict[Pass, list[Collective]]:
    """Counts what one layer's activations move, in the jaxprs of the training and evaluation steps.

    Raises:
        ValueError: the count differs from `moves`.
    """
    with plan.patched():
        program = plan.program(model, batch=batch)
        both = [each for each in per_layer(program) if each.count]
        forward = _forward(plan, model, batch)
    found: dict[Pass, list[Collective]] = {"forward": forward, "backward": subtract(both, forward)}
    for which, expected in moves(plan, model, batch).items():
        if subtract(found[which], expected):
            raise ValueError(f"{plan.name}, {which}: {found[which]}, by formula {expected}")
    return found


def _forward(plan: Plan, model: ModelConfig, batch: int) -> list[Collective]:
    deeper = dataclasses.replace(model, num_layers=model.num_layers + 1)
    found = []
    for program in (plan.program(deeper, batch=batch), plan.program(model, batch=batch)):
        step: Any = program.eval_step
        traced = step.trace(program.abstract_state["params"], program.abstract_batch)
        found.append(collectives_of(traced.jaxpr, program.mesh))
    return subtract(*found)


def memory(plan: Plan, model: ModelConfig) -> Any:
    """XLA's memory analysis of the compiled training step, for one device."""
    with plan.patched():
        return compile_step(plan.program(model)).memory_analysis()


# ---- the page -----------------------------------------------------------------------------------

MODEL = ModelConfig(num_layers=2, hidden_size=256, num_heads=8, vocab_size=256)


def traffic_table(n: int, model: ModelConfig) -> str:
    """Makes the table of bytes and messages of one layer, counted and equal to the formula."""
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
    """Makes the table of a step's temporary memory at each length, and of the state's."""
    head = ["float32", "state, MiB", *(f"temporary, MiB, T={length:,}" for length in lengths)]
    rows = [head]
    for plan in plans(n):
        found = [memory(plan, dataclasses.replace(MODEL, seq_length=each)) for each in lengths]
        temporary = [mib(each.temp_size_in_bytes) for each in found]
        rows.append([plan.name, mib(found[0].argument_size_in_bytes), *temporary])
    return table(rows)


def hiding_table() -> str:
    """Makes the table of the tokens of a device from which hops are hidden."""
    shares = (1.0, 0.75, 0.5)
    rows = [["ring", "pass", "link", *(f"attention at {share:.0%} of peak" for share in shares)]]
    for ring in ("zigzag", "blockwise"):
        for which in ("forward", "backward"):
            for name, link in LINKS.items():
                found = [tokens_to_hide(which, ring, link=link, efficiency=x) for x in shares]
                rows.append([ring, which, name, *(f"{x:,.0f}" for x in found)])
    return table(rows)


def page(n: int, lengths: Sequence[int]) -> str:
    """Makes the page of results."""
    counted = dataclasses.replace(MODEL, seq_length=lengths[0], dtype="bfloat16")
    sizes = f"D={MODEL.hidden_size}, {MODEL.num_heads} heads, L={MODEL.num_layers}"
    return f"""# A sequence sharded over {n} devices: what moves and what is kept

{versions()} {n} simulated CPU devices. By `python -m benchmarks.context`.

Model: {sizes}, B=1, AdamW, `model.remat: none`. Nothing here was run or timed.

## Sent, bfloat16

Counted in the jaxpr, equal to the closed form; n = {n}. Messages: consecutive sends of a device, if
gathers and scatters run as rings.

{traffic_table(n, counted)}

## Memory of one device

Of the whole training step, by XLA's analysis of the program compiled for the CPU.

{memory_table(n, lengths)}

## Tokens of a device from which all hops but one are hidden

T/cp for an H200, {PEAK / 1e12:,.1f} TFLOP/s, bfloat16, links at full speed; k and v travel in
bfloat16, dk and dv in float32.

{hiding_table()}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Counts, compiles, writes the table, and draws the pictures."""
    parser = Parser(prog="python -m benchmarks.context", description=main.__doc__)
    parser.add_argument("--devices", type=int, default=8, help="n")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="T")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--pictures", type=Path, help="directory to draw into")
    options = parser.parse_args(argv)
    prepare(Config(MODEL, Layout(cp=options.devices), train=TrainConfig(platform="cpu")))
    text = page(options.devices, options.lengths)
    print(text)
    if options.out:
        write(options.out, text)
    if options.pictures:
        from benchmarks.context import pictures  # matplotlib is an extra

        pictures.draw(options.pictures)
    return 0


if __name__ == "__main__":
    run_command(main)
