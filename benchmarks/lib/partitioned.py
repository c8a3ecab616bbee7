"""Rewrites programs made by XLA's partitioner so that `jaxptd.analysis.hlo` counts them fairly.

Two things differ from a shard_map program. The partitioner names mesh axes of its own
(`mesh['axis_0'=2,'axis_1'=4] {'axis_1'}`); they are written as lists of devices. And XLA on CPU
lacks a pass of XLA on GPU and TPU, which replaces an all-reduce by a reduce-scatter if each device
uses only its slice; such an all-reduce is written as that reduce-scatter, so that the peer is not
charged for twice the bytes.
"""

import collections
import math
import re
from collections.abc import Iterator

import numpy as np

from jaxptd.analysis.collective import ALL_REDUCE, REDUCE_SCATTER

_MESH = re.compile(
    r"replica_groups=@?mesh\[([^\]]*)\](?:,\s*device_ids=\((.*?)\)(?=\s*\{))?\s*\{([^}]*)\}"
)
_HEAD = re.compile(r"(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
# These move elements and change none.
_THROUGH = ("bitcast", "copy", "reshape", "transpose", "convert")


def plain_groups(text: str) -> str:
    """Writes every group of devices in the program as a list of ranks."""
    return _MESH.sub(lambda match: f"replica_groups={_listed(*match.groups())}", text)


def _listed(mesh: str, ids: str | None, axes: str) -> str:
    names = [name for name, _ in re.findall(r"'(\w+)'=(\d+)", mesh)]
    sizes = [int(size) for _, size in re.findall(r"'(\w+)'=(\d+)", mesh)]
    ranks = _ranks(sizes, ids)
    # `'a':(2)4` is a factor of axis a: of its size 2 * 4 * rest the middle one.
    chosen: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        whole = sizes[names.index(name)]
        chosen[name].append((int(before or 1), int(size or whole)))
    factors: list[int] = []
    inside: list[int] = []
    for name, size in zip(names, sizes, strict=True):
        for factor, taken in _factors(size, sorted(chosen[name])):
            inside += [len(factors)] if taken else []
            factors.append(factor)
    outside = [i for i in range(len(factors)) if i not in inside]
    group = math.prod(factors[i] for i in inside)
    groups = ranks.reshape(factors).transpose(outside + inside).reshape(-1, group).tolist()
    return "{" + ",".join("{" + ",".join(map(str, each)) + "}" for each in groups) + "}"


def _ranks(sizes: list[int], ids: str | None) -> np.ndarray:
    """The mesh's devices in order; `ids` is `[2,4]T(1,0)`, a list, or None for 0, 1, 2, ..."""
    ranks = np.arange(math.prod(sizes))
    if ids is None:
        return ranks
    if iota := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids.strip()):
        shape, order = ([int(n) for n in (dims or "").split(",") if n] for dims in iota.groups())
        ranks = ranks.reshape(shape)
        return ranks.transpose(order) if order else ranks
    return np.array([int(n) for n in ids.split(",")])


def _factors(size: int, taken: list[tuple[int, int]]) -> Iterator[tuple[int, bool]]:
    """Factors of `size`, each with whether it is one of `taken` (product before it, size)."""
    done = 1
    for before, factor in taken:
        if before > done:
            yield before // done, False
        yield factor, True
        done = before * factor
    if size > done:
        yield size // done, False


# ---- all-reduces that are only sliced ----------------------------------------------------------


class _Program:
    """The instructions of every computation, and the users of each."""

    def __init__(self, text: str) -> None:
        self.instructions: dict[str, dict[str, re.Match]] = {}
        self.users: dict[str, dict[str, list[str]]] = {}
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head and not line.startswith("HloModule"):
                instructions = self.instructions.setdefault(head[1], {})
                users = self.users.setdefault(head[1], collections.defaultdict(list))
            elif found := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
                instructions[found[2]] = found
                for operand in set(self.operands(found)):
                    users[operand].append(found[2])

    @staticmethod
    def operands(instruction: re.Match) -> list[str]:
        return re.findall(r"%([\w.\-]+)", instruction[5].split("), ")[0])

    def fates(self, computation: str, name: str, member: int | None = None) -> set[str]:
        """Finds how a value is used: "sliced", "returned" by its computation, or "used" otherwise.

        Args:
            computation: where it is.
            name: the instruction that makes it.
            member: which element, if it makes a tuple.
        """
        fates = {"returned"} if self.instructions[computation][name][1] else set()
        for user in self.users[computation][name]:
            fates |= self._fate(computation, name, user, member)
        return fates

    def _fate(self, computation: str, name: str, user: str, member: int | None) -> set[str]:
        by = self.instructions[computation][user]
        kind, rest = by[4], by[5]
        if kind == "get-tuple-element":
            index = re.search(r"index=(\d+)", rest)
            mine = index is not None and int(index[1]) == member
            return self.fates(computation, user) if mine else set()
        if kind == "dynamic-slice" and self.operands(by)[0] == name:
            return {"sliced"}
        if kind in _THROUGH:
            return self.fates(computation, user)
        if kind in ("fusion", "call"):
            return self._inside(computation, name, user)
        return {"used"}

    def _inside(self, computation: str, name: str, user: str) -> set[str]:
        by = self.instructions[computation][user]
        called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", by[5])
        assert called
        fates = set()
        for position, operand in enumerate(self.operands(by)):
            if operand == name:
                fates |= self.fates(called[1], self._parameter(called[1], position))
        if "returned" in fates:  # elementwise: continue after the fusion
            fates = (fates - {"returned"}) | self.fates(computation, user)
        return fates

    def _parameter(self, computation: str, position: int) -> str:
        return next(
            name
            for name, each in self.instructions[computation].items()
            if each[4] == "parameter" and each[5].startswith(f"{position})")
        )


def with_reduce_scatters(text: str) -> str:
    """Writes every all-reduce of the program that is only sliced as a reduce-scatter.

    A member of a combined all-reduce becomes a separate collective. Only kind, groups and bytes
    are right: the text is counted, not run.
    """
    text = plain_groups(text)
    program = _Program(text)
    lines: list[str] = []
    computation = ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        computation = head[1] if head and not line.startswith("HloModule") else computation
        found = _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if found and found[4] == ALL_REDUCE:
            lines += _split(program, computation, found)
        else:
            lines.append(line)
    return "\n".join(lines)


def _split(program: _Program, computation: str, instruction: re.Match) -> Iterator[str]:
    _, name, result, _, rest = instruction.groups()
    devices = _group_size(rest)
    for member, array in enumerate(_ARRAY.finditer(result)):
        only = member if result.startswith("(") else None
        sliced = program.fates(computation, name, only) == {"sliced"}
        dtype, dims = array.groups()
        size = math.prod(int(n) for n in dims.split(",") if n)
        kind, size = (REDUCE_SCATTER, size // devices) if sliced else (ALL_REDUCE, size)
        yield f"  %{name}.{member} = {dtype}[{size}] {kind}({rest}"


def _group_size(attributes: str) -> int:
    """The number of devices of one group."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(listed[1].split(","))
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
    assert iota, attributes
    return int(iota[1])
