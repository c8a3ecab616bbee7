"""Parses the text of a compiled program: its computations, their instructions, sizes and calls."""

import dataclasses
import math
import re
from collections.abc import Mapping

_ITEMSIZE = {"pred": 1, "bf16": 2}  # any other name ends in the number of its bits
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in the result of an instruction."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        itemsize = _ITEMSIZE.get(self.dtype) or int(self.dtype[1:]) // 8
        return math.prod(self.shape) * itemsize


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
        """The name that JAX gave the operation, with scopes; empty if it gave none."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def called(self, attribute: str) -> str:
        """The computation that an attribute names; empty without the attribute."""
        match = re.search(rf"{attribute}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""

    @property
    def body(self) -> str:
        """The computation that this loop or call runs; empty for any other instruction."""
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
        """Trips of this loop; None if XLA does not know them."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.rest)
        return int(known[1]) if known else None

    @property
    def calls(self) -> list[tuple[str, int]]:
        """The computations that this instruction runs, and how often; once if XLA does not know."""
        if self.body:
            return [(self.body, 1 if self.trip_count is None else self.trip_count)]
        return [(branch, 1) for branch in self.branches]


Computations = Mapping[str, list[Instruction]]


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


def loop_runs(loop: Instruction, times: int, trips: Mapping[str, int]) -> int | None:
    """Executions of a loop's body in total; None if unknown.

    Args:
        loop: a `while`.
        times: executions of the loop.
        trips: executions of the bodies of some loops in total, by the scope around the loop.
    """
    scope = re.fullmatch(r"(?:.*/)?([^/]+)/while", loop.op_name)
    if scope and scope[1] in trips:
        return trips[scope[1]]
    return None if loop.trip_count is None else times * loop.trip_count


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages of a program, whose loops run differently often on each.

    Args:
        stages: pipeline stages; executions are added up over them.
        trips: executions of the executor's loops, as `Plan.trips` has them.
    """

    stages: int = 1
    trips: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def runs(self, each: Instruction, times: int) -> list[tuple[str, int]]:
        """The computations that an instruction runs, and how often in total.

        A loop of which nothing is known counts as one trip, and so does every branch.

        Args:
            each: executed `times` times.
            times: executions, added up over the stages.
        """
        if each.kind == "while":
            known = loop_runs(each, times, self.trips)
            return [(each.body, times if known is None else known)]
        return [(name, times * trips) for name, trips in each.calls]


WHOLE = Pipeline()  # a program without stages
