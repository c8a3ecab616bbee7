"""Checkpoints in an S3 store: there once their manifest is, whatever happens in between."""

import json
import re
from typing import Any

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
from turns import slow

from benchmarks.lib.s3_server import BUCKET, Faults
from jaxptd.checkpoint import CheckpointError, Checkpoints, pieces, read_description, restore_path
from jaxptd.stores import StoreError, StorePath, fetch, place

RUN = f"s3://{BUCKET}/run/checkpoints"


def bytes_of(state: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(state))


def keys(url: str = RUN) -> list[str]:
    where = place(url)
    assert isinstance(where, StorePath)
    return [where.inside(key) for key in sorted(where.store.listing(where.key))]


def attempts(step: int) -> set[str]:
    """The saves whose objects are there for a step."""
    found = (re.match(rf"{step:08d}/arrays/(\w+)/", key) for key in keys())
    return {match[1] for match in found if match}


def test_every_bit_is_restored_on_any_layout(s3: Faults) -> None:
    save(RUN, 1, 2)
    checkpoints = Checkpoints(RUN, keep=9)
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.description(2) == DESCRIPTION | {"step": 2}
    assert newest(RUN) == 2
    state = make_state(1)
    targets = [(make_mesh(8),), (make_mesh(1),), (make_mesh(4, 2), "tp", "dp"), (make_mesh(2, 4),)]
    for target in targets:
        wanted = abstract(state, *target)
        restored = checkpoints.restore(1, wanted)
        assert_same(restored, state)
        for got, asked in zip(*map(jax.tree.leaves, (restored, wanted)), strict=True):
            assert got.sharding == asked.sharding
    unplaced = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert_same(checkpoints.restore(1, unplaced), state)


def test_a_save_sends_the_bytes_of_the_state_once(
    s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LARGEST", 16)
    save(RUN, 1)
    state, found = make_state(1), place(f"{RUN}/00000001")
    assert isinstance(found, StorePath)
    listed = found.store.listing(found.key)
    assert sum(n for key, n in listed.items() if key.endswith(".bin")) == bytes_of(state)
    assert sum(key.endswith(".bin") for key in listed) > 5
    overhead = sum(n for key, n in listed.items() if key.endswith(".json"))

    before = s3.sent
    assert_same(restore_path(found, abstract(state, make_mesh(4, 2), "tp", "dp"))[1], state)
    read = s3.sent - before  # the manifest is read by the check, by each process, and for the load
    manifest = listed[f"{found.key}/manifest.json"]
    assert read == bytes_of(state) + overhead + 2 * manifest

    before = s3.sent
    part = {"params": {"norm": abstract(state)["params"]["norm"]}}
    from jaxptd.checkpoint import restore_part

    assert_same(restore_part(found, part), {"params": {"norm": state["params"]["norm"]}})
    assert s3.sent - before == state["params"]["norm"].nbytes + overhead + 2 * manifest


@pytest.mark.parametrize("largest", [1, 8, 24, 100])
def test_blocks_cover_an_array_once_whatever_their_size(
    monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(pieces, "LARGEST", largest)
    for shape in [(), (1,), (7,), (3, 5), (2, 3, 4), (1, 9, 2)]:
        x = np.arange(int(np.prod(shape)), dtype=np.uint8).reshape(shape)
        seen = np.zeros(shape, int)
        for start, block in pieces._rows(x):
            at = tuple(slice(a, a + n) for a, n in zip(start, block.shape, strict=True))
            assert np.array_equal(x[at], block)
            assert block.nbytes <= largest
            seen[at] += 1
        assert (seen == 1).all()


def test_what_the_step_donates_is_saved_as_it_was(s3: Faults) -> None:
    step = jax.jit(lambda state: jax.tree.map(lambda x: -x, state), donate_argnums=0)
    first = np.arange(2.0**14, dtype=np.float32).reshape(128, 128)
    state = {"w": put(make_mesh(2, 4), first, "dp", "tp")}
    checkpoints = Checkpoints(RUN, keep=9)
    for number in range(1, 4):
        state = jax.block_until_ready(step(state))
        checkpoints.save_async(number, state, description={})
        state = jax.block_until_ready(step(step(state)))
    checkpoints.wait()
    for number in range(1, 4):
        assert_same(checkpoints.restore(number, abstract(state)), {"w": first * (-1) ** number})


def test_the_newest_and_the_best_stay(s3: Faults) -> None:
    with Checkpoints(RUN, keep=2, keep_best=1) as checkpoints:
        for step, loss in [(1, 3.0), (2, 2.0), (3, 2.5), (4, 2.25), (5, 2.5)]:
            checkpoints.save_async(step, make_state(step), description={"validation_loss": loss})
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 4, 5], 2)
    assert {key.partition("/")[0] for key in keys()} == {
        "00000002",
        "00000004",
        "00000005",
        "newest.json",
    }
    said: list[str] = []
    best = checkpoints.restore_best(abstract(make_state()), report=said.append)
    assert best is not None and best[0] == 2
    assert_same(best[1], make_state(2))
    checkpoints.set_aside_after(2, report=said.append)
    assert checkpoints.steps() == [2]
    assert said[0] == f"step 4 is later than step 2: moved to {RUN}/00000004/manifest.aside.json"
    save(RUN, 3)  # which sweeps, but not what was set aside
    where = place(f"{RUN}/00000005")
    assert isinstance(where, StorePath)
    aside = where / "manifest.aside.json"
    where.store.write((where / "manifest.json").key, where.store.read(aside.key))
    where.store.delete([aside.key])
    assert newest(RUN) == 5


def test_a_step_that_is_saved_again_is_there_all_the_time(s3: Faults) -> None:
    save(RUN, 1)
    first = attempts(1)
    s3.fault = lambda method, key: "AccessDenied" if method == "PUT" and "manifest" in key else None
    with pytest.raises(CheckpointError, match="the last good checkpoint is step 1"):
        Checkpoints(RUN, keep=9).save(1, make_state(7), description={})
    assert newest(RUN) == 1
    assert attempts(1) == first
    s3.fault = lambda *_: None
    Checkpoints(RUN, keep=9).save(1, make_state(7), description={})
    assert_same(Checkpoints(RUN, keep=9).restore(1, abstract(make_state())), make_state(7))
    assert len(attempts(1)) == 1
    assert attempts(1) != first


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["InternalError", *map(slow, ["drop", "SlowDown"])])
def test_faults_that_pass_cost_nothing_but_time(
    s3: Faults, capfd: pytest.CaptureFixture[str], code: str
) -> None:
    save(RUN, 1)
    for method, key in [("PUT", r"\.bin"), ("PUT", "manifest"), ("", "")]:
        s3.times(3, code, method=method, key=key)
        save(RUN, 2)
        assert newest(RUN) == 2
        s3.times(2, code, method="GET", key="arrays")
        assert newest(RUN) == 2
    assert "trying again" in capfd.readouterr().err


def test_a_credential_that_ends_in_the_middle_of_a_save(s3: Faults) -> None:
    checkpoints = save(RUN, 1)
    left = [2]

    def ends(method: str, key: str) -> str | None:
        left[0] -= method == "PUT"
        return "ExpiredToken" if left[0] < 0 else None

    s3.fault = ends
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(2, make_state(2), description={})
    assert re.fullmatch(
        f"could not save step 2 in {RUN}: could not (write|read) s3://.*: the credential has "
        r"expired \(ExpiredToken\); renew it; the last good checkpoint is step 1",
        str(caught.value),
    )
    s3.fault = lambda *_: None
    assert checkpoints.steps() == [1]
    assert newest(RUN) == 1
    assert attempts(2)  # could not be deleted; the next save does it
    save(RUN, 3)
    assert not attempts(2)
    assert Checkpoints(RUN, keep=9).steps() == [1, 3]


@pytest.mark.parametrize("each", [9, slow(1)])
def test_a_save_killed_at_any_request_leaves_the_last_one_and_is_swept(
    s3: Faults, each: int
) -> None:
    """Every request after the Nth fails, as if the process had died there."""
    save(RUN, 1)
    ended, found = False, set[int | None]()
    for last in range(0, 99, each):
        s3.requests.clear()
        s3.fault = lambda method, key, last=last: (
            "AccessDenied" if len(s3.requests) > last else None
        )
        try:
            save(RUN, 2, keep=2)
            ended = True
        except (CheckpointError, StoreError):
            ended = False
        s3.fault = lambda *_: None
        found.add(newest(RUN))
        assert newest(RUN) in (1, 2)
        after = save(RUN, 1, keep=9)
        assert after.steps() in ([1], [1, 2])
        manifest = len([key for key in keys() if key.endswith("manifest.json")])
        assert len(attempts(1)) + len(attempts(2)) == manifest
        after._folders.delete(2) if 2 in after.steps() else None
        if ended:
            break
    assert ended
    assert found == {1, 2}


def test_a_manifest_whose_answer_was_lost_still_has_its_objects(s3: Faults) -> None:
    """The store has written it, but says that it could not."""
    save(RUN, 1)
    checkpoints = Checkpoints(RUN, keep=9)
    write = checkpoints._folders._store.write  # type: ignore[union-attr]

    def lost(key: str, data: bytes) -> None:
        write(key, data)
        if key.endswith("00000002/manifest.json"):
            raise StoreError("no answer in time")

    checkpoints._folders._store.write = lost  # type: ignore[union-attr, method-assign]
    with pytest.raises(CheckpointError, match="could not save step 2"):
        checkpoints.save(2, make_state(2), description={})
    assert newest(RUN) == 2


def test_a_listing_that_lags_hides_nothing_and_shows_nothing_that_is_gone(s3: Faults) -> None:
    save(RUN, 1, 2)
    new = {f"{BUCKET}/run/checkpoints/{key}" for key in keys() if key.startswith("00000002")}
    s3.unlisted |= new
    assert Checkpoints(RUN, keep=9).steps() == [1, 2]
    assert newest(RUN) == 2
    save(RUN, 3)  # must not sweep what it is not shown, nor miss it
    assert Checkpoints(RUN, keep=9).steps() == [1, 2, 3]
    s3.unlisted = {key for key in new if key.endswith("manifest.json")}
    save(RUN, 4)  # sweeps objects, whose manifest is not listed, by no means
    assert_same(Checkpoints(RUN, keep=9).restore(2, abstract(make_state())), make_state(2))
    s3.unlisted.clear()

    gone = {f"{BUCKET}/run/checkpoints/{key}" for key in keys() if key.startswith("00000001")}
    save(RUN, 5, keep=2)
    s3.ghosts |= gone
    assert Checkpoints(RUN, keep=9).steps() == [4, 5]
    assert newest(RUN) == 5
    save(RUN, 6, keep=2)
    assert Checkpoints(RUN, keep=9).steps() == [5, 6]


def test_damage_is_named_and_the_one_before_is_used(s3: Faults) -> None:
    save(RUN, 1, 2, 3)
    where = place(RUN)
    assert isinstance(where, StorePath)
    arrays = [f"{where.key}/{key}" for key in keys() if re.match(r"00000003/.*\.bin", key)]
    data = bytearray(where.store.read(arrays[0]))
    data[-1] ^= 1
    where.store.write(arrays[0], bytes(data))
    (manifest,) = (f"{where.key}/{key}" for key in keys() if re.match(r"00000002/man", key))
    where.store.write(manifest, where.store.read(manifest).replace(b'"step": 2', b'"step": 3'))
    said: list[str] = []
    found = Checkpoints(RUN, keep=9).restore_newest(abstract(make_state()), report=said.append)
    assert found is not None and found[0] == 1
    assert "CRC-32 differs" in said[0] and "00000003" in said[0]
    assert "manifest.json was changed" in said[1]
    where.store.write(arrays[0], bytes(data)[:-1])
    with pytest.raises(CheckpointError, match=r"\.bin has \d+ bytes, not \d+"):
        restore_path(where / "00000003", abstract(make_state()))
    where.store.delete(arrays)
    with pytest.raises(CheckpointError, match=r"\.bin is missing"):
        restore_path(where / "00000003", abstract(make_state()))


@pytest.mark.parametrize("asked", [1, 2])
def test_a_run_that_was_taken_over_writes_no_manifest(s3: Faults, asked: int) -> None:
    """Neither if it was before the save, nor if it was while the arrays were written."""
    left = [asked]

    def refuse() -> None:
        left[0] -= 1
        if not left[0]:
            raise StoreError("another run has taken it over")

    with pytest.raises(CheckpointError, match="another run has taken it over"):
        Checkpoints(RUN, keep=1, may_write=refuse).save(1, make_state(1), description={})
    assert keys() == []


def test_a_run_that_was_taken_over_deletes_nothing_that_the_other_writes(s3: Faults) -> None:
    """The objects of a save that has no manifest yet look like those of one that was killed."""
    taken: list[str] = []

    def refuse() -> None:
        if taken:
            raise StoreError("another run has taken it over")

    checkpoints = Checkpoints(RUN, keep=1, may_write=refuse)
    checkpoints.save(1, make_state(1), description={})
    taken.append("taken")
    where = place(RUN)
    assert isinstance(where, StorePath)
    written = f"{where.key}/00000002/arrays/0123456789ab/process_0.0.bin"
    where.store.write(written, b"1")
    before = keys()
    with pytest.raises(CheckpointError, match="another run has taken it over"):
        checkpoints.save(2, make_state(2), description={})
    with pytest.raises(StoreError, match="another run has taken it over"):
        checkpoints._folders.delete(1)
    assert keys() == before


def test_a_store_that_does_not_answer_loses_no_step_of_the_newest(s3: Faults) -> None:
    save(RUN, 1, 2)
    s3.fault = lambda how, key: "AccessDenied" if how == "GET" and "newest" in key else None
    with pytest.raises(StoreError, match="could not read .*newest.json: the credential"):
        save(RUN, 3)
    s3.fault = lambda *_: None
    s3.unlisted |= {f"{BUCKET}/run/checkpoints/{key}" for key in keys()}
    assert Checkpoints(RUN, keep=9).steps()[:2] == [1, 2]


def test_another_model_is_refused_and_what_is_no_checkpoint(s3: Faults) -> None:
    save(RUN, 1)
    other = abstract(make_state()) | {"params": {"other": jax.ShapeDtypeStruct((3,), jnp.float32)}}
    with pytest.raises(CheckpointError, match="does not fit"):
        restore_path(f"{RUN}/00000001", other)
    with pytest.raises(CheckpointError, match=f"there is no checkpoint {RUN}/00000009"):
        read_description(f"{RUN}/00000009")
    with pytest.raises(CheckpointError, match="no checkpoint of step 9 .* it has steps 1"):
        Checkpoints(RUN, keep=1).restore(9, other)


def test_a_checkpoint_that_was_copied_to_a_disk_is_read_there(s3: Faults, tmp_path: Any) -> None:
    save(RUN, 1)
    fetch(place(RUN), tmp_path)  # type: ignore[arg-type]
    assert newest(tmp_path) == 1
    (file,) = (tmp_path / "00000001/arrays").rglob("*.0.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert newest(tmp_path, expect_reports=1) is None


def test_one_that_was_copied_from_a_disk_is_refused(s3: Faults, tmp_path: Any) -> None:
    save(tmp_path, 1)
    where = place(RUN)
    assert isinstance(where, StorePath)
    for file in filter(lambda each: each.is_file(), tmp_path.rglob("*")):
        where.store.write(f"{where.key}/{file.relative_to(tmp_path)}", file.read_bytes())
    with pytest.raises(CheckpointError, match="copy it to a disk to read it"):
        restore_path(f"{RUN}/00000001", abstract(make_state()))


@pytest.mark.parametrize(
    "change",
    [
        (lambda rows: rows[0].__setitem__(3, "../../x")),
        (lambda rows: rows[0].__setitem__(4, 10**9)),
        (lambda rows: rows[0].__setitem__(1, [100, 0])),
        (lambda rows: rows[0].__setitem__(0, "other")),
        (lambda rows: rows.pop()),
    ],
)
def test_an_index_that_cannot_be_right_is_damage(s3: Faults, change: Any) -> None:
    from jaxptd.checkpoint import manifest

    save(RUN, 1)
    where = place(f"{RUN}/00000001")
    assert isinstance(where, StorePath)
    content = manifest.read(where)
    (name,) = pieces.index_files(content["files"])
    rows = json.loads(where.store.read((where / name).key))
    change(rows)
    data = json.dumps(rows).encode()
    where.store.write((where / name).key, data)
    import zlib

    files = content.pop("files") | {name: {"size": len(data), "crc32": zlib.crc32(data)}}
    content.pop("format")
    where.store.write((where / "manifest.json").key, manifest.text_of(content, files).encode())
    with pytest.raises(CheckpointError, match="is damaged"):
        restore_path(where, abstract(make_state()))
