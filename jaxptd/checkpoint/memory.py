"""The newest states of a run, on the hosts themselves: they outlive processes, not a reboot.

    memory_dir/jaxptd-<hash of run_dir>/<step>.<start>.<rank>-of-<count>

Each process writes its shards there (`shards.py`), usually to memory (/dev/shm), and copies its
file to a partner process on another host, if there is one. A state can be restored as long as some
host has each of its files, so it survives the loss of a host. Nothing waits for all processes: each
says which states it has written, and deletes those older than the newest that all have written.

`<start>` is another for each start of the run, so that files of two starts never mix. The run's
identity is in each file's header and in run_dir/run_id: what an earlier run in this directory left
is ignored, and deleted by the next start.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from jaxptd.atomic_files import write_whole
from jaxptd.checkpoint import manifest, saving, shards
from jaxptd.checkpoint.arrays import Background
from jaxptd.checkpoint.blocks import Block, own_blocks
from jaxptd.checkpoint.folders import CheckpointError, DamagedCheckpointError, reason
from jaxptd.checkpoint.saving import run_on_all, run_on_first
from jaxptd.checkpoint.shards import Assembly, Read, Shards
from jaxptd.distributed import coordination
from jaxptd.distributed.exchange import Exchange

NAME = r"([0-9]{8,})\.([0-9a-f]{8})\.([0-9]+)-of-([0-9]+)"
ID = "run_id"  # file in the run directory
SAID = "memory"  # folder of the coordination service: the steps that each process has written
NEWEST = 2  # states kept for slower processes, which may still be writing them

Reporter = Callable[[str], None]


@dataclasses.dataclass(frozen=True, order=True)
class Written:
    """A state, as its files are named.

    Args:
        step: of the state.
        start: the start of the run that wrote it.
        count: number of processes, each of which wrote a file.
    """

    step: int
    start: str
    count: int

    def file(self, rank: int) -> str:
        return f"{self.step:08d}.{self.start}.{rank}-of-{self.count}"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A state from memory.

    Args:
        step: of the state.
        state: in canonical form.
        description: that was saved with it.
        where: the folder, for messages.
    """

    step: int
    state: Any
    description: dict[str, Any]
    where: str


def partner_of(places: Sequence[str], rank: int) -> int | None:
    """The process that keeps a copy of a process's files, on the next host; None on one host.

    Processes of a host have different partners as long as the next host has as many.

    >>> [partner_of("aabb", rank) for rank in range(4)], partner_of("aaa", 1)
    ([2, 3, 0, 1], None)
    """
    hosts = list(dict.fromkeys(places))
    if len(hosts) == 1:
        return None
    own = [each for each, place in enumerate(places) if place == places[rank]]
    host = hosts[(hosts.index(places[rank]) + 1) % len(hosts)]
    others = [each for each, place in enumerate(places) if place == host]
    return others[own.index(rank) % len(others)]


class Memory:
    """Keeps the newest states of a run on its hosts. All processes call its methods alike.

    Args:
        directory: `checkpoint.memory_dir`, the same for all processes of a host.
        run_dir: of the run, or the folder of its files if it is in a store.
        warn: prints a line, in any process.
        url: of a run in a store.
        publish: copies the files of a run in a store there.
    """

    def __init__(
        self,
        directory: str | Path,
        run_dir: Path,
        *,
        warn: Reporter,
        url: str | None = None,
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory, self._run_dir, self._warn = Path(directory), run_dir, warn
        self._url, self._publish = url, publish
        self._pending: Background | None = None
        self.newest = -1  # the last step that was restored, or given to `save_async`
        self._tried: list[int] = []  # the steps given to `save_async` last
        self._written: list[int] = []  # steps of this start whose files are all in place
        self._warned: set[str] = set()
        self._restored: Written | None = None
        self._run = ""

    # ---- where -----------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The folder of this run on this host."""
        name = run_on_first("memory.folder", lambda: _hash(self._url or self._run_dir.resolve()))
        return self._directory / f"jaxptd-{name}"

    @cached_property
    def _world(self) -> tuple[list[str], list[str], Exchange | None]:
        """The host and the address of each process, and this one's end of the exchange."""
        where = f"{socket.gethostname()} {self.folder.resolve()}"
        places = run_on_all("memory.places", lambda: where)
        if len(set(places)) == 1:
            return places, [], None
        token = run_on_first("memory.token", lambda: secrets.token_hex(16))
        host = coordination.own_host()
        served: list[Exchange] = []

        def serve() -> str:
            try:
                served.append(Exchange(self.folder, NAME, host=host, token=token))
            except OSError as error:
                raise CheckpointError(
                    f"cannot serve states in memory at {host}: {reason(error)}; set "
                    "checkpoint.memory_every to 0, or a coordinator with another address"
                ) from error
            return served[0].address

        return places, run_on_all("memory.addresses", serve), served[0]

    @cached_property
    def _start(self) -> str:
        return str(run_on_first("memory.start", lambda: secrets.token_hex(4)))

    # ---- restoring -------------------------------------------------------------------------------

    def restore_newest(self, target: Any, *, after: int, report: Reporter) -> Restored | None:
        """Restores the newest state of which every file is somewhere; None if there is none.

        Args:
            target: as `restore_path` takes it.
            after: only states of later steps.
            report: prints a line about each damaged one, which is skipped.

        Raises:
            CheckpointError: a state does not fit `target`.
        """
        _ = self._world  # all processes ask for it here
        for written, holders in self._found():
            if written.step <= after:
                break
            files: list[Shards] = []
            opened = partial(self._open, written, holders, files)
            if self._all_good("memory.opened", opened, report):
                about, name = files[0].about, f"step {written.step} in {self.folder}"
                wanted = manifest.by_name(target)
                manifest.check_tensors(Path(name), about["tensors"], manifest.shapes(wanted))
                loaded: dict[str, jax.Array] = {}
                load = partial(_load, Assembly(files, name), wanted, loaded)
                if self._all_good("memory.restored", load, report):
                    self._restored, self.newest = written, written.step
                    leaves = [loaded[each] for each in wanted]
                    state = jax.tree.unflatten(jax.tree.structure(target), leaves)
                    return Restored(written.step, state, about["description"], str(self.folder))
        return None

    def _found(self) -> list[tuple[Written, dict[int, list[int]]]]:
        """Each complete state, newest first, and which processes can read the file of each rank."""
        run = run_on_first("memory.id", self._read_id)
        listed = run_on_all("memory.found", lambda: self._own_names(run) if run else [])
        found: dict[Written, dict[int, list[int]]] = {}
        for process, names in enumerate(listed):
            for written, rank in map(_parsed, names):
                found.setdefault(written, {}).setdefault(rank, []).append(process)
        complete = [(w, held) for w, held in found.items() if held.keys() >= {*range(w.count)}]
        return sorted(complete, reverse=True, key=lambda each: each[0])

    def _own_names(self, run: str) -> list[str]:
        """The files of this host that belong to the run and have a good header."""
        names = []
        for path in self._files():
            with contextlib.suppress(OSError, DamagedCheckpointError):
                if Shards([shards.reader(path)], str(path)).about["run"] == run:
                    names.append(path.name)
        return names

    def _open(
        self, written: Written, holders: Mapping[int, Sequence[int]], files: list[Shards]
    ) -> None:
        """Opens the file of every rank, here or at the processes that have it."""
        for rank in range(written.count):
            name = written.file(rank)
            files.append(Shards(self._readers(name, holders[rank]), str(self.folder / name)))

    def _readers(self, name: str, holders: Sequence[int]) -> list[Read]:
        """Ways to read a file, that on this host first."""
        places, addresses, exchange = self._world
        here = places[jax.process_index()]
        is_here = any(places[each] == here for each in holders)
        own = [shards.reader(self.folder / name)] if is_here else []
        away = dict.fromkeys(addresses[each] for each in holders if places[each] != here)
        return [*own, *(partial(exchange.get, each, name) for each in away if exchange)]

    def _all_good(self, name: str, work: Callable[[], None], report: Reporter) -> bool:
        """Does work that may find damage on some process; False on all if any found some."""

        def outcome() -> str | None:
            try:
                work()
            except (DamagedCheckpointError, OSError) as error:
                return reason(error)
            return None

        found = [line for line in run_on_all(name, outcome) if line]
        if found:
            report(f"{found[0]}; skipped")
        return not found

    # ---- keeping ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes the folder, and deletes what is there except the state that was restored.

        Raises:
            CheckpointError: the folder cannot be written, or belongs to another user.
        """
        run_on_all("memory.begun", self._make_folder)
        self._run = str(run_on_first("memory.id", self._make_id))
        restored = self._restored
        for path in [*self.folder.iterdir()]:
            if (
                restored is None
                or not re.fullmatch(NAME, path.name)
                or (_parsed(path.name)[0] != restored)
            ):
                path.unlink(missing_ok=True)
        run_on_all("memory.cleared", lambda: None)  # before the first file is written
        _ = self._world, self._start  # all processes ask for them here

    def save_async(self, step: int, state: Any, *, description: dict[str, Any]) -> None:
        """Keeps a state in the background; the caller may change or donate it at once.

        A failure is a warning in `wait`: the run goes on with the states that it has.

        Args:
            step: 0 or more.
            state: nested dict of jax arrays with any sharding, in canonical form.
            description: JSON values that `restore_newest` returns.
        """
        self.wait()
        self.newest = step
        tensors = saving.savable(state)
        blocks = list(own_blocks(tensors))
        about = {"run": self._run, "description": description}
        about |= {"tensors": manifest.shapes(tensors)}
        written = Written(step, self._start, jax.process_count())
        self._pending = Background(partial(self._write, written, about, blocks))

    def wait(self) -> None:
        """Waits for the last `save_async`; warns once of each kind of failure."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.wait()
        except Exception as error:
            line = (
                f"warning: could not keep a state in {self.folder}: {reason(error)}; after a death "
                "the run goes on from an older one (see checkpoint.memory_dir)"
            )
            if line not in self._warned:
                self._warned.add(line)
                self._warn(line)

    def remove(self) -> None:
        """Deletes the states of this host; call it once the run no longer needs them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Stops serving files to the other processes."""
        if "_world" in self.__dict__ and self._world[2] is not None:
            self._world[2].close()

    def _write(self, written: Written, about: dict[str, Any], blocks: list[Block]) -> None:
        """Writes and sends a state, in a thread; states that are no longer needed go first."""
        oldest = self._tried[0] if self._tried else written.step
        self._tried = [*self._tried, written.step][-NEWEST:]
        self._delete_old(oldest)
        rank = jax.process_index()
        path = self.folder / written.file(rank)
        shards.write(path, about, blocks)
        places, addresses, exchange = self._world
        partner = partner_of(places, rank)
        if exchange is not None and partner is not None:
            exchange.put(addresses[partner], path)
        self._written.append(written.step)
        if not coordination.is_alone():
            coordination.put(f"{SAID}/{rank}", json.dumps(self._written))
        self._delete_old(oldest)

    def _delete_old(self, oldest: int) -> None:
        """Deletes the states before the newest that all processes have written.

        Also those between it and step `oldest`: some process has failed to write its part. Others
        cannot still be writing it, because each finishes or gives up a state before it takes the
        next, and no step ends before all processes have begun it.
        """
        everywhere = self._written_everywhere()
        self._written = [x for x in self._written if x >= oldest or x == everywhere]
        for path in self._files():
            written = _parsed(path.name)[0]
            if written.start != self._start:
                old = everywhere >= 0
            else:
                old = written.step < max(everywhere, oldest) and written.step != everywhere
            if old:
                path.unlink(missing_ok=True)

    def _written_everywhere(self) -> int:
        """The newest step that all processes have written; -1 without one."""
        if coordination.is_alone():
            return max(self._written, default=-1)
        said = [set(json.loads(text)) for text in coordination.get_all(SAID).values()]
        common = set.intersection(*said) if len(said) == jax.process_count() else set()
        return max(common, default=-1)

    # ---- files -----------------------------------------------------------------------------------

    def _files(self) -> list[Path]:
        """The files of states on this host, of any start."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = [each for each in os.listdir(self.folder) if re.fullmatch(NAME, each)]
            return [self.folder / name for name in sorted(names)]
        return []

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if self.folder.stat().st_uid != os.getuid():
                raise PermissionError(errno.EACCES, "it belongs to another user")
            probe = self.folder / f".{os.getpid()}.partial"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"checkpoint.memory_dir={self._directory}: cannot write {self.folder}: "
                f"{reason(error)}; name a folder in memory or on a disk of each host"
            ) from error

    def _read_id(self) -> str:
        """The run's identity; empty if it has none."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self._run_dir / ID).read_text().strip()
        return ""

    def _make_id(self) -> str:
        if not (run := self._read_id()):
            run = secrets.token_hex(16)
            write_whole({self._run_dir / ID: f"{run}\n".encode()}, lambda _: nullcontext())
            self._publish()
        return run


def forget(run_dir: Path, publish: Callable[[], None] = lambda: None) -> None:
    """Makes later starts ignore what is in memory: the run goes on without it.

    An empty file takes the place of the run's identity, since a store is not told what is deleted.
    """
    if (run_dir / ID).exists():
        write_whole({run_dir / ID: b""}, lambda _: nullcontext())
        publish()


def _load(assembly: Assembly, wanted: Mapping[str, Any], loaded: dict[str, jax.Array]) -> None:
    for name, x in wanted.items():
        loaded[name] = assembly.array(name, x)


def _parsed(name: str) -> tuple[Written, int]:
    """Reads the name of a file: its state and its rank."""
    match = re.fullmatch(NAME, name)
    if match is None:
        raise ValueError(f"{name} is not the name of a state's file")
    return Written(int(match[1]), match[2], int(match[4])), int(match[3])


def _hash(run_dir: str | Path) -> str:
    return hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:16]
