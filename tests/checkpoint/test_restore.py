"""Restores one checkpoint on any mesh, bit for bit; refuses one that does not fit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import (
    DESCRIPTION,
    abstract,
    assert_same,
    make_mesh,
    make_state,
    newest,
    put,
    save,
)

from jaxptd.checkpoint import (
    CheckpointError,
    Checkpoints,
    arrays,
    manifest,
    read_description,
    restore_path,
)


def test_restores_every_bit(tmp_path):
    checkpoints = save(tmp_path / "run" / "checkpoints", 7)
    restored = checkpoints.restore(7, abstract(make_state()))
    assert_same(restored, make_state(7))
    assert restored["params"]["norm"].sharding == make_state()["params"]["norm"].sharding


def test_restores_float64(tmp_path):
    jax.config.update("jax_enable_x64", True)  # a context manager would not reach orbax's threads
    try:
        state = {"w": put(make_mesh(2, 4), np.arange(8.0) / 3, "tp")}
        assert state["w"].dtype == jnp.float64
        checkpoints = Checkpoints(tmp_path, keep=1)
        checkpoints.save(1, state, description={})
        target = abstract(state)
        assert_same(checkpoints.restore(1, target), state)
    finally:
        jax.config.update("jax_enable_x64", False)
    with pytest.raises(
        CheckpointError, match=r"w is float64, jax made it float32; call .*jax_enable_x64"
    ):
        checkpoints.restore(1, target)


@pytest.mark.parametrize("sizes", [(1, 1), (4, 2), (8, 1)])
def test_restores_onto_another_mesh(tmp_path, sizes):
    checkpoints = save(tmp_path, 3)
    target = abstract(make_state(), make_mesh(*sizes))
    target["params"]["norm"] = abstract(make_state()["params"]["norm"], make_mesh(*sizes), "dp")
    restored = checkpoints.restore(3, target)
    assert_same(restored, make_state(3))
    for got, asked in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert got.sharding == asked.sharding


def test_without_sharding_on_the_first_device(tmp_path):
    checkpoints = save(tmp_path, 3)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_state())
    restored = checkpoints.restore(3, target)
    assert_same(restored, make_state(3))
    assert restored["params"]["norm"].devices() == {jax.devices()[0]}


def test_description_and_explicit_path(tmp_path):
    checkpoints = save(tmp_path, 12)
    folder = tmp_path / "00000012"
    assert checkpoints.description(12) == DESCRIPTION | {"step": 12}
    assert read_description(folder) == DESCRIPTION | {"step": 12}
    step, state = restore_path(folder, abstract(make_state()))
    assert step == 12
    assert_same(state, make_state(12))


def test_a_moved_folder_and_a_relative_path_restore(tmp_path, monkeypatch):
    save(tmp_path / "old", 5)
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    assert newest(Path("new")) == 5
    assert save(Path("new"), 6).steps() == [5, 6]


def change(state, name, leaf):
    return state | {"params": state["params"] | {name: leaf}}


@pytest.mark.parametrize(
    ("name", "leaf", "words"),
    [
        (
            "blocks.mlp.w",
            jax.ShapeDtypeStruct((4, 16), jnp.bfloat16),
            r"is \[4, 8\] in the checkpoint, \[4, 16\] in this run",
        ),
        (
            "blocks.mlp.w",
            jax.ShapeDtypeStruct((4, 8), jnp.float32),
            "is bfloat16 in the checkpoint, float32 in this run",
        ),
        (
            "blocks.mlp.b",
            jax.ShapeDtypeStruct((8,), jnp.float32),
            "is in this run, not in the checkpoint",
        ),
        ("norm", None, "is in the checkpoint, not in this run"),
    ],
)
def test_another_model_is_refused_by_the_name_of_its_tensor(
    tmp_path, monkeypatch, name, leaf, words
):
    checkpoints = save(tmp_path, 1, 2)
    monkeypatch.setattr(arrays, "load", lambda *_, **__: pytest.fail("read before checking"))
    target = change(abstract(make_state()), name, leaf)
    for restore in (
        lambda: checkpoints.restore(2, target),
        lambda: checkpoints.restore_newest(target, report=pytest.fail),  # good, so never skipped
        lambda: restore_path(tmp_path / "00000002", target),
    ):
        with pytest.raises(
            CheckpointError, match=rf"00000002 does not fit: params\.{name} {words}"
        ):
            restore()


def test_of_many_tensors_that_differ_the_first_are_named(tmp_path):
    save(tmp_path, 1)
    more = {f"layer{i}": jax.ShapeDtypeStruct((4,), jnp.float32) for i in range(7)}
    target = abstract(make_state())
    target["params"] = {"norm": target["params"]["norm"], **more}
    with pytest.raises(CheckpointError) as caught:
        restore_path(tmp_path / "00000001", target)
    named = [f"params.layer{i} is in this run, not in the checkpoint" for i in range(5)]
    assert str(caught.value) == (
        f"checkpoint {tmp_path / '00000001'} does not fit: {'; '.join(named)}; and 3 more; "
        "use the config it was saved with"
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, "two tensors of the state are named a.b"),
        ({"a": [1.0, jnp.ones(2)]}, "a.0 of the state is a float, not a jax array"),
        ({"a": jnp.ones((0, 2))}, r"a of the state is empty \(\[0, 2\]\)"),
    ],
)
def test_what_cannot_be_saved_is_refused_first(tmp_path, state, words):
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(tmp_path / "c", keep=1).save(1, state, description={})
    assert list(tmp_path.iterdir()) == []


def test_another_format_is_not_taken_for_damage(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 2)
        save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match="00000001 has format 2, but this version of jaxptd reads 1"
    ):
        newest(tmp_path)


def test_orbax_failing_to_read_whole_files_is_not_damage(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: too little\nmemory")

    monkeypatch.setattr(arrays.ocp, "load", fail)
    with pytest.raises(
        CheckpointError,
        match=r"could not read checkpoint .*00000001: RESOURCE_EXHAUSTED: too little memory",
    ):
        newest(tmp_path)
