"""A folder of unusable files, and a check that a command refuses them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import pytest

from jaxptd.errors import UserError

LONGEST = 600  # characters in a message, including the folder's name
TEXT = "".join(f"def function_{n}(a, b): return a + b * {n}\n" for n in range(400))
FILES = {
    "text.txt": TEXT.encode(),
    "empty.txt": b"",
    "binary.txt": b"\x00\xff\xfe",
    "short.txt": b"short",
    "utf16.txt": "model: {num_layers: 2}".encode("utf-16"),
    "other.jsonl": b"{",
    "odd.bin": b"123",
    "lonely.idx": b"nonsense",
    "bad.json": b"{}",
    "large.yaml": b"# " + b"a" * 10**6,
    "words.csv": b"F0,what\n,F0\n",
    "empty.csv": b"",
    "table.csv": b"F0,F1,,B0,,B1\n,F0,B0,F1,B1\n",
    "broken.jsonl": b"{",
    "paired.idx": b"",
    "taken.bin": bytes(range(18)),
}

Refused = Callable[[Callable, Sequence[str]], str]


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `FILES`, folders, pipes, and `loop`, a link to itself."""
    path = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    for name in ("folder", "folder.csv"):
        (path / name).mkdir()
    for name in ("pipe", "pipe.csv"):
        os.mkfifo(path / name)
    (path / "loop").symlink_to("loop")
    return path


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Runs a command that must refuse its arguments, and returns the message.

    Fails if a device is requested, a file is written, or the message is not one short line.
    """

    def no_device(*_: object) -> None:
        raise AssertionError("the command started JAX's devices")

    def refused(main: Callable, argv: Sequence[str]) -> str:
        before = sorted(folder.rglob("*"))
        with pytest.raises(UserError) as caught:
            main([word.replace("{folder}", str(folder)) for word in argv])
        message = str(caught.value).replace(str(folder), "{folder}")
        assert "\n" not in message
        assert len(message) <= LONGEST
        assert sorted(folder.rglob("*")) == before
        return message

    monkeypatch.setattr(jax, "devices", no_device)
    monkeypatch.setenv("HOME", "/nobody")
    return refused
