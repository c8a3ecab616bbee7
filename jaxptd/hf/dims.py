"""The notation of a rule: each dim of a Hugging Face tensor is a product of our dims.

    Rule("blocks.attention.q.w", "L D N (P 2)", "layers.{}.self_attn.q_proj.weight", "(N 2 P) D")

reads: for each layer, whose number is in the name, the tensor has N * 2 * P rows and D columns;
our array has dims L (layers), D, N and H, where H = P * 2. A letter is a size of our array and a
number is itself; a letter after a number distinguishes equal numbers, such as 2y and 2x. Among our
dims `[i]` means that the tensor holds only entry i of that dim. Thus one notation covers
transposes, splits, interleaves and their inverses.

    Rule("blocks.mlp.down.w", "L E F D", "layers.{}.mlp.experts.{}.down_proj.weight", "D F")

has two numbers in its names: each `{}` stands for the number of an entry of one of our first dims,
here of a layer and of an expert.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

_NUMBER = re.compile(r"\d+")  # what a factor begins with

Ranges = tuple[tuple[int, int], ...]  # begin and end along each dim
Held = dict[str, tuple[int, int]]  # begin and end of each factor


class Tensor(Protocol):
    """A tensor in a file, or a numpy array: `tensor[slices]` reads only these slices."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Rule:
    """One Hugging Face tensor (per layer, or per expert) as a part of one of our parameters.

    Args:
        ours: name of our parameter.
        dims: dims of our parameter; those that number tensors come first, layers before experts.
        name: name of the tensor, with a `{}` for each of these dims.
        tensor_dims: dims of the tensor.
        longer: whether the tensor may have extra rows, which are dropped.
        exact: whether exports in another precision keep the tensor's.
        first: number of the first layer.
        step: difference between the numbers of consecutive layers.
        plus: what our numbers have more than the tensor's, such as 1 for norms that multiply by 1 +
            w. Readers and writers of values add it and take it off; gradients are the same.
    """

    ours: str
    dims: str
    name: str
    tensor_dims: str
    longer: bool = False
    exact: bool = False
    first: int = 0
    step: int = 1
    plus: float = 0.0

    @cached_property
    def _ours(self) -> list[tuple[str, ...]]:
        """Our dims, each as its factors; `[i]` is one of them."""
        return _parse(self.dims)

    @property
    def rank(self) -> int:
        """The number of dims of our parameter."""
        return len(self._ours)

    def of_layer(self, ours: str, number: int) -> "Rule":
        """The rule for a parameter of one layer, which has no dim of layers; ours: its name."""
        name, dims = self.name.replace("{}", str(number), 1), self.dims.removeprefix("L ")
        return dataclasses.replace(self, ours=ours, name=name, dims=dims, first=0, step=1)

    @cached_property
    def numbered(self) -> int:
        """The number of our dims that number tensors: 1 for layers, 2 for layers and experts."""
        return self.name.count("{}")

    @cached_property
    def entry(self) -> tuple[int, int] | None:
        """The dim of ours in which the tensor is one entry, and the entry's number."""
        for dim, (first, *_) in enumerate(self._ours):
            if first.startswith("["):
                return dim, int(first[1:-1])
        return None

    @cached_property
    def _kept(self) -> list[int]:
        """The positions of our dims that the tensor has."""
        every = range(self.numbered, self.rank)
        return [number for number in every if not self._ours[number][0].startswith("[")]

    @cached_property
    def _factors(self) -> list[tuple[str, ...]]:
        """These dims, each as its factors."""
        return [self._ours[number] for number in self._kept]

    @cached_property
    def _tensor(self) -> list[tuple[str, ...]]:
        return _parse(self.tensor_dims)

    def shape(self, ours: Sequence[int]) -> tuple[int, ...]:
        """The tensor's shape for our parameter's."""
        sizes = self._sizes(ours)
        return tuple(math.prod(sizes[factor] for factor in dim) for dim in self._tensor)

    def names(self, ours: Sequence[int]) -> list[str]:
        """The names of the tensors for our parameter's shape, in order: experts within layers."""
        return [self.tensor_at(index) for index in np.ndindex(*ours[: self.numbered])]

    def tensor_at(self, index: Sequence[int]) -> str:
        """The name of the tensor for an entry of each dim that numbers tensors."""
        layer = [self.first + self.step * number for number in index[:1]]
        return self.name.format(*layer, *index[1:])

    def _sizes(self, ours: Sequence[int]) -> dict[str, int]:
        """The size of each factor."""
        sizes: dict[str, int] = {}
        for number, dim in zip(self._kept, self._factors, strict=True):
            known = {factor: int(match[0]) for factor in dim if (match := _NUMBER.match(factor))}
            rest = ours[number] // math.prod(known.values())
            sizes |= {factor: known.get(factor, rest) for factor in dim}
        return sizes

    # ---- ours -> the tensor ---------------------------------------------------------------------

    def tensors(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors by name, made from a whole parameter."""
        every = np.ndindex(*x.shape[: self.numbered])
        return {self.tensor_at(index): self._tensor_of(x[index], x.shape) for index in every}

    def _tensor_of(self, x: np.ndarray, ours: Sequence[int]) -> np.ndarray:
        """The tensor made from the part of our parameter that has its numbers."""
        if self.entry:
            x = x.take(self.entry[1], self.entry[0] - self.numbered)
        sizes, inside = self._sizes(ours), list(itertools.chain(*self._factors))
        x = x.reshape([sizes[factor] for factor in inside])
        order = [inside.index(factor) for dim in self._tensor for factor in dim]
        return np.ascontiguousarray(x.transpose(order).reshape(self.shape(ours)))

    # ---- the tensor -> ours ---------------------------------------------------------------------

    def read(self, tensor: Tensor, ours: Sequence[int], ranges: Ranges) -> np.ndarray:
        """Reads the part of a tensor that fills these ranges of ours, such as of one layer.

        Args:
            tensor: only what the ranges need is read.
            ours: shape of our whole parameter.
            ranges: along each of our dims that the tensor has.
        """
        sizes = self._sizes(ours)
        held = self._held(ranges, sizes)
        pieces = [_pieces(dim, held, sizes) for dim in self._tensor]
        x, order = _assembled(tensor, pieces), list(itertools.chain(*self._tensor))
        x = x.reshape([held[factor][1] - held[factor][0] for factor in order])
        x = x.transpose([order.index(factor) for dim in self._factors for factor in dim])
        return self._cut(x, held, ranges)

    def _held(self, ranges: Ranges, sizes: Mapping[str, int]) -> Held:
        """The range to read of each factor: the smallest one for each dim's first factor."""
        held: Held = {}
        for dim, (begin, end) in zip(self._factors, ranges, strict=True):
            inner = math.prod(sizes[factor] for factor in dim[1:])
            held |= {factor: (0, sizes[factor]) for factor in dim[1:]}
            held[dim[0]] = (begin // inner, -(-end // inner))
        return held

    def _cut(self, x: np.ndarray, held: Held, ranges: Ranges) -> np.ndarray:
        """Joins factors to our dims and drops what is outside the ranges."""
        shape, cut = [], []
        for dim, (begin, end) in zip(self._factors, ranges, strict=True):
            inner = math.prod(held[factor][1] for factor in dim[1:])
            first, last = held[dim[0]]
            shape.append((last - first) * inner)
            cut.append(slice(begin - first * inner, end - first * inner))
        return x.reshape(shape)[tuple(cut)]

    def ranges(self, index: Ranges) -> Ranges:
        """The ranges along the tensor's dims, taken from ranges along all of ours."""
        return tuple(index[number] for number in self._kept)


def _parse(dims: str) -> list[tuple[str, ...]]:
    """`L D [0] (P 2)` -> the factors of each dim."""
    matches = re.findall(r"\(([^)]*)\)|(\S+)", dims)
    return [tuple((group or single).split()) for group, single in matches]


def _pieces(dim: tuple[str, ...], held: Held, sizes: Mapping[str, int]) -> list[slice]:
    """The contiguous ranges of a tensor's dim that hold a range of each of its factors."""
    last = max((i for i, f in enumerate(dim) if held[f] != (0, sizes[f])), default=0)
    inner = math.prod(sizes[factor] for factor in dim[last + 1 :])
    begin, end = held[dim[last]]
    pieces = []
    for outer in itertools.product(*(range(*held[factor]) for factor in dim[:last])):
        start = 0
        for number, factor in zip(outer, dim[:last], strict=True):
            start = start * sizes[factor] + number
        first = start * sizes[dim[last]]
        pieces.append(slice((first + begin) * inner, (first + end) * inner))
    return pieces


def _assembled(
    tensor: Tensor, pieces: Sequence[list[slice]], chosen: tuple[slice, ...] = ()
) -> np.ndarray:
    """Joins the pieces along each dim of a tensor."""
    dim = len(chosen)
    if dim == len(pieces):
        return tensor[chosen]
    parts = [_assembled(tensor, pieces, (*chosen, piece)) for piece in pieces[dim]]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, dim)
