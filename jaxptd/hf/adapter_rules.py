"""The rules of adapters, which follow from those of the matrices that they are beside.

Beside a tensor `[out, in]` of a file PEFT has `lora_A [R, in]` and `lora_B [out, R]`, also where
the file has `[in, out]`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from jaxptd.config.lora import INSIDE
from jaxptd.hf.dims import Rule

PREFIX = "base_model.model."  # of PEFT's names
_DIM = re.compile(r"\([^)]*\)|\S+")


def adapter_rules(
    base: Mapping[str, Sequence[Rule]], shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[Rule]]:
    """The rules of each adapter's parameters; none where PEFT has one adapter for several of ours.

    Args:
        base: the rules of the matrices.
        shapes: of all parameters, canonical.
    """
    found: dict[str, list[Rule]] = {}
    for first in (name for name in shapes if name.endswith(f"{INSIDE}a")):
        linear = first.removesuffix(f"{INSIDE}a")
        a, w, b = (len(shapes[linear + end]) for end in (f"{INSIDE}a", ".w", f"{INSIDE}b"))
        pairs = [_pair(rule, linear, a, a + b - w - 2) for rule in base[f"{linear}.w"]]
        known = [pair for pair in pairs if pair]
        found[first], found[f"{linear}{INSIDE}b"] = ([pair[i] for pair in known] for i in (0, 1))
    return found


def _pair(rule: Rule, linear: str, dims_of_a: int, shared: int) -> tuple[Rule, Rule] | None:
    """The rules of A and of B beside a matrix; None: PEFT has one adapter for several of ours.

    Args:
        rule: of the matrix.
        linear: our name of the matrix, without its `.w`.
        dims_of_a: number of dims of A, `[*layers, *rows, *parts, R]`.
        shared: how many of these are of layers, and of separate matrices.
    """
    dims, layers = _DIM.findall(rule.dims), rule.numbered
    end = dims_of_a - 1
    begin = end - (shared - layers)
    lead, rows, parts, columns = dims[:layers], dims[layers:begin], dims[begin:end], dims[end:]
    ends = _DIM.findall(rule.tensor_dims)
    (inner,) = (each for each in ends if _factors([each]) <= _factors(rows))
    (outer,) = (each for each in ends if each != inner)
    if _factors(parts) & _factors([outer]):
        return None
    module = PREFIX + rule.name.removesuffix(".weight")
    first, second = (
        dataclasses.replace(
            rule,
            ours=f"{linear}{INSIDE}{letter.lower()}",
            dims=" ".join(own),
            name=f"{module}.lora_{letter}.weight",
            tensor_dims=tensor,
        )
        for letter, own, tensor in (
            ("A", (*lead, *rows, *parts, "rank"), f"rank {inner}"),
            ("B", (*lead, "rank", *parts, *columns), f"{outer} rank"),
        )
    )
    return first, second


def is_transposed(rules: Mapping[str, Sequence[Rule]], name: str) -> bool:
    """True if files have the matrix beside an adapter as `[in, out]`.

    Args:
        rules: of all parameters.
        name: of a parameter of the adapter.
    """
    linear, _, letter = name.partition(INSIDE)
    first = [_DIM.findall(rule.tensor_dims)[0] for rule in rules[f"{linear}.w"]]
    of_adapter = [_DIM.findall(rule.tensor_dims) for rule in rules[name]]
    return letter == "a" and any(x == own[1] for x, own in zip(first, of_adapter, strict=False))


def _factors(dims: Sequence[str]) -> set[str]:
    return {factor for dim in dims for factor in dim.strip("()").split()}
