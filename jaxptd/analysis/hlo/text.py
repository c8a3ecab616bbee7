"""Parses a compiled program's text: computations, their instructions, sizes and calls."""

import dataclasses
import math
import re
from collections.abc import Mapping

_BITS = re.compile(r"\d+")  # in the name of a type: u32, bf16, f8e4m3fn
_ARRAY = re.compile(r"\b(pred|bf16|f8\w+|[suf]\d+)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in the result of an instruction."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = _BITS.search(self.dtype)  # pred names none, and takes a byte
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    result: str
    kind: str
    rest: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the result."""
        return [
            Array(dtype, tuple(int(n) for n in dims.split(",") if n))
            for dtype, dims in _ARRAY.findall(self.result)
        ]

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """The operation's JAX name, with scopes; empty without one."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def called(self, attribute: str) -> str:
        """The computation that an attribute names; empty if the attribute is missing."""
        match = re.search(rf"{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def body(self) -> str:
        """The computation that this loop or call runs; empty for other instructions."""
        if self.kind == "while":
            return self.called("body")
        return self.called("(?:to_apply|calls)") if self.kind in ("call", "async-start") else ""

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        if self.kind != "conditional":
            return []
        listed = re.search(r"branch_computations=\{(.*?)\}", self.rest)
        named = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", self.rest)
        return re.findall(r"[\w.\-]+", listed[1] if listed else "") or named

    @property
    def trip_count(self) -> int | None:
        """Iterations of this loop; None if XLA does not know."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(known[1]) if known else None

    @property
    def calls(self) -> list[tuple[str, int]]:
        """The computations that this instruction runs, and how often (once if unknown)."""
        if self.body:
            return [(self.body, 1 if self.trip_count is None else self.trip_count)]
        return [(branch, 1) for branch in self.branches]


Computations = Mapping[str, list[Instruction]]
Runs = list[tuple[str, int | None]]  # computations and their executions
USUAL = 1  # the branch of a `lax.cond` for True, where programs put what a step usually does


def parse(text: str) -> tuple[Computations, str]:
    """The computations of a program by name, and the name of the entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, body = "", []
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head and not line.startswith("HloModule"):
            body = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            name, result, kind, rest = match.groups()
            is_root = line.lstrip().startswith("ROOT ")
            body.append(Instruction(name, result, kind, rest, is_root))
    return computations, entry


def scope_of(each: Instruction) -> str:
    """The name of the scope around a loop or conditional; empty without one."""
    match = re.fullmatch(r"(?:.*/)?([^/]+)/(?:while|cond)", each.op_name)
    return match[1] if match else ""


def branches_of(scope: str, trips: Mapping[str, int]) -> dict[int, int]:
    """Executions of the branches of a conditional in this scope, by branch number."""
    if scope in trips:
        return {1: trips[scope]}
    switch = {key.rpartition("/"): runs for key, runs in trips.items()}
    return {
        int(number): runs
        for (name, slash, number), runs in switch.items()
        if slash and name == scope
    }


def loop_runs(loop: Instruction, times: int, trips: Mapping[str, int]) -> int | None:
    """Total executions of a loop's body; None if unknown.

    Args:
        loop: a `while`.
        times: executions of the loop.
        trips: total executions of the bodies of some loops, by the scope around the loop.
    """
    if (scope := scope_of(loop)) in trips:
        return trips[scope]
    return None if loop.trip_count is None else times * loop.trip_count


def taken(conditional: Instruction, computations: Computations, trips: Mapping[str, int]) -> Runs:
    """The branches of a conditional, and their total executions; None for as often as itself.

    Args:
        conditional: the executor's, or another, of which the usual branch counts. A branch without
            a named instruction does nothing.
        computations: the program's.
        trips: executions of their branches, in the form of `Plan.trips`.
    """
    scope, name = scope_of(conditional), f"{conditional.op_name}/branch_"
    known: dict[str, int | None] = {
        f"{name}{number}_fun": n for number, n in branches_of(scope, trips).items()
    }
    known = known or {f"{name}{USUAL}_fun": None}
    executed: Runs = []
    for branch in conditional.branches:
        names = [each.op_name for each in computations[branch]]
        runs = (n for start, n in known.items() if any(x.startswith(start) for x in names))
        executed.append((branch, next(runs, 0)))
    return executed


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A program's stages, each of which runs loops and conditionals a different number of times.

    Args:
        stages: number of pipeline stages; executions are added up over them.
        trips: executions of the executor's loops and conditionals, in the form of `Plan.trips`.
    """

    stages: int = 1
    trips: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def runs(
        self, each: Instruction, times: int, computations: Computations
    ) -> list[tuple[str, int]]:
        """The computations that an instruction runs, and their total executions.

        A loop of unknown length counts as one iteration; see `taken` for conditionals.

        Args:
            each: an instruction executed `times` times.
            times: executions, added up over the stages.
            computations: of the program.
        """
        if each.kind == "conditional":
            taken_runs = taken(each, computations, self.trips)
            return [(name, times if runs is None else runs) for name, runs in taken_runs]
        if each.kind == "while":
            known = loop_runs(each, times, self.trips)
            return [(each.body, times if known is None else known)]
        return [(name, times * trips) for name, trips in each.calls]


WHOLE = Pipeline()  # a program without stages
