"""Kernels of a compiled GPU program and the bytes they move, from its scheduled text.

A kernel reads each operand once (of a slice or a gather only what it takes, of an update in place
nothing) and writes its result. Loops count with their known trip counts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
_BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "conditional"}
_NO_KERNEL |= {"partition-id", "replica-id", "after-all", "iota", "opt-barrier", "async-update"}
_COLLECTIVE = re.compile(r"(all-|reduce-scatter|collective-)")


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
    def size(self) -> int:
        """Bytes of its result."""
        return sum(
            _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in _ARRAY.findall(self.result)
        )

    @property
    def op_name(self) -> str:
        """The name that JAX gave it, with scopes; empty where it gave none."""
        match = re.search(r'op_name="([^"]*)"', self.rest)
        return match[1] if match else ""

    def called(self, how: str) -> str | None:
        match = re.search(rf"{how}=%?([\w.\-]+)", self.rest)
        return match[1] if match else None


PRODUCT, ATTENTION, COLLECTIVE, OTHER = "products", "attention kernel", "collectives", "other"
KINDS = (PRODUCT, ATTENTION, OTHER, COLLECTIVE)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, how often a step runs it, and the bytes that it moves in all."""

    instruction: Instruction
    kind: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """Kernels of a step, and the bytes of those that are neither product, attention, collective."""

    count: int
    other_bytes: int


Computations = dict[str, list[Instruction]]


def summary(text: str) -> Summary:
    """Of a scheduled program."""
    every = list(kernels(text))
    others = sum(kernel.bytes for kernel in every if kernel.kind == OTHER)
    return Summary(sum(kernel.count for kernel in every), others)


def largest(text: str, number: int) -> list[tuple[int, int, str]]:
    """The kernels that `summary` counts the bytes of, those that are alike together.

    Returns:
        bytes, executions, and result with the end of the name that JAX gave them; most bytes first.
    """
    found: dict[str, tuple[int, int]] = {}
    for kernel in kernels(text):
        if kernel.kind != OTHER:
            continue
        each = kernel.instruction
        words = f"{each.result}  {each.op_name[-60:] or each.kind}"
        size, count = found.get(words, (0, 0))
        found[words] = (size + kernel.bytes, count + kernel.count)
    rows = [(size, count, words) for words, (size, count) in found.items()]
    return sorted(rows, reverse=True)[:number]


def kernels(text: str) -> Iterator[Kernel]:
    """Every one of a scheduled program."""
    computations, entry = parse(text)
    for instruction, scope, times in _kernels(computations, entry, 1):
        kind = kind_of(instruction, computations)
        yield Kernel(instruction, kind, times, times * _bytes(instruction, scope, computations))


def kind_of(instruction: Instruction, computations: Computations) -> str:
    """One of `KINDS`."""
    if _COLLECTIVE.match(instruction.kind):
        return COLLECTIVE
    if "__cudnn$fmha" in instruction.rest:
        return ATTENTION
    return PRODUCT if _is_product(instruction, computations) else OTHER


def parse(text: str) -> tuple[Computations, str]:
    """The computations of a program by name, and the name of the one that runs."""
    computations: Computations = {}
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


def _kernels(
    computations: Computations, name: str, times: int
) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
    """Every instruction that runs something, with those around it and how often it runs."""
    scope = {each.name: each for each in computations[name]}
    for each in computations[name]:
        if each.kind == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', each.rest)
            inside = times * (int(trips[1]) if trips else 1)
            yield from _kernels(computations, each.called("body") or "", inside)
        elif each.kind in ("call", "async-start"):
            yield from _kernels(computations, each.called("(?:to_apply|calls)") or "", times)
        elif each.kind not in _NO_KERNEL and not each.kind.endswith("-done"):
            yield each, scope, times


def _is_product(instruction: Instruction, computations: Computations) -> bool:
    body = computations.get(instruction.called("calls") or "", [])
    marks = ("__cublas", "__cudnn$fmha", "__triton_gemm", "nested_gemm")
    return (
        instruction.kind == "dot"
        or any(each.kind == "dot" for each in body)
        or any(mark in instruction.rest for mark in marks)
    )


def _bytes(kernel: Instruction, scope: dict[str, Instruction], computations: Computations) -> int:
    body = computations.get(kernel.called("calls") or "")
    if not body:
        read = sum(scope[name].size for name in kernel.operands if name in scope)
        return kernel.size + read
    read = sum(_read(body, each, each.size) for each in body if each.kind == "parameter")
    return read + _written(body)


def _read(body: list[Instruction], value: Instruction, whole: int) -> int:
    """Bytes of a fusion's operand that it reads."""
    total = 0
    for each in body:
        if value.name not in each.operands:
            continue
        first = each.operands[0] == value.name
        if each.kind == "bitcast":
            total += _read(body, each, whole)
        elif each.kind in ("slice", "dynamic-slice", "gather") and first:
            total += each.size
        elif not (each.kind in ("dynamic-update-slice", "scatter") and first):
            return whole
    return min(total, whole)


def _written(body: list[Instruction]) -> int:
    """Bytes that a fusion writes; of an update in place only the update."""
    sizes = {each.name: each.size for each in body}
    root = next(each for each in body if each.is_root)
    updates = [each for each in body if each.kind == "dynamic-update-slice"]
    in_place = sum(each.size - sizes[each.operands[1]] for each in updates)
    return max(root.size - in_place, 0)
