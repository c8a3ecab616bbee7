"""Communication, memory and saved state of optimizers that need whole matrices."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd.analysis import memory_model
from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.count import count, count_compiled, formula
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.costs.collective import ALL_TO_ALL, subtract
from jaxptd.mesh import Layout
from jaxptd.optimizers.moments import is_orthogonalised
from jaxptd.step import Program
from jaxptd.step.optimizer import DIRECTIONS

NAMES = ["muon", "adafactor"]
QWEN = {"family": "qwen3", "num_kv_heads": 2, "tie_embeddings": False}
ODD = {"num_heads": 3, "hidden_size": 15, "ffn_hidden_size": 23}

COSTS = [
    slow(Layout(tp=4), {}, "muon"),
    (Layout(ep=2, tp=2, zero=1), {}, "adafactor"),
    slow(Layout(ep=3, cp=2, zero=1), {"batch": 12}, "adafactor"),
    slow(Layout(dp=2, row=2, col=2, zero=2), {}, "muon"),
    slow(Layout(row=2, col=2, attention2d="blocks"), ODD, "muon"),
    slow(Layout(row=2, col=2, attention2d="blocks"), ODD, "adafactor"),
    slow(Layout(dp=2, tp=4, zero=3), QWEN, "muon"),
    slow(Layout(dp=2, tp=4, zero=3), QWEN, "adafactor"),
    slow(Layout(pp=2, ep=2, tp=2, zero=1), {"num_layers": 5, "tie_embeddings": False}, "muon"),
    slow(Layout(pp=2, row=2, col=2), {"num_layers": 4}, "adafactor"),
]


@pytest.mark.parametrize(("layout", "choice", "name"), COSTS, ids=str)
def test_the_jaxpr_moves_what_the_formula_says(layout, choice, name) -> None:
    found = tiny.program(layout, optimizer=name, **choice)
    assert subtract(count(found), formula(found)) == []


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        slow(Layout(dp=2, tp=2, zero=1), "muon"),
        slow(Layout(row=2, col=2), "muon"),
        slow(Layout(dp=2, tp=2, zero=2), "adafactor"),
    ],
    ids=str,
)
def test_the_compiled_program_moves_the_same_bytes(layout, name) -> None:
    found = tiny.program(layout, optimizer=name, micro_batches=1)
    compiled = {(c.kind, c.axes): c.bytes for c in count_compiled(found, CPU_OPTIONS)}
    assert compiled == {(c.kind, c.axes): c.bytes for c in count(found)}


def test_each_device_is_dealt_its_share_of_the_matrices() -> None:
    """Eight layers over ep=2 x tp=2: each device receives a quarter on the way there and back."""
    found = tiny.program(Layout(ep=2, tp=2, zero=1), optimizer="muon", num_layers=8)
    matrices = [i for i in found.infos.values() if is_orthogonalised(i)]
    quarter = sum(4 * np.prod(info.shape) for info in matrices) // 4
    moved = {c.axes: c for c in count(found) if c.kind == ALL_TO_ALL}
    assert {axes: c.bytes for axes, c in moved.items()} == {
        ("ep",): 2 * quarter,
        ("tp",): 2 * quarter,
    }
    assert {c.count for c in moved.values()} == {2 * len(matrices)}


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize(
    "layout", [Layout(dp=2, row=2, col=2, zero=1), Layout(pp=2, tp=2)], ids=str
)
def test_memory_counts_the_moments(layout, name) -> None:
    found = tiny.program(layout, optimizer=name)
    counted = memory_model.state(found.config, found.resolved.zero)
    moments = [x for x in jax.tree.leaves(found.abstract_state["optimizer"]) if x.ndim]
    shards = (x.sharding.shard_shape(x.shape) for x in moments)
    assert counted["optimizer"] == sum(4 * int(np.prod(shape)) for shape in shards)


# ---- saved and restored ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_state_of_any_layout_becomes_that_of_any_other(name) -> None:
    """Canonical moments have the same names and shapes as on one device."""
    one, grid = (
        tiny.program(Layout(), optimizer=name),
        tiny.program(Layout(dp=2, row=2, col=2, zero=1), optimizer=name),
    )
    target = abstract_canonical(one)
    shapes = {n: x.shape for n, x in target["optimizer"].items()}
    assert shapes == {n: x.shape for n, x in abstract_canonical(grid)["optimizer"].items()}
    rng = np.random.default_rng(0)
    saved = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), target)
    placed = jax.tree.map(
        lambda x, t: jax.device_put(x, t.sharding), saved, abstract_canonical(grid)
    )
    found = to_canonical(grid, from_canonical(grid, placed))["optimizer"]
    for moment, x in saved["optimizer"].items():
        np.testing.assert_array_equal(found[moment], x, err_msg=moment)


def test_names_of_moments_are_the_matrices_rows_and_columns() -> None:
    found = abstract_canonical(tiny.program(Layout(), optimizer="adafactor", **QWEN))["optimizer"]
    shapes = {n.partition("nu.")[2]: x.shape for n, x in found.items() if "blocks.mlp.up" in n}
    assert shapes == {
        "blocks.mlp.up.w.rows": (2, 16, 2),
        "blocks.mlp.up.w.columns": (2, 2, tiny.MODEL.mlp_size),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_leaves_every_moment_as_it_was(name) -> None:
    """Uses float16, whose loss is scaled."""
    found = tiny.program(Layout(dp=2, tp=2, zero=1), optimizer=name)
    config = dataclasses.replace(
        found.config, model=dataclasses.replace(tiny.MODEL, dtype="float16")
    )
    taken = Program(config, found.mesh)
    optimizer = dataclasses.replace(config.optimizer, skip_above=1e-9)
    skipping = Program(dataclasses.replace(config, optimizer=optimizer), found.mesh)
    state, _ = taken.train_step(taken.init_state(), tiny.batch())
    before = jax.tree.map(np.asarray, state["optimizer"])
    after, metrics = skipping.train_step(state, tiny.batch())
    assert int(metrics["skipped"]) == 1
    for old, new in zip(*map(jax.tree.leaves, (before, after["optimizer"])), strict=True):
        np.testing.assert_array_equal(new, old)
    assert any(x.any() for x in jax.tree.leaves(before))
