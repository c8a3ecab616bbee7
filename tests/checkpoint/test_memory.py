"""States kept on the hosts themselves: their files, and what a start finds of them."""

import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpointing import (
    DESCRIPTION,
    abstract,
    assert_same,
    assert_same_shards,
    disk_full,
    make_mesh,
    make_state,
    put,
)

from jaxptd.checkpoint import CheckpointError, memory, shards
from jaxptd.checkpoint.blocks import own_blocks
from jaxptd.checkpoint.memory import Memory, Written, forget, partner_of
from jaxptd.distributed import coordination

TARGET = [((2, 4), ("dp", "tp")), ((4,), ("dp",)), ((2, 1), ("tp", "dp")), ((8,), ())]


@pytest.fixture
def kept(tmp_path):
    """Starts a run's memory; each call is another start of the run."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    hosts = tmp_path / "memory"
    hosts.mkdir()
    warned = []

    def start(*, restore: bool = True, after: int = -1, target=None):
        each = Memory(hosts, run_dir, warn=warned.append)
        each.reports, each.warned = [], warned
        each.found = None
        if restore:
            target = target or abstract(make_state())
            each.found = each.restore_newest(target, after=after, report=each.reports.append)
        each.begin()
        return each

    return start


def keep(each: Memory, *steps: int) -> None:
    for step in steps:
        each.save_async(step, make_state(step), description=DESCRIPTION | {"step": step})
    each.wait()


def names(each: Memory) -> list[int]:
    return sorted({int(path.name.partition(".")[0]) for path in each.folder.iterdir()})


@pytest.mark.parametrize(("sizes", "spec"), TARGET)
def test_any_layout_gets_every_bit(kept, sizes, spec):
    keep(kept(), 7)
    wanted = abstract(make_state(), make_mesh(*sizes), *spec)
    found = kept(target=wanted).found
    assert (found.step, found.description) == (7, DESCRIPTION | {"step": 7})
    assert_same(found.state, make_state(7))
    for x, y in zip(jax.tree.leaves(found.state), jax.tree.leaves(wanted), strict=True):
        assert x.sharding == y.sharding


def test_a_state_may_be_donated_at_once(kept):
    each, state = kept(), make_state(3)
    each.save_async(3, state, description={})
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    jax.block_until_ready(add(state))
    each.wait()
    assert_same(kept().found.state, make_state(3))


def test_each_block_is_written_once(kept):
    each = kept()
    keep(each, 1)
    (path,) = each.folder.iterdir()
    pieces = shards.Shards([shards.reader(path)], "file").pieces
    state = make_state()
    sizes = {
        f"params.{name}": x.nbytes for name, x in state["params"].items()
    }  # on all devices or on a part of them, a byte is in one piece
    for name, size in sizes.items():
        assert sum(piece.size for piece in pieces if piece.name == name) == size


def test_the_two_newest_are_kept_until_all_have_a_newer_one(kept, monkeypatch):
    each = kept()
    monkeypatch.setattr(each, "_written_everywhere", lambda: -1)
    keep(each, 2, 4, 6, 8)
    assert names(each) == [4, 6, 8]  # another may still write 4 until this one begins 10
    monkeypatch.setattr(each, "_written_everywhere", lambda: 8)
    keep(each, 10)
    assert names(each) == [8, 10]
    keep(each, 12, 14, 16)  # another one fails
    assert names(each) == [8, 12, 14, 16]
    monkeypatch.undo()
    keep(each, 18)
    assert names(each) == [18]


@pytest.fixture
def said(monkeypatch):
    """What the processes of a run of two have said, the second one by hand."""
    values = {"1": "[]"}

    def put(key, value):
        values[key.partition("/")[2]] = value

    monkeypatch.setattr(coordination, "is_alone", lambda: False)
    monkeypatch.setattr(coordination, "put", put)
    monkeypatch.setattr(coordination, "get_all", lambda folder: values)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(memory, "run_on_all", lambda name, work: [work(), None])
    monkeypatch.setattr(memory, "run_on_first", lambda name, work: work())
    monkeypatch.setattr(Memory, "_world", (["a", "b"], ["", "there"], None))
    return values


def test_a_state_that_one_process_lacks_replaces_none(kept, said, monkeypatch):
    """This process failed to write step 4, which the other one has."""
    each = kept(restore=False)
    keep(each, 2)
    said["1"] = "[2]"
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write", disk_full)
        keep(each, 4)
    said["1"] = "[2, 4]"
    keep(each, 6)
    assert names(each) == [2, 6]
    assert said["0"] == "[2, 6]"
    said["1"] = "[4, 6]"
    keep(each, 8)
    assert names(each) == [6, 8]


def test_without_its_partner_a_process_keeps_no_more(kept, said, monkeypatch):
    class Gone:
        def put(self, address, path):
            raise ConnectionRefusedError

        def close(self):
            pass

    monkeypatch.setattr(Memory, "_world", (["a", "b"], ["", "there"], Gone()))
    each = kept(restore=False)
    keep(each, 2, 4, 6, 8, 10)
    assert names(each) == [6, 8, 10]
    assert "0" not in said  # nothing that a loss of this host would leave
    (line,) = each.warned
    assert "could not keep a state" in line


def test_what_all_have_goes_before_a_state_is_written(kept, monkeypatch):
    """So a host needs room for two states, not three."""
    each = kept()
    monkeypatch.setattr(each, "_written_everywhere", lambda: 2)
    keep(each, 2, 4)
    assert names(each) == [2, 4]
    monkeypatch.setattr(each, "_written_everywhere", lambda: 4)  # the other one has caught up
    seen = []
    write = shards.write

    def noted(*given):
        seen.append(names(each))
        write(*given)

    monkeypatch.setattr(shards, "write", noted)
    keep(each, 6)
    assert seen == [[4]]


def test_a_start_keeps_what_it_restored_until_it_has_written(kept):
    keep(kept(), 5)
    again = kept()
    assert names(again) == [5]
    assert kept().found.step == 5  # it died before it had written anything
    last = kept()
    keep(last, 10)
    assert names(last) == [10]
    assert kept().found.step == 10


def test_a_start_that_restores_something_else_deletes_the_rest(kept):
    keep(kept(), 5)
    assert kept(after=5).found is None
    assert kept().found is None
    keep(kept(), 5)
    assert kept(restore=False).folder.exists()
    assert kept().found is None


def test_files_of_two_starts_never_mix(kept):
    """One process of the first start and another of the second have written step 5."""
    first = kept()
    keep(first, 5)
    (path,) = first.folder.iterdir()
    written = memory._parsed(path.name)[0]
    path.rename(path.with_name(Written(5, written.start, 2).file(0)))
    shutil.copy(
        path.with_name(Written(5, written.start, 2).file(0)),
        path.with_name(Written(5, "00000000", 2).file(1)),
    )
    assert kept().found is None


def test_another_run_in_the_directory_is_ignored(kept, tmp_path):
    first = kept()
    keep(first, 5)
    (old,) = first.folder.iterdir()
    shutil.copy(old, tmp_path)
    shutil.rmtree(first._run_dir)
    first._run_dir.mkdir()
    assert kept().found is None
    shutil.copy(tmp_path / old.name, first.folder)  # it was on a host that was away meanwhile
    assert kept().found is None
    keep(kept(), 6)
    forget(first._run_dir)
    assert kept().found is None


def damaged(path: Path, change: str) -> None:
    data = bytearray(path.read_bytes())
    if change == "cut":
        path.write_bytes(data[:-1])
    else:
        data[{"first byte": 0, "header": 60, "last byte": -1}[change]] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("change", ["first byte", "header", "last byte", "cut"])
def test_a_damaged_state_is_never_taken(kept, change, monkeypatch):
    each = kept()
    monkeypatch.setattr(each, "_written_everywhere", lambda: -1)
    keep(each, 5, 10)
    newest = max(each.folder.iterdir())
    damaged(newest, change)
    again = kept()
    assert again.found.step == 5
    assert_same(again.found.state, make_state(5))
    in_data = change in ("last byte", "cut")  # a header that is none is no state's
    assert len(again.reports) == in_data
    assert again.reports == [line for line in again.reports if line.endswith("; skipped")]


def test_of_two_copies_a_good_one_is_read(kept, tmp_path):
    each = kept()
    keep(each, 5)
    (path,) = each.folder.iterdir()
    copy = tmp_path / "copy"
    shutil.copy(path, copy)
    damaged(path, "last byte")
    missing = tmp_path / "missing"
    files = shards.Shards([shards.reader(each) for each in (missing, path, copy)], "file")
    assert len([files.piece(piece) for piece in files.pieces]) == len(files.pieces)


def test_a_block_that_is_in_no_file_is_noticed(tmp_path):
    x = put(make_mesh(4), np.arange(8.0, dtype=np.float32), "dp")
    blocks = list(own_blocks({"x": x}))
    shards.write(tmp_path / "file", {}, blocks[1:])
    whole = shards.Assembly([shards.Shards([shards.reader(tmp_path / "file")], "file")], "it")
    with pytest.raises(CheckpointError, match="it is damaged: a part of x is missing"):
        whole.array("x", jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding))


def test_another_model_is_refused(kept):
    keep(kept(), 5)
    state = make_state()
    state["params"]["norm"] = jnp.zeros(9)
    with pytest.raises(CheckpointError, match=r"params.norm is \[8\] in the checkpoint, \[9\]"):
        kept(target=abstract(state))


def test_a_full_disk_is_a_warning_once_and_the_older_state_stays(kept, monkeypatch):
    each = kept()
    keep(each, 5)
    with monkeypatch.context() as patch:
        patch.setattr(shards, "write", disk_full)
        keep(each, 10)
        keep(each, 15)
    (line,) = each.warned
    assert "could not keep a state" in line
    assert "No space left on device" in line
    assert names(each) == [5]
    keep(each, 20)
    assert names(each) == [20]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    x = put(make_mesh(1), np.zeros(4, np.float32))
    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OSError, match="No space"):
        shards.write(tmp_path / "file", {}, list(own_blocks({"x": x})))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", ["missing", "file"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, bad):
    (tmp_path / "file").touch()
    each = Memory(tmp_path / bad, tmp_path, warn=pytest.fail)
    with pytest.raises(CheckpointError, match=r"checkpoint.memory_dir=.*; name a folder in mem"):
        each.begin()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CheckpointError, match="it belongs to another user"):
        Memory(tmp_path, tmp_path, warn=pytest.fail).begin()


@pytest.mark.parametrize(
    ("places", "partners"),
    [
        ("a", [None]),
        ("aaa", [None, None, None]),
        ("ab", [1, 0]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aab", [2, 2, 0]),
    ],
)
def test_a_partner_is_on_another_host(places, partners):
    assert [partner_of(places, rank) for rank in range(len(places))] == partners


def test_shards_are_those_of_the_state(kept):
    keep(kept(), 4)
    assert_same_shards(kept().found.state, make_state(4))
