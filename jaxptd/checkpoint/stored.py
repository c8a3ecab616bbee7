"""Checkpoints in an object store, which has no folders and no renames; saving one.

    DIRECTORY/00000100/arrays/ATTEMPT/...    the tensors, see `pieces`
    DIRECTORY/00000100/manifest.json         as on disk, written last: without it there is none
    DIRECTORY/00000100/manifest.aside.json   in its place for a step that was set aside
    DIRECTORY/newest.json                    the steps there are, in case a listing lacks one

A step is there if its manifest is. Objects that no manifest names are what killed saves left, and
the next save deletes them. Each save has names of its own, ATTEMPT, so that a step that is saved
again is there all the time, and a process that was thought dead cannot write into it.

Listings may lag behind. So they only propose steps, as `newest.json` does, and each manifest is
asked for by its name.
"""

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxptd.checkpoint import manifest
from jaxptd.checkpoint.folders import MANIFEST, STEP, CheckpointError
from jaxptd.checkpoint.pieces import PendingUpload
from jaxptd.checkpoint.saving import run_on_all, run_on_first
from jaxptd.distributed.coordination import is_first
from jaxptd.stores import Store, StoreError, StorePath

NEWEST = "newest.json"
ASIDE = "manifest.aside{}.json"  # with nothing, 2, 3, ...


class StoreFolders:
    """The steps under a URL.

    Args:
        directory: of all steps.
        may_write: raises if this run must not write there any more; called before each manifest,
            and before objects are deleted, which may be those that another run is writing.
    """

    def __init__(
        self, directory: StorePath, *, may_write: Callable[[], None] = lambda: None
    ) -> None:
        self.directory, self._may_write = directory, may_write

    @property
    def _store(self) -> Store:
        return self.directory.store

    def all(self) -> dict[int, StorePath]:
        """The URL of each step that has a manifest, in ascending order."""
        named = {int(match[1]) for key in self._listed() if (match := self._step_of(key))}
        steps = sorted(named | self._newest())
        there = self._store.each(lambda step: self._store.exists(self._manifest(step)), steps)
        return {
            step: self.at(step) for step, is_there in zip(steps, there, strict=True) if is_there
        }

    def complete(self) -> list[int]:
        """The steps that have a manifest, ascending."""
        return list(self.all())

    def folder(self, step: int) -> StorePath:
        """The URL of a step. Raises CheckpointError if there is none."""
        if not self._store.exists(self._manifest(step)):
            names = ", ".join(map(str, self.all()))
            steps = f"it has steps {names}" if names else "it has none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; {steps}")
        return self.at(step)

    def at(self, step: int) -> StorePath:
        """The URL of a step that may have no checkpoint."""
        return self.directory / f"{step:08d}"

    def begin(self) -> str:
        """Deletes what killed saves left; a new word for the next save."""
        self._may_write()
        self.sweep()
        return secrets.token_hex(6)

    def seal(self, content: dict[str, Any], files: dict[str, dict[str, int]]) -> None:
        """Makes a step visible: writes its manifest, in place of an older one."""
        step = content["step"]
        text = manifest.text_of(content, files)
        self._may_write()
        self._store.write(self._manifest(step), text.encode())
        self._write_newest({*self._newest(), step})

    def delete(self, step: int) -> None:
        """Deletes a step, its manifest first."""
        self._may_write()
        self._store.delete([self._manifest(step)])
        self._write_newest(self._newest() - {step})
        self.sweep_step(step)

    def set_aside(self, step: int) -> StorePath:
        """Gives a step's manifest another name, so that `all` ignores it; returns that name."""
        text, number = self._store.read(self._manifest(step)), 1
        while self._store.exists((aside := self._aside(step, number)).key):
            number += 1
        self._store.write(aside.key, text)
        self._store.delete([self._manifest(step)])
        self._write_newest(self._newest() - {step})
        return aside

    def sweep(self) -> None:
        """Deletes the objects of steps that no manifest names."""
        steps: dict[int, set[str]] = {}
        for key in self._listed():
            if match := self._step_of(key):
                steps.setdefault(int(match[1]), set()).add(key)
        for step, keys in steps.items():
            self._delete_unnamed(step, keys)

    def sweep_step(self, step: int) -> None:
        """Deletes the objects that an earlier save of a step has written, once it is replaced."""
        self._delete_unnamed(step, set(self._store.listing(self.at(step).key)))

    def discard(self, step: int, attempt: str) -> None:
        """Deletes what a failed save has written, as far as the store lets it."""
        with contextlib.suppress(Exception):  # the failure itself is what the user should read
            # A manifest whose writing seemed to fail may be there, and then names them.
            written = self._store.listing((self.at(step) / f"arrays/{attempt}").key)
            self._delete_unnamed(step, set(written))

    def _delete_unnamed(self, step: int, keys: set[str]) -> None:
        """Deletes objects of a step, except those that one of its manifests names."""
        for name in self._manifests(step):
            if not (keys := keys - {name}):
                return
            with contextlib.suppress(FileNotFoundError):
                keys = keys - self._named_by(step, name)
        self._store.delete(sorted(keys))

    def _named_by(self, step: int, name: str) -> set[str]:
        """The objects that a manifest names; if it is damaged, all of the step."""
        try:
            files = json.loads(self._store.read(name))["files"]
            return {(self.at(step) / each).key for each in files}
        except StoreError:  # which is a ValueError
            raise
        except (ValueError, KeyError, TypeError, RecursionError):
            return set(self._store.listing(self.at(step).key))

    def _manifests(self, step: int) -> Iterator[str]:
        """The manifest of a step and those set aside, by name and not as a listing has them."""
        yield self._manifest(step)
        number = 1
        while self._store.exists(name := self._aside(step, number).key):
            yield name
            number += 1

    def _manifest(self, step: int) -> str:
        return (self.at(step) / MANIFEST).key

    def _aside(self, step: int, number: int) -> StorePath:
        return self.at(step) / ASIDE.format("" if number == 1 else number)

    def _listed(self) -> list[str]:
        return sorted(self._store.listing(self.directory.key))

    def _step_of(self, key: str) -> re.Match[str] | None:
        return re.match(rf"({STEP})/", self.directory.inside(key))

    def _newest(self) -> set[int]:
        try:
            steps = json.loads(self._store.read((self.directory / NEWEST).key))["steps"]
            return {step for step in steps if type(step) is int and step >= 0}
        except StoreError:  # which is a ValueError: the next `newest.json` would lack these steps
            raise
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return set()

    def _write_newest(self, steps: set[int]) -> None:
        data = json.dumps({"steps": sorted(steps)}).encode()
        self._store.write((self.directory / NEWEST).key, data)


# ---- one save ------------------------------------------------------------------------------------


class StoreWrite:
    """A save that has begun, until `finish`."""

    def __init__(self, attempt: str, upload: PendingUpload) -> None:
        self.attempt, self.upload = attempt, upload


def start(folders: StoreFolders, step: int, tensors: dict[str, jax.Array]) -> StoreWrite:
    """Copies what the next step may change, and begins to write. Raises any failure."""
    attempt = run_on_first("made", folders.begin)
    writes: list[PendingUpload] = []
    try:
        run_on_all(
            "copied", lambda: writes.append(PendingUpload(folders.at(step), attempt, tensors))
        )
    except BaseException:
        for write in writes:
            write.abort()
        _discard_on_first(folders, step, attempt)
        raise
    return StoreWrite(attempt, writes[0])


def finish(folders: StoreFolders, content: dict[str, Any], write: StoreWrite) -> None:
    """Waits for the arrays of all processes, then writes the manifest. Raises any failure."""
    step = content["step"]
    try:
        files: dict[str, dict[str, int]] = {}
        for each in run_on_all("written", write.upload.wait_written):
            files.update(each)
        run_on_first("sealed", lambda: folders.seal(content, files))
    except Exception:
        write.upload.abort()
        _discard_on_first(folders, step, write.attempt)
        raise
    run_on_first("swept", lambda: folders.sweep_step(step))


def _discard_on_first(folders: StoreFolders, step: int, attempt: str) -> None:
    if is_first():
        folders.discard(step, attempt)
