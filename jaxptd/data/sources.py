"""Finds the files that `data.source` names, in an order that does not depend on the file system.

A source is `stdlib`, a path, or a glob (`**` also matches folders); an existing path is never read
as a glob. A glob's matches are sorted. URLs of a store are objects, or globs of objects. Megatron's
pair `x.bin` + `x.idx` is one source, named by either file or by the prefix `x`; `find_files`
returns `x.bin`.
"""

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

from jaxptd.errors import UserError
from jaxptd.stores import Place, StorePath, is_url, place, size_of

STDLIB = "stdlib"
# Third-party packages, and tests, which are not always installed, nor always Python 3.
NOT_STDLIB = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
# Written when Python was built or installed, so they differ between machines with the same Python.
OF_THE_MACHINE = ("config-", "_sysconfigdata", "sitecustomize")


def find_files(source: str | Sequence[str]) -> list[Place]:
    """Finds the files of every source, in the order given.

    Raises:
        UserError: as `find_each`.
    """
    names = [source] if isinstance(source, str) else source
    return [path for files in find_each(names).values() for path in files]


def find_each(names: Iterable[str]) -> dict[str, list[Place]]:
    """Finds the files of each source.

    Raises:
        UserError: a source matches nothing, is a folder, or names a file twice (one copy could be
            trained on and the other validated on).
    """
    patterns: dict[str, str] = {}
    files: dict[str, list[Place]] = {}
    for name in names:
        files[name] = _expand(name)
        for path in files[name]:
            key = os.path.realpath(path) if isinstance(path, Path) else str(path)
            if key in patterns:
                raise UserError(
                    f"data.source: {path} is named twice, by {patterns[key]!r} and {name!r}; "
                    "name it once"
                )
            patterns[key] = name
    return files


def stdlib_files() -> list[Path]:
    """The .py files of the running Python's standard library, about 11 MB.

    They are shuffled by a hash of each name: in sorted order, the validation split at the end would
    be a few packages (xml, zipfile) unlike the rest. The order is the same on every machine with
    the same Python.

    Raises:
        UserError: this Python has no such files (it keeps its library in a zip).
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if _is_stdlib(path.relative_to(root))
    ]
    files = [root / name for name in sorted(names, key=_hash)]
    files = [path for path in files if path.stat().st_size > 0]
    if not files:
        raise UserError(
            f"data.source=stdlib: this Python has no source files in {root}; name text files"
        )
    return files


def _is_stdlib(path: Path) -> bool:
    return not NOT_STDLIB.intersection(path.parts) and not path.parts[0].startswith(OF_THE_MACHINE)


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _expand(name: str) -> list[Place]:
    if name == STDLIB:
        return [*stdlib_files()]
    if is_url(name):
        return _expand_url(name)
    if os.path.isdir(name):
        pattern = os.path.join(name, "**", "*.txt")
        raise UserError(
            f"data.source={name!r} is a folder; name its files with a glob, such as {pattern!r}"
        )
    if os.path.exists(name):
        matches = [name]
    elif os.path.isfile(f"{name}.idx"):
        matches = [f"{name}.idx"]
    else:
        matches = [match for match in sorted(_glob(name)) if not os.path.isdir(match)]
    if not matches:
        remedy = "(relative paths start at the working folder)"
        if name.startswith("{"):
            remedy = "or give weights as numbers, such as {a.jsonl: 0.7, b.bin: 0.3}"
        raise UserError(
            f"data.source={name!r} matches no file; use {STDLIB}, or paths or globs of files "
            f"{remedy}"
        )
    return list(dict.fromkeys(_checked(Path(match)) for match in matches))


def _expand_url(name: str) -> list[Place]:
    """The objects that a URL or a glob of URLs names."""
    where = place(name, field="data.source")
    assert isinstance(where, StorePath)
    index = dataclasses.replace(where, key=f"{where.key}.idx")
    if size_of(where) is not None:
        matches = [where]
    elif size_of(index) is not None:
        matches = [index]
    elif glob.has_magic(where.key):
        keys = where.store.glob(where.key)
        matches = [dataclasses.replace(where, key=key) for key in keys]
    elif where.store.listing(where.key):
        raise UserError(
            f"data.source={name!r} is a folder; name its objects with a glob, such as "
            f"'{where}/**/*.txt'"
        )
    else:
        matches = []
    if not matches:
        raise UserError(f"data.source={name!r} matches no object; use URLs or globs of objects")
    found = []
    for match in matches:
        if match.suffix == ".idx":
            if size_of(match.with_suffix(".bin")) is None:
                raise UserError(
                    f"data.source: {match} is a Megatron index but {match.with_suffix('.bin')} is "
                    "missing; put it there"
                )
            match = match.with_suffix(".bin")
        found.append(match)
    return list(dict.fromkeys(found))


def _glob(pattern: str) -> list[str]:
    try:
        return glob.glob(pattern, recursive=True)
    except (ValueError, OSError):  # a pattern that cannot match, such as one with NUL
        return []


def _checked(path: Path) -> Path:
    if not os.path.isfile(path):
        raise UserError(f"data.source: {path} is not a regular file; name one on disk")
    if path.suffix != ".idx":
        return path
    if not os.path.isfile(tokens := path.with_suffix(".bin")):
        raise UserError(
            f"data.source: {path} is a Megatron index but {tokens} is missing; put it there"
        )
    return tokens
