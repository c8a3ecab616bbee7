"""Canonical form: the same on every layout; converting to it and back keeps every bit."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from turns import slow

from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical, to_canonical
from jaxptd.commands.command_line import load_config
from jaxptd.mesh import make_mesh
from jaxptd.step import Program
from jaxptd.step.state import DEVICE, HOST

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"
VOCAB = 257  # padded to 258 over tp=2, to 260 over tp=4

ONE = ()
TP2 = ("--layout.tp=2", "--layout.sequence_parallel=true")
TP4 = ("--layout.tp=4", "--layout.dp=2")
PP2 = ("--layout.pp=2", "--layout.tp=2", "--layout.stage_layers=[2,3]")
LOOP = ("--layout.pp=2", "--layout.dp=2", "--layout.schedule=interleaved")
V = ("--layout.pp=2", "--layout.row=2", "--layout.col=2", "--layout.schedule=zb-v")
ZERO = ("--layout.dp=4", "--layout.tp=2", "--layout.zero=3")
TILES = ("--layout.tp=2", "--model.vocab_multiple=128")
ALL = {
    "one": ONE,
    "tiles": TILES,
    "tp2": TP2,
    "tp4": TP4,
    "pp2": PP2,
    "loop": LOOP,
    "v": V,
    "zero": ZERO,
}
SLOW = ("one", "tiles", "tp2", "tp4", "pp2", "loop", "zero")  # similar to others
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [(slow if name in SLOW else pytest.param)(layout, id=name) for name, layout in ALL.items()],
)
LAYERS = 5
SIZES = (f"--model.vocab_size={VOCAB}", f"--model.num_layers={LAYERS}", "--model.dropout=0")
# Which layer each row of a stack holds; the second of the four parts has two layers.
ROWS = {"pp2": [0, 1, None, 2, 3, 4], "loop": [0, None, 3, None, 1, 2, 4, None]}
ROWS["v"] = [0, None, 4, None, 1, 2, 3, None]


@functools.cache
def make_program(layout: tuple[str, ...]) -> Program:
    config = load_config(CONFIG, [*SIZES, *layout])
    return Program(config, make_mesh(config.layout))


@functools.cache
def numbers() -> dict:
    """Random values in canonical form, shared by all layouts; the moments are not zero."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: (7 * draw.random(x.shape)).astype(x.dtype), abstract_canonical(make_program(ONE))
    )


@functools.cache
def drawn(layout: tuple[str, ...]) -> dict:
    """State of a layout with the values of `numbers`."""
    program = make_program(layout)
    return from_canonical(program, on_mesh(program, numbers()))


def on_mesh(program: Program, canonical: dict) -> dict:
    """Places values on the program's mesh, as restoring a checkpoint does."""
    target = abstract_canonical(program)
    return jax.tree.map(lambda x, t: jax.device_put(np.asarray(x), t.sharding), canonical, target)


def assert_same(found: dict, expected: dict) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def description(tree: dict) -> dict:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, x.dtype) for path, x in named}


@LAYOUTS
def test_names_and_shapes_are_those_of_one_device(layout):
    expected = description(abstract_canonical(make_program(ONE)))
    assert description(abstract_canonical(make_program(layout))) == expected
    assert description(to_canonical(make_program(layout), drawn(layout))) == expected


def test_names_are_paths_a_person_can_read():
    canonical = abstract_canonical(make_program(TP4))
    assert set(canonical) == {"params", "optimizer", "step", "guard"}
    assert canonical["params"]["tokens.table"].shape == (VOCAB, 16)
    moments = [name for name in canonical["optimizer"] if name.endswith("blocks.mlp.up.w")]
    assert sorted(name.split(".")[1] for name in moments) == ["mu", "nu"]
    assert not any(mark in name for name in canonical["optimizer"] for mark in "[]'")


@LAYOUTS
def test_there_and_back(layout):
    program, state = make_program(layout), drawn(layout)
    canonical = to_canonical(program, state)
    assert_same(canonical, numbers())
    back = from_canonical(program, canonical)
    assert_same(back, state)
    shardings = jax.tree.map(
        lambda x, y: x.sharding.is_equivalent_to(y.sharding, x.ndim), *[back, state]
    )
    assert all(jax.tree.leaves(shardings))


@LAYOUTS
def test_from_any_layout_to_any_other(layout):
    """A state of tp4, converted to another layout and back, is unchanged."""
    saved = to_canonical(make_program(TP4), drawn(TP4))
    program = make_program(layout)
    state = from_canonical(program, on_mesh(program, saved))
    assert_same(to_canonical(program, state), numbers())
    held = program.states.stored["tokens.table"].stored_shape
    assert state["params"]["tokens.table"].shape == held


@pytest.mark.parametrize(
    ("layout", "shards"), [(TP4, 4), slow(ZERO, 8), (PP2, 4)], ids=["tp4", "zero", "pp2"]
)
def test_what_is_a_copy_lies_in_host_memory_cut_as_the_state_is(layout, shards):
    """Sharding uses all axes that shard the state, along dims that are not padded."""
    program = make_program(layout)
    found = to_canonical(program, drawn(layout))
    want = abstract_canonical(program)
    for name, stored in program.states.stored.items():
        x = found["params"][name]
        assert x.sharding.is_equivalent_to(want["params"][name].sharding, x.ndim)
        assert x.sharding.memory_kind == (DEVICE if stored.is_canonical else HOST)
    copies = [name for name, stored in program.states.stored.items() if not stored.is_canonical]
    assert "tokens.table" in copies
    shard = found["params"]["tokens.table"].addressable_shards[0].data
    assert shard.shape == (VOCAB, 16 // shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rows"), [(TP2, 258), (TP4, 260), (TILES, 512)], ids=["tp2", "tp4", "tiles"]
)
def test_padding_stays_zero_while_training(layout, rows):
    program, draw = make_program(layout), np.random.default_rng(0)
    state, tokens = program.init_state(), draw.integers(0, VOCAB, (8, 17)).astype(np.int32)
    for _ in range(2):
        state, _ = program.train_step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
    named = jax.tree_util.tree_leaves_with_path(state)
    tables = [(path, x) for path, x in named if "tokens.table" in jax.tree_util.keystr(path)]
    assert len(tables) == 3  # a parameter and its two moments
    for path, x in tables:
        assert x.shape == (rows, 16)
        assert np.abs(x[:VOCAB]).sum(axis=1).all(), path
        np.testing.assert_array_equal(x[VOCAB:], 0.0, err_msg=str(path))


@pytest.mark.parametrize("name", [slow("pp2"), slow("loop"), "v"])
def test_layers_lie_where_their_part_is_and_rows_left_over_are_zero(name):
    program, state = make_program(ALL[name]), drawn(ALL[name])
    rows, canonical = ROWS[name], numbers()["params"]
    for key, held in state["params"].items():
        info = program.infos[key]
        assert info.stack == ("blocks" if key.startswith("blocks.") else None)
        if info.stack:
            assert held.shape[0] == len(rows)
            assert not info.is_canonical
            for x, layer in zip(np.asarray(held), rows, strict=True):
                want = 0 if layer is None else np.asarray(canonical[key])[layer]
                np.testing.assert_array_equal(x, want, err_msg=key)
