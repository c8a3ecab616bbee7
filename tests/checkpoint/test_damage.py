"""Damaged checkpoints are named, skipped and left in place."""

import os

import pytest
from checkpointing import abstract, assert_same, make_state, newest, save
from damage import DAMAGE, flip_a_bit, remove_the_manifest

from jaxptd.checkpoint import CheckpointError, Checkpoints, read_description, saving


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
    """Truncates each file, or changes one byte of it; the error names the file."""
    save(tmp_path, 1, 2)
    target, folder = abstract(make_state()), tmp_path / "00000002"
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert len(paths) > 5
    checkpoints = Checkpoints(tmp_path, keep=9)
    with pytest.MonkeyPatch.context() as patch:
        # This test only checks which checkpoint is chosen, so it reads no arrays.
        patch.setattr(saving, "load", lambda path, _: path.name)
        for number, path in enumerate(paths):
            good = path.read_bytes()
            at = number * 7919 % max(1, len(good))
            flipped = good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :] if good else b"?"
            path.write_bytes(flipped if damage == "flip" else good[: len(good) // 2])
            if path.read_bytes() == good:
                continue  # an empty file cannot be truncated
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
    checkpoints.save(3, make_state(3), description={})  # saved again, it counts
    assert_same(checkpoints.restore(3, abstract(make_state())), make_state(3))
    checkpoints.save(7, make_state(7), description={})  # and is later deleted like any other
    assert sorted(map(int, os.listdir(tmp_path))) == [2, 5, 6, 7]
