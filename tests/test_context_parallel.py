"""Strategies of context parallelism: their rows are correct, and only the table names them."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from jaxptd.context_parallel import STRATEGIES, RingKind, TokenOrder
from jaxptd.layout import Matmul2D

PACKAGE = Path(__file__).parents[1] / "jaxptd"
TABLE = "context_parallel.py"
RING = ("ring", "ring.kind")  # expressions that end like this hold a strategy's name
SHARED = {*STRATEGIES} & {*get_args(Matmul2D)}  # names with other meanings as well


def names_in(source: str) -> Iterator[str]:
    """The strategies that a file names, except in defaults of fields that hold such names.

    Names that grid matmuls also use count only in comparisons with a ring's name.
    """
    tree = ast.parse(source)
    compared = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.Match)
        and ast.unparse(getattr(node, "left", getattr(node, "subject", node))).endswith(RING)
        for part in ast.walk(node)
    }
    defaults = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "RingKind"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in STRATEGIES.keys() - SHARED:
            yield from [node.value] * (node not in defaults)
        elif isinstance(node, ast.Constant) and node in compared and node.value in SHARED:
            yield node.value


def test_only_the_table_knows_strategies_by_name() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {name for name, path in files.items() if [*names_in(path.read_text("utf-8"))]}
    assert found == {TABLE}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('if layout.ring == "rsa": pass', ["rsa"]),
        ('match ring.kind:\n case "zigzag" | "rsa": pass', ["zigzag", "rsa"]),
        ('steps = {"blockwise": 1}', ["blockwise"]),
        ('class A:\n kind: RingKind = "zigzag"', []),
        ('kind: str = "zigzag"', ["zigzag"]),
        ('if layout.ring == "gather": pass', ["gather"]),
        ('match ring.kind:\n case "gather": pass', ["gather"]),
        ('if layout.matmul2d != "gather" or each.kind == "gather": pass', []),
        ('"""In RSA and in a zigzag."""', []),
    ],
)
def test_each_way_to_ask_for_a_name_is_found(source: str, names: list[str]) -> None:
    assert [*names_in(source)] == names


def test_the_field_takes_each_strategy() -> None:
    assert get_args(RingKind) == tuple(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_each_exchange_has_a_function_and_costs(strategy) -> None:
    for each in (strategy.exchange.attend, strategy.exchange.costs):
        assert callable(getattr(importlib.import_module(each.module), each.name))


# ---- orders ----------------------------------------------------------------------------------

ORDERS = {each.order: name for name, each in STRATEGIES.items()}


def held(order: TokenOrder, length: int, devices: int) -> np.ndarray:
    """Positions of each device's tokens, `[devices, length]`."""
    split = [order.split(length, device, devices) for device in range(devices)]
    return np.array([[i + n for i, size in chunks for n in range(size)] for chunks in split])


@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("order", ORDERS, ids=ORDERS.values())
def test_an_order_is_what_it_says(order: TokenOrder, devices: int) -> None:
    position = held(order, 4, devices)
    assert sorted(position.ravel()) == list(range(4 * devices))
    gaps = (np.diff(position) > 1).sum(1) + 1
    assert gaps.max() <= order.chunks
    assert order.in_line == (position.ravel() == np.arange(4 * devices)).all()
    scores = (position[..., None] >= np.arange(4 * devices)).sum((1, 2))
    assert order.balanced == (len({*scores}) == 1)


@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("order", [each for each in ORDERS if each.chunks > 1])
def test_of_two_devices_the_two_chunks_of_one_enclose_those_of_the_other(order, devices) -> None:
    """A causal mask then leaves the same two pairs of chunks, which `attention/ring.py` visits."""
    numbers = np.array([[each(i, devices) for each in order.numbers] for i in range(devices)])
    assert numbers.shape == (devices, 2)
    assert (np.diff(numbers[:, 0]) > 0).all()
    assert (np.diff(numbers[:, 1]) < 0).all()
