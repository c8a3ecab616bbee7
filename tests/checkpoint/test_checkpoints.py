"""Checkpoints: bitwise, on any mesh, and never lost whatever happens while one is written."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxptd.checkpoint import CheckpointError, Checkpoints, read_description, restore_path
from jaxptd.checkpoint import arrays as checkpoint_arrays
from jaxptd.checkpoint import checkpoints as checkpoint
from jaxptd.checkpoint import manifest as checkpoint_files
from jaxptd.checkpoint import save as checkpoint_writer

ROOT = Path(__file__).parents[2]
DESCRIPTION = {"config": {"model": {"num_layers": 2}, "source": ["a", "b"], "lr": 3e-4}}


def make_mesh(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    names = ("dp", "tp")[: len(sizes)]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def put(mesh, value, *spec):
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def make_state(seed=0, *sizes):
    """Every kind of tensor a run holds, over 2 x 4 devices; other numbers for another seed."""
    draw, mesh = np.random.default_rng(seed), make_mesh(*(sizes or (2, 4)))
    weight = draw.standard_normal((4, 8))
    return {
        "params": {
            "blocks.mlp.w": put(mesh, jnp.asarray(weight, jnp.bfloat16), None, "tp"),
            "norm": put(mesh, draw.standard_normal(8).astype(np.float32), "dp"),
        },
        "optimizer": {
            "mu": {"blocks.mlp.w": put(mesh, weight.astype(np.float32), "dp", "tp")},
            "count": put(mesh, jnp.int32(seed)),
        },
    }


def abstract(state, mesh=None, *spec):
    """What a run asks for: the state's shapes, its sharding or that of another mesh."""

    def leaf(x):
        sharding = NamedSharding(mesh, PartitionSpec(*spec[: x.ndim])) if mesh else x.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(leaf, state)


def assert_same(got, expected):
    """Names, dtypes and every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save(directory, *steps, keep=9):
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, make_state(step), description=DESCRIPTION | {"step": step})
    return checkpoints


def newest(directory, expect_reports=0):
    """Step of the newest good checkpoint, whose state must be that of `make_state(step)`."""
    reports = []
    found = Checkpoints(directory, keep=9).restore_newest(
        abstract(make_state()), report=reports.append
    )
    assert len(reports) == expect_reports, reports
    if found is not None:
        assert_same(found[1], make_state(found[0]))
    return found and found[0]


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def run_python(code, *args):
    """Runs code in another process, in which `make_state` and `save` are at hand."""
    start = f"""
        import jax, sys
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests" / "helpers")!r}]
        from tests.checkpoint.test_checkpoints import *
    """
    code = textwrap.dedent(start) + textwrap.dedent(code)
    command = [sys.executable, "-W", "error", "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


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


def test_nothing_is_created_before_the_first_save(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    assert checkpoints.steps() == []
    assert checkpoints.restore_newest(abstract(make_state()), report=pytest.fail) is None
    assert list(tmp_path.iterdir()) == []


def test_keeps_the_newest(tmp_path):
    checkpoints = save(tmp_path, 1, 20, 3, 100, keep=2)
    assert checkpoints.steps() == [20, 100]
    assert sorted(os.listdir(tmp_path)) == ["00000020", "00000100"]
    checkpoints.save(4, make_state(4), description={})  # the one just saved stays, though older
    assert checkpoints.steps() == [4, 100]


def save_losses(directory, losses, **settings):
    """A checkpoint for each step of {step: validation loss, or None}."""
    checkpoints = Checkpoints(directory, **settings)
    for step, loss in losses.items():
        described = {} if loss is None else {"validation_loss": loss}
        checkpoints.save(step, make_state(step), description=described)
    return checkpoints


def test_keeps_the_best_beyond_the_newest(tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: None, 4: 4.0, 5: 3.5, 6: None}
    checkpoints = save_losses(tmp_path / "a", losses, keep=2, keep_best=1)
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 5, 6], 2)
    checkpoints = save_losses(tmp_path / "b", losses, keep=1, keep_best=3)
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 4, 5, 6], 2)
    checkpoints = save_losses(tmp_path / "c", losses, keep=2)
    assert (checkpoints.steps(), checkpoints.best()) == ([5, 6], 5)
    checkpoints = save_losses(tmp_path / "c", {7: 1.0, 8: 1.0, 9: 2.0}, keep=1, keep_best=1)
    assert (checkpoints.steps(), checkpoints.best()) == ([8, 9], 8)  # of equal ones the newest


def test_without_a_validation_loss_there_is_no_best(tmp_path):
    checkpoints = save_losses(tmp_path, {1: None, 2: None}, keep=1, keep_best=1)
    assert (checkpoints.steps(), checkpoints.best()) == ([2], None)
    target = abstract(make_state())
    assert checkpoints.restore_best(target, report=pytest.fail) is None


def test_a_damaged_best_is_named_and_the_second_best_used(tmp_path):
    checkpoints = save_losses(tmp_path, {1: 3.0, 2: 2.0, 3: 1.0, 4: 4.0}, keep=9)
    flip_a_bit(tmp_path / "00000003")
    garble_the_manifest(tmp_path / "00000002")
    reports = []
    step, state = checkpoints.restore_best(abstract(make_state()), report=reports.append)
    assert step == 1
    assert_same(state, make_state(1))
    assert [("00000002 is damaged" in line, "00000003 is damaged" in line) for line in reports] == [
        (True, False),
        (False, True),
    ]
    assert checkpoints.best() == 1


def test_later_steps_are_set_aside_and_stay(tmp_path):
    checkpoints = save(tmp_path, 1, 2, 3)
    reports = []
    checkpoints.set_aside_after(1, report=reports.append)
    assert checkpoints.steps() == [1]
    assert [line.rpartition("/")[2] for line in reports] == ["00000002.aside", "00000003.aside"]
    save(tmp_path, 2)
    checkpoints.set_aside_after(1, report=reports.append)
    assert reports[-1].endswith("00000002.aside2")
    (tmp_path / "00000002.aside").rename(tmp_path / "00000002")  # a person may bring one back
    assert newest(tmp_path) == 2


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = save(tmp_path, 1, 2)
    checkpoints.save(2, make_state(99), description={"again": True})
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]
    assert_same(checkpoints.restore(2, abstract(make_state())), make_state(99))
    assert checkpoints.description(2) == {"again": True}


def truncate(folder):
    with open(largest_file(folder / "arrays"), "r+b") as file:
        file.truncate(100)


def flip_a_bit(folder):
    path = largest_file(folder / "arrays")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove_a_file(folder):
    largest_file(folder / "arrays").unlink()


def remove_the_arrays(folder):
    shutil.rmtree(folder / "arrays")


def remove_the_manifest(folder):
    (folder / "manifest.json").unlink()


def garble_the_manifest(folder):
    (folder / "manifest.json").write_bytes(b"\xff\x00{")


def cut_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def change_the_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))


def empty_the_manifest(folder):
    (folder / "manifest.json").write_text("[]")


DAMAGE = {
    truncate: "has 100 bytes, not",
    flip_a_bit: "was changed",
    remove_a_file: "is missing",
    remove_the_arrays: "is missing",
    remove_the_manifest: "manifest.json is missing",
    garble_the_manifest: "manifest.json is not a manifest",
    cut_the_manifest: "manifest.json is not a manifest",
    change_the_manifest: "manifest.json was changed",
    empty_the_manifest: "manifest.json is not a manifest",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path, damage):
    checkpoints = save(tmp_path, 1, 2)
    damage(tmp_path / "00000002")
    reports = []
    step, state = checkpoints.restore_newest(abstract(make_state()), report=reports.append)
    assert step == 1
    assert_same(state, make_state(1))
    assert len(reports) == 1
    assert "\n" not in reports[0]
    assert "00000002" in reports[0]
    assert DAMAGE[damage] in reports[0]
    with pytest.raises(CheckpointError, match=f"00000002 is damaged: .*{DAMAGE[damage]}"):
        checkpoints.restore(2, abstract(make_state()))


def test_every_bit_flipped_in_the_manifest_is_seen(tmp_path):
    save(tmp_path, 1)
    path = tmp_path / "00000001" / "manifest.json"
    good = path.read_bytes()
    for at in range(0, len(good), 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        if good[at : at + 1].isspace():
            continue
        with pytest.raises(CheckpointError, match=r"00000001 is damaged: manifest\.json"):
            read_description(path.parent)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_every_file_matters(tmp_path, damage):
    """Each of them cut short, or one of its bytes changed: refused by name."""
    save(tmp_path, 1, 2)
    target, folder = abstract(make_state()), tmp_path / "00000002"
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert len(paths) > 5
    checkpoints = Checkpoints(tmp_path, keep=9)
    with pytest.MonkeyPatch.context() as patch:
        # What is good is read once, at the end: here only which one is.
        patch.setattr(checkpoint, "_load", lambda path, _: path.name)
        for number, path in enumerate(paths):
            good = path.read_bytes()
            at = number * 7919 % max(1, len(good))
            flipped = good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] if good else b"?"
            path.write_bytes(flipped if damage == "flip" else good[: len(good) // 2])
            if path.read_bytes() == good:
                continue  # an empty file cannot be cut
            reports = []
            found = checkpoints.restore_newest(target, report=reports.append)
            assert found == "00000001", path
            assert len(reports) == 1
            name = path.relative_to(folder).as_posix()
            assert f"00000002 is damaged: {name} " in reports[0]
            path.write_bytes(good)
        assert checkpoints.restore_newest(target, report=pytest.fail) == "00000002"


def test_all_damaged_is_none_after_naming_each(tmp_path):
    save(tmp_path, 1, 2)
    for folder in tmp_path.iterdir():
        flip_a_bit(folder)
    assert newest(tmp_path, expect_reports=2) is None


def test_a_damaged_checkpoint_neither_counts_nor_is_deleted(tmp_path):
    checkpoints = save(tmp_path, 1, 2, 3, keep=3)
    flip_a_bit(tmp_path / "00000003")
    remove_the_manifest(tmp_path / "00000002")
    assert checkpoints.steps() == [1, 3]
    found = checkpoints.restore_newest(abstract(make_state()), report=lambda line: None)
    assert found[0] == 1
    for step in (4, 5, 6):
        checkpoints.save(step, make_state(step), description={})
    assert sorted(map(int, os.listdir(tmp_path))) == [2, 3, 4, 5, 6]
    checkpoints.save(3, make_state(3), description={})  # saved again it is as good as any
    assert_same(checkpoints.restore(3, abstract(make_state())), make_state(3))
    checkpoints.save(7, make_state(7), description={})  # and as old
    assert sorted(map(int, os.listdir(tmp_path))) == [2, 5, 6, 7]


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
    monkeypatch.setattr(checkpoint_arrays, "load", lambda *_: pytest.fail("read before checking"))
    target = change(abstract(make_state()), name, leaf)
    for restore in (
        lambda: checkpoints.restore(2, target),
        lambda: checkpoints.restore_newest(target, report=pytest.fail),  # good: never skipped
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


def test_a_step_or_path_that_is_not_there(tmp_path):
    checkpoints = save(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 in .*it has steps 1"):
        checkpoints.restore(2, abstract(make_state()))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere"):
        read_description(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="c is not a checkpoint; name a folder such as"):
        restore_path(tmp_path / "c", abstract(make_state()))
    with pytest.raises(CheckpointError, match=r"checkpoint.keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_another_format_is_not_taken_for_damage(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "FORMAT", 2)
        save(tmp_path, 1)
    with pytest.raises(
        CheckpointError, match="00000001 has format 2, this version of jaxptd reads 1"
    ):
        newest(tmp_path)


def test_other_things_in_the_directory_are_left_alone(tmp_path):
    names = ["notes.txt", "5", "000000001x", ".cache", ".partial"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "00000009").write_text("a file")
    assert save(tmp_path, 1, 2, keep=1).steps() == [2]
    assert newest(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "00000002", "00000009"])


@pytest.mark.parametrize("place", ["before", "arrays", "files", "manifest", "rename"])
def test_a_full_disk_leaves_the_previous_ones(tmp_path, monkeypatch, place):
    checkpoints = save(tmp_path, 1, 2)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner, name = {
        "before": (Path, "mkdir"),
        "arrays": (checkpoint_writer, "ArraysBeingWritten"),
        "files": (os, "fsync"),
        "manifest": (Path, "write_text"),
        "rename": (Path, "rename"),
    }[place]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, 3)
    assert str(caught.value) == (
        f"could not save step 3 in {tmp_path}: No space left on device; "
        "the last good checkpoint is step 2"
    )
    assert checkpoints.steps() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]
    assert newest(tmp_path) == 2
    assert save(tmp_path, 3).steps() == [1, 2, 3]


def test_a_real_write_that_fails_is_one_line(tmp_path):
    """Files may not grow beyond a size, small to large: orbax fails at another place each time."""
    code = """
        import resource
        save(Path(sys.argv[1]), 1)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for size in (0, 100, 200, 500, 1000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            try:
                save(Path(sys.argv[1]), 2)
            except CheckpointError as error:
                print(error)
            assert os.listdir(sys.argv[1]) == ["00000001"], os.listdir(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert newest(Path(sys.argv[1])) == 1
    """
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    line = (
        f"could not save step 2 in {tmp_path}: File too large; the last good checkpoint is step 1"
    )
    assert done.stdout.splitlines() == [line] * 5
    assert done.stderr == ""
    assert newest(tmp_path) == 1


def refuse(*_, **__):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"file.*: Not a directory"):
            save(directory, 1)
    monkeypatch.setattr(Path, "mkdir", refuse)
    words = "could not save step 1 in .*: Permission denied; the last good checkpoint is none"
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path / "c", 1)


def test_old_checkpoints_that_cannot_be_deleted(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 1, keep=1)
    monkeypatch.setattr(Path, "rename", refuse_to_move("00000001"))
    with pytest.raises(
        CheckpointError, match=r"saved step 2 .*could not delete the old step 1: Permission denied"
    ):
        checkpoints.save(2, make_state(2), description={})
    assert checkpoints.steps() == [1, 2]
    assert newest(tmp_path) == 2


def refuse_to_move(name):
    """Path.rename that refuses to move `name`."""
    rename = Path.rename

    def guarded(self, to):
        if self.name == name:
            refuse()
        return rename(self, to)

    return guarded


class Watcher:
    """Copies a directory each time something in it is about to change: what a kill there leaves."""

    def __init__(self, monkeypatch, directory, copies):
        self.directory, self.copies = directory, copies
        for owner, name in [(os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "write_text")]:
            monkeypatch.setattr(owner, name, self.first(getattr(owner, name)))
        for owner, name in [(checkpoint_arrays.ocp, "save_async"), (checkpoint_files, "remove")]:
            monkeypatch.setattr(owner, name, self.first(getattr(owner, name)))

    def first(self, function):
        def watched(*args, **kwargs):
            self.copy()
            return function(*args, **kwargs)

        return watched

    def copy(self):
        if self.directory.exists():
            shutil.copytree(self.directory, self.copies / f"{len(os.listdir(self.copies)):04d}")


@pytest.mark.parametrize(("steps", "saved"), [((1,), 2), ((1, 2), 2), ((2,), 2), ((1, 2), 3)])
def test_killed_anywhere_the_previous_or_the_new_one_restores(tmp_path, monkeypatch, steps, saved):
    save(tmp_path / "run", *steps)
    (tmp_path / "copies").mkdir()
    with monkeypatch.context() as patch:
        watcher = Watcher(patch, tmp_path / "run", tmp_path / "copies")
        save(tmp_path / "run", saved, keep=2)
        watcher.copy()
    found = []
    for copy in sorted((tmp_path / "copies").iterdir()):
        found.append(newest(copy))
        assert found[-1] in (steps[-1], saved)
    assert len(found) > 15
    assert found == sorted(found)
    assert found[-1] == saved
    for copy in sorted((tmp_path / "copies").iterdir())[::3]:  # and a run goes on from there
        after = save(copy, 4, keep=2).steps()
        assert after[-1] == 4
        assert sorted(os.listdir(copy)) == [f"{step:08d}" for step in after]
        assert newest(copy) == 4


def test_a_step_killed_while_it_was_replaced_outlives_a_failing_save(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, 2)
    (tmp_path / "00000002").rename(tmp_path / ".00000002.replaced")
    assert checkpoints.steps() == [2]
    assert newest(tmp_path) == 2
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, "ArraysBeingWritten", refuse)
        with pytest.raises(CheckpointError, match="the last good checkpoint is step 2"):
            save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["00000002"]
    assert newest(tmp_path) == 2


@pytest.mark.parametrize(
    "moment",
    ["checkpoint_arrays.ocp.save_async", "checkpoint_files.seal", "checkpoint_files.sync_folder"],
)
def test_sigkill(tmp_path, moment):
    """Killed with nothing saved but step 1: before, inside and at the end of saving step 2."""
    code = """
        import operator, signal, threading, jaxptd
        save(Path(sys.argv[1]), 1)
        *owner, name = sys.argv[2].split(".")
        owner = operator.attrgetter(".".join(owner))(jaxptd)
        function = getattr(owner, name)
        def killed(*args):
            threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
            return function(*args)
        setattr(owner, name, killed)
        while True:
            save(Path(sys.argv[1]), 2)
    """
    done = run_python(code, tmp_path, moment, 0.005)
    assert done.returncode == -9, done.stderr
    assert newest(tmp_path) in (1, 2)
    after = save(tmp_path, 3)
    assert after.steps() in ([1, 3], [1, 2, 3])
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_no_log_lines(tmp_path, capfd):
    level = logging.getLogger("absl").level
    checkpoints = save(tmp_path, 1, 2)
    checkpoints.restore(2, abstract(make_state(), make_mesh(8, 1)))
    remove_the_arrays(tmp_path / "00000002")
    assert newest(tmp_path, expect_reports=1) == 1
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert logging.getLogger("absl").level == level


def test_orbax_failing_to_read_whole_files_is_not_damage(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(*_):
        raise ValueError("RESOURCE_EXHAUSTED: too little\nmemory")

    monkeypatch.setattr(checkpoint_arrays.ocp, "load", fail)
    with pytest.raises(
        CheckpointError,
        match=r"could not read checkpoint .*00000001: RESOURCE_EXHAUSTED: too little memory",
    ):
        newest(tmp_path)


def test_importing_starts_no_device():
    """A run sets the number of simulated devices after its imports, before the first of them."""
    code = """if True:
        from jaxptd.checkpoint import checkpoints as checkpoint
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 5)
        assert len(jax.devices()) == 5
    """
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
