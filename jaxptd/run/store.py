"""A run directory in an object store: `train.run_dir: s3://bucket/run`.

    URL/owner.json            which process writes there, while one does
    URL/checkpoints/          see `jaxptd.checkpoint.stored`
    URL/config.yaml, metrics.jsonl, base/, tensorboard/ ...    as in a directory on disk

The files are written into a folder of this machine, which ends with the process, and copied to the
store when the run begins, after each checkpoint and at its end. What a killed run has logged since
its last checkpoint is lost, with the steps that it repeats.
"""

import contextlib
import fnmatch
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from jaxptd.checkpoint.stored import StoreFolders
from jaxptd.distributed.coordination import first_only
from jaxptd.errors import UserError
from jaxptd.run.holder import Holder
from jaxptd.stores import StoreError, StorePath, fetch, scratch_folder

OWNER = "owner.json"
CHECKPOINTS = "checkpoints"
# By a run that resumes.
READ = ("config.yaml", "metrics.jsonl", "run_id", "reference.npz", "base/*", "*.json")


class StoreCopy:
    """The files of a run on this machine, and their copies in the store.

    Args:
        url: of the run.
        say: prints a line.
        may_write: raises UserError if another run has taken this one over.
    """

    def __init__(
        self,
        url: StorePath,
        say: Callable[[str], None],
        *,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.url, self._say, self._may_write = url, say, may_write
        self._copied: dict[str, tuple[int, int]] = {}
        self._publishing = threading.Lock()  # the thread that saves publishes as well
        self._warned = False
        self.pulled = False

    @cached_property
    def folder(self) -> Path:
        """The folder on this machine, named as the run."""
        folder = scratch_folder() / self.url.name
        folder.mkdir()
        return folder

    def pull(self) -> bool:
        """Copies what a run resumes from into the folder; true if there are checkpoints as well."""
        keys = self.url.store.listing(self.url.key)
        # By name, because a listing may lack what has just been written.
        known = {f"{self.url.key}/{name}" for name in READ if "*" not in name}
        wanted = [key for key in known if key not in keys and self.url.store.exists(key)]
        wanted += [key for key in keys if self._is_read(self.url.inside(key))]
        fetch(self.url, self.folder, wanted)
        self.pulled = True
        return bool(StoreFolders(self.url / CHECKPOINTS).all())

    def _is_read(self, name: str) -> bool:
        if name == OWNER or name.startswith(f"{CHECKPOINTS}/"):
            return False
        return any(
            fnmatch.fnmatchcase(name, each) and name.count("/") <= 1 + each.count("/")
            for each in READ
        )

    def publish(self) -> bool:
        """Copies files that have changed since they were copied; True if it could.

        Warns if it cannot, once until it can again.
        """
        with self._publishing:
            try:
                self._may_write()
                changed = self._changed()
                self.url.store.each(self._copy, changed)
            except (UserError, OSError) as error:
                if not self._warned:
                    self._say(f"warning: could not copy the logs to {self.url}: {error}")
                self._warned = True
            else:
                self._copied |= changed
                self._warned = False
            return not self._warned

    def _changed(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file that differs from its copy."""
        changed = {}
        for path in sorted(filter(Path.is_file, self.folder.rglob("*"))):
            stat, name = path.stat(), path.relative_to(self.folder).as_posix()
            if self._copied.get(name) != (state := (stat.st_size, stat.st_mtime_ns)):
                changed[name] = state
        return changed

    def _copy(self, name: str) -> None:
        self.url.store.write((self.url / name).key, (self.folder / name).read_bytes())


class StoreLock:
    """Who writes a run in a store; the interface of `RunLock`.

    A store cannot tell that a process has ended, so a run that starts takes one over from another
    host. The earlier one, if it still runs, notices before it writes its next checkpoint, and ends.

    Args:
        url: of the run.
        say: prints a line.
    """

    def __init__(self, url: StorePath, *, say: Callable[[str], None]) -> None:
        self._url, self._key, self._say = url, (url / OWNER).key, say
        self._word: str | None = None  # of this run, once it holds the lock

    @first_only
    def check(self) -> None:
        """Raises UserError if a process on this host writes there; writes nothing."""
        self._require_free()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Holds the lock inside. Raises UserError as `check`, or if the store cannot be written."""
        try:
            self._take()
            yield
        finally:
            self.release()

    @first_only
    def release(self) -> None:
        """Gives the run free, unless another has taken it over."""
        word, self._word = self._word, None
        if word is not None:
            with contextlib.suppress(StoreError):
                if self._owner()[0] == word:
                    self._url.store.delete([self._key])

    def require(self) -> None:
        """Raises UserError if another run has taken this one over, even if it has ended since."""
        if self._word is None:  # this process holds no lock, or has released it
            return
        word, holder = self._owner()
        if word != self._word:
            since = holder or f"it has ended since, or {OWNER} was deleted"
            raise UserError(f"another run has taken {self._url} over: {since}")

    @first_only
    def _take(self) -> None:
        holder = self._require_free()
        self._word = secrets.token_hex(8)
        fields = json.loads(Holder.this_process().to_json()) | {"word": self._word}
        self._url.store.write(self._key, json.dumps(fields).encode())
        if holder is not None:
            self._say(
                f"warning: took train.run_dir={self._url} over from {holder}, which has not "
                "released it; if it still runs, it will end at its next checkpoint"
            )

    def _require_free(self) -> Holder | None:
        """The holder to take over from, if any. Raises UserError if it runs on this host."""
        holder = self._owner()[1]
        if holder is not None and holder.is_of_this_host() and holder.is_running():
            raise UserError(
                f"train.run_dir={self._url} is in use by {holder}; wait until it ends, stop it, or "
                "use another URL"
            )
        return holder

    def _owner(self) -> tuple[str | None, Holder | None]:
        """The word and the process in the store; None if there is none, or nothing readable."""
        try:
            fields = json.loads(self._url.store.read(self._key))
            word = str(fields.pop("word"))
            return word, Holder.from_json(json.dumps(fields))
        except StoreError:  # which is a ValueError: the store did not answer, there may be an owner
            raise
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return None, None
