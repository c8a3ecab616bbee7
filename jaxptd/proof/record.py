"""The record of a run of drawn cases: a file of JSON lines, which the same command continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxptd.errors import UserError

NAME = "cases.jsonl"


class Record:
    """The cases that were compared, by number; a case that was begun and not ended has crashed.

    Args:
        folder: of the file; made if it is not there.
        about: seed and devices.

    Raises:
        UserError: the folder has the record of other cases, or cannot be written.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._path = folder / NAME
        self.about = {**about, "jax": jax.__version__}
        self.lines: dict[int, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            texts = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot use {self._path}: {error}; name another folder") from error
        records = [line for line in map(_read, texts) if line]
        if not records:
            self._add(self.about)
        elif records[0] != self.about:
            raise UserError(
                f"{self._path} has other cases, {_words(records[0])}, not {_words(self.about)}; "
                "name another folder with --out"
            )
        for line in records[1:]:
            self.lines[line["case"]] = line

    def begin(self, number: int) -> None:
        """Says that a case begins: it has crashed unless `end` follows."""
        words = "the process ended during this case"
        self._put({"case": number, "outcome": "crashed", "words": words})

    def end(self, line: Mapping[str, Any]) -> None:
        """Adds how a case ended."""
        self._put(dict(line))

    def _put(self, line: dict[str, Any]) -> None:
        self.lines[line["case"]] = line
        self._add(line)

    def _add(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _read(text: str) -> dict[str, Any] | None:
    """A line; None for one that was cut off."""
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _words(about: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in about.items())
