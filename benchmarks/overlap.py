"""What each hop of the ring lies over, in a training step that was compiled for H200s.

`python -m benchmarks.overlap --config configs/gpt-1.3b-131k.yaml [--layout.cp 8 --compiler a=b]`

A scheduled program says where a permute starts and where its result is waited for. What stands
between the two runs while the permute is under way. Read here: every collective-permute of the
step, in loops too, the attention kernels (cuDNN's) and the other matrix products between its start
and its end, and how often it runs. Not read: time. A permute is hidden as far as that work lasts.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from benchmarks import kernels
from benchmarks.compile_gpu import gpus
from benchmarks.kernels import Computations, Instruction
from benchmarks.measure import table
from jaxptd.command_line import make_parser, parse
from jaxptd.config import Config
from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.errors import UserError, run_command
from jaxptd.mesh import make_mesh
from jaxptd.step import Program

HEAD = (
    "pass",
    "executions",
    "MiB each",
    "attention kernels under way",
    "other products",
    "lies over",
)
PASSES = ("forward", "forward again", "backward")


@dataclasses.dataclass(frozen=True)
class Work:
    """Executions of attention kernels and of other products."""

    attention: int = 0
    products: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.attention + other.attention, self.products + other.products)

    def __mul__(self, times: int) -> "Work":
        return Work(self.attention * times, self.products * times)


@dataclasses.dataclass(frozen=True)
class Permute:
    """One permute of the program's text: its pass, bytes, executions, and what it lies over."""

    name: str
    of: str
    bytes: int
    count: int
    over: Work

    @property
    def lies_over(self) -> str:
        if self.over.attention:
            return "attention"
        return "products" if self.over.products else "nothing"


def permutes(text: str) -> list[Permute]:
    """Every permute of a scheduled program, as it runs."""
    computations, entry = kernels._parse(text)
    return [each for each in _permutes(computations, entry, 1) if each.count]


def _permutes(computations: Computations, name: str, times: int) -> Iterator[Permute]:
    under_way: dict[str, Work] = {}
    for each in computations[name]:
        if each.kind == "collective-permute-start":
            under_way[each.name] = Work()
        elif each.kind == "collective-permute-done":
            over = under_way.pop(each.operands[0])
            yield Permute(each.name, _pass(each), each.size, times, over)
        elif each.kind == "collective-permute":
            yield Permute(each.name, _pass(each), each.size, times, Work())
        for body, trips in _inside(each):
            yield from _permutes(computations, body, times * trips)
        if under_way:
            done = _work(each, computations)
            under_way = {start: over + done for start, over in under_way.items()}


def _inside(each: Instruction) -> list[tuple[str, int]]:
    """The computations that an instruction runs, and how often."""
    if each.kind == "while":
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.rest)
        return [(each.called("body") or "", int(trips[1]) if trips else 1)]
    if each.kind in ("call", "async-start"):
        return [(each.called("(?:to_apply|calls)") or "", 1)]
    if each.kind == "conditional":
        listed = re.search(r"branch_computations=\{(.*?)\}", each.rest)
        named = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", each.rest)
        return [(name, 1) for name in re.findall(r"[\w.\-]+", listed[1] if listed else "") or named]
    return []


def _work(each: Instruction, computations: Computations) -> Work:
    """Of one instruction; of a conditional its heaviest branch."""
    inside = [
        sum((_work(x, computations) for x in computations[name]), Work()) * trips
        for name, trips in _inside(each)
    ]
    if inside:
        return max(inside, key=lambda work: (work.attention, work.products))
    if "__cudnn$fmha" in each.rest:
        return Work(attention=1)
    return Work(products=int(kernels._is_product(each, computations)))


def _pass(each: Instruction) -> str:
    """Which pass of the step an instruction belongs to, from the name that JAX gave it."""
    name = re.search(r'op_name="([^"]*)"', each.rest)
    if not name or "transpose(" not in name[1]:
        return "forward"
    return "forward again" if "rematted_computation" in name[1] else "backward"


def compile_for_h200(config: Config, options: dict[str, Any] | None = None) -> Any:
    """The training step of a config, compiled for H200s that need not be there."""
    mesh = make_mesh(config.layout, gpus(config.layout.num_devices))
    program: Any = Program(config, mesh)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    return lowered.compile(compiler_options=options or None)


def rows(found: Sequence[Permute]) -> list[tuple[str, ...]]:
    """The table's rows: permutes that are alike as one."""
    alike: collections.Counter[tuple] = collections.Counter()
    for each in found:
        work = (each.over.attention, each.over.products, each.lies_over)
        alike[PASSES.index(each.of), each.bytes, *work] += each.count
    return [
        (PASSES[of], str(count), f"{size / 2**20:,.0f}", *map(str, work))
        for (of, size, *work), count in sorted(alike.items())
    ]


def summary(found: Sequence[Permute]) -> str:
    """How many permutes of a step, and how many bytes, lie over what."""
    parts = []
    for what in ("attention", "products", "nothing"):
        those = [each for each in found if each.lies_over == what]
        mib = sum(each.count * each.bytes for each in those) / 2**20
        parts.append(f"over {what} {sum(each.count for each in those)} ({mib:,.0f} MiB)")
    return f"Permutes of a step: {', '.join(parts)}."


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """`name=value` words as XLA's options.

    Raises:
        UserError: a word is not of that form.
    """
    for word in words:
        if "=" not in word:
            raise UserError(f"--compiler {word}: write it as name=value")
    return dict(word.split("=", 1) for word in words)


def main(argv: Sequence[str] | None = None) -> int:
    """Says what each permute of a config's training step lies over, compiled for H200s."""
    parser = make_parser("python -m benchmarks.overlap", main.__doc__ or "")
    parser.add_argument("--compiler", nargs="+", default=[], help="XLA's options, name=value")
    config, options = parse(parser, argv)
    jax.config.update("jax_platforms", "cpu")  # what starts here; compiled is for GPUs
    chosen = compiler_options(options["compiler"])
    found = permutes(compile_for_h200(with_vocabulary(config), chosen).as_text())
    print(table([HEAD, *rows(found)]))
    print(summary(found))
    return 0


if __name__ == "__main__":
    run_command(main)
