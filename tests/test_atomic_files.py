"""Files are written completely or not at all, also by several processes at once."""

import contextlib
import os
from pathlib import Path

import pytest

from jaxptd.atomic_files import write_whole


def test_two_processes_may_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, moved = tmp_path / "table.csv", os.replace

    def write(text: str) -> None:
        write_whole({path: text.encode()}, lambda _: contextlib.nullcontext())

    def meanwhile(source: Path, target: Path) -> None:
        """Another process writes the file, from start to end, just before this one moves its own."""
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", moved)
            patch.setattr(os, "getpid", lambda: 1)
            write("theirs")
        moved(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    write("ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]
