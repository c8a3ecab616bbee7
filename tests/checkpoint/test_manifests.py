"""Manifests with a valid checksum and wrong content: one line each, no traceback."""

import contextlib
import os
import shutil
import socket

import pytest
from checkpointing import abstract, make_state, save
from damage import change_and_seal, largest_file

from jaxptd.checkpoint import CheckpointError, Checkpoints, read_description, restore_path

STEP, TENSOR = 5, "params.norm"
NAN, INFINITE = float("nan"), float("inf")
HUGE = 10**30
NO_OBJECT = (None, [], "text", 3, True)


def put(*path_and_value):
    """A change that sets one value in the manifest; FILE stands for the first file's name."""
    *path, last, value = path_and_value

    def change(manifest):
        place, file = manifest, min(manifest["files"])
        for key in path:
            place = place[file if key == "FILE" else key]
        place[file if last == "FILE" else last] = value

    return change


def drop(*path):
    """A change that removes one key of the manifest."""

    def change(manifest):
        place, file = manifest, min(manifest["files"])
        for key in path[:-1]:
            place = place[file if key == "FILE" else key]
        del place[file if path[-1] == "FILE" else path[-1]]

    return change


def name_file(name):
    """A change that gives the first file another name."""

    def change(manifest):
        manifest["files"][name] = manifest["files"].pop(min(manifest["files"]))

    return change


def table():
    """(change, words of the message) for every damaged manifest."""
    for key in ("step", "description", "tensors", "format", "files"):
        yield drop(key), f"has wrong content: it has no '{key}'"
    yield put("more", 1), "has wrong content: it has an unknown 'more'"
    for step in (-1, "5", 5.0, True, None, [5], {}, NAN, INFINITE, 2**63, HUGE):
        yield put("step", step), "content: step is "
    yield put("step", 6), "content: it is of step 6, its folder of step 5"
    for other in (None, "1", 1.0, True, [], {}, NAN):
        yield put("format", other), "content: format is "
    for other in (0, 2, -1, HUGE):
        yield put("format", other), f"has format {other}, but this version of jaxptd reads 1"
    for other in NO_OBJECT:
        yield put("description", other), "content: description is "
    for loss in ("low", NAN, INFINITE, -INFINITE, True, [1.0], {}):
        yield put("description", "validation_loss", loss), "content: 'validation_loss' is "
    for key in ("tensors", "files"):
        for other in (*NO_OBJECT, {}):
            yield put(key, other), f"content: {key} is "
        for other in (*NO_OBJECT, {}):
            yield put(key, "FILE" if key == "files" else TENSOR, other), f"content: {key} has "
        for name in ("", "a\nb", "a\0b", "\ud800", "x" * 5000):
            yield put(key, name, {}), f"content: {key} has "
    for field in ("shape", "dtype"):
        yield drop("tensors", TENSOR, field), f"content: tensors has '{TENSOR}'"
    yield put("tensors", TENSOR, "more", 1), f"content: tensors has '{TENSOR}'"
    sizes = (8.0, "8", -8, 0, True, None, [8], HUGE, NAN)
    for shape in (None, "8", 8, {}, [1] * 65, *([size] for size in sizes)):
        yield put("tensors", TENSOR, "shape", shape), f"tensors has '{TENSOR}' with shape "
    for dtype in (None, 3, [], {}, "", "a\nb", "x" * 5000):
        yield put("tensors", TENSOR, "dtype", dtype), f"tensors has '{TENSOR}' with dtype "
    yield put("tensors", TENSOR, "dtype", "float31"), "is float31 in the checkpoint, float32 in"
    yield put("tensors", TENSOR, "shape", [9]), "is [9] in the checkpoint, [8] in this run"
    yield put("tensors", "more", {"shape": [], "dtype": "int32"}), "more is in the checkpoint, not"
    yield drop("tensors", TENSOR), f"{TENSOR} is in this run, not in the checkpoint"
    for field in ("size", "crc32"):
        yield drop("files", "FILE", field), "content: files has "
        for other in (None, "1", 1.5, -1, True, [], {}, NAN, HUGE):
            yield put("files", "FILE", field, other), f" with {field} "
    yield put("files", "FILE", "more", 1), "content: files has "
    yield put("files", "FILE", "size", 2**40), f" bytes, not {2**40}"
    yield put("files", "FILE", "crc32", 0), "was changed (its CRC-32 differs)"
    outside = ("/etc/passwd", "//x", "..", "../x", "arrays/../../x", "arrays/..", "a/../b")
    for name in (*outside, ".", "./x", "arrays//x", "arrays/", "manifest.json"):
        yield name_file(name), "which is no file in a checkpoint"
    yield name_file("arrays/none"), "arrays/none is missing"
    yield name_file("arrays"), "arrays: not a regular file"
    for other in ("x" * 250, "x/" * 100 + "x"):
        yield name_file(other), "is damaged: xx" if "/" not in other else "is damaged: x/x"


TABLE = list(table())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 3, STEP)
    return folder


@pytest.fixture
def checkpoints(saved, tmp_path):
    """A copy of good checkpoints of steps 3 and 5."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def one_line(error: Exception, folder) -> str:
    line = str(error)
    assert len(line.splitlines()) == 1
    assert len(line) < 1000
    assert line.isprintable()
    assert str(folder) in line
    return line


def test_there_are_many():
    assert len(TABLE) > 130


@pytest.mark.parametrize(("change", "words"), TABLE)
def test_wrong_content_is_one_line(checkpoints, change, words):
    folder, target = checkpoints / f"{STEP:08d}", abstract(make_state())
    change_and_seal(folder, change)
    with pytest.raises(CheckpointError) as caught:
        restore_path(folder, target)
    assert words in one_line(caught.value, folder)
    store = Checkpoints(checkpoints, keep=9)
    assert store.best() is None  # no error, although it reads every manifest


@pytest.mark.parametrize("content", [b"", b"null", b"1", b'"text"', b"[" * 10**5, b"9" * 10_000])
def test_what_is_no_object_is_one_line(checkpoints, content):
    folder = checkpoints / f"{STEP:08d}"
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_description(folder)
    assert "manifest.json is not a manifest" in one_line(caught.value, folder)


def test_a_manifest_that_is_far_too_large_is_not_read(checkpoints):
    folder = checkpoints / f"{STEP:08d}"
    os.truncate(folder / "manifest.json", 2**34)  # a sparse file
    with pytest.raises(CheckpointError, match="manifest.json has more than 268435456 bytes"):
        read_description(folder)


def a_socket(path):
    # The full path may be too long for a socket.
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


KINDS = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: os.symlink("/dev/zero", path),
    "socket": a_socket,
    "loop": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", None])
def test_what_is_no_file_neither_hangs_nor_is_it_read(checkpoints, name, kind):
    folder = checkpoints / f"{STEP:08d}"
    path = folder / name if name else largest_file(folder / "arrays")
    name = path.relative_to(folder).as_posix()
    path.unlink()
    KINDS[kind](path)
    lines = []
    step, _ = Checkpoints(checkpoints, keep=9).restore_newest(
        abstract(make_state()), report=lines.append
    )
    assert step == 3
    assert len(lines) == 1
    assert f"{STEP:08d} is damaged: {name}" in lines[0] or "is a pipe or a device" in lines[0]


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_a_pipe_that_no_manifest_names_is_seen_before_the_arrays_are_read(checkpoints, kind):
    folder = checkpoints / f"{STEP:08d}"
    KINDS[kind](folder / "arrays" / "more")
    with pytest.raises(CheckpointError, match="arrays/more is a pipe or a device"):
        restore_path(folder, abstract(make_state()))
    (folder / "arrays" / "more").unlink()
    (folder / "arrays" / "more").touch()  # a stray regular file does no harm
    restore_path(folder, abstract(make_state()))


def with_losses(checkpoints, losses):
    for step, loss in losses.items():
        change_and_seal(
            checkpoints / f"{step:08d}", lambda m, loss=loss: m["description"].update(loss)
        )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "manifest.json is missing"),
        (lambda path: path.write_bytes(b"{"), "manifest.json is not a manifest"),
        (lambda path: change_and_seal(path.parent, put("step", 6)), "it is of step 6"),
    ],
)
def test_best_says_that_it_passes_over_a_newer_damaged_one(checkpoints, damage, words):
    with_losses(checkpoints, {3: {"validation_loss": 2.0}, 5: {"validation_loss": 1.0}})
    damage(checkpoints / f"{STEP:08d}" / "manifest.json")
    lines = []
    step, _ = Checkpoints(checkpoints, keep=9).restore_best(
        abstract(make_state()), report=lines.append
    )
    assert step == 3
    assert len(lines) == 1
    assert f"{STEP:08d} is damaged: " in lines[0]
    assert words in lines[0]
    assert lines[0].endswith("; skipped")


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800"])
def test_a_path_that_no_folder_can_have_is_one_line(tmp_path, name):
    with pytest.raises(CheckpointError, match="there is no checkpoint") as caught:
        read_description(tmp_path / name)
    assert str(caught.value).isprintable()
