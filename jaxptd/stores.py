"""Object stores: `s3://`, `gs://` and every other URL that fsspec knows. Only this file imports it.

A store holds objects under keys such as bucket/run/config.yaml. An object is written whole: others
read all of it or nothing. There are no folders and no renames, so several objects become visible
together only if one of them, written last, names the others.

A name is a URL or a path on disk. `place` tells which, and a `StorePath` is no `os.PathLike`, so
that nothing takes it for a file on disk by mistake.
"""

import atexit
import contextlib
import dataclasses
import errno
import io
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from jaxptd.errors import UserError, install, quoted

WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before each further attempt
CONNECT, READ = 10.0, 60.0  # seconds until an attempt counts as failed
AT_ONCE = 8  # requests at the same time
BLOCK = 2**22  # bytes that reading an object as a file fetches at a time
SMALL = 2**26  # bytes of files that are copied, and their ends
SMALL_FILES = frozenset({".json", ".jinja", ".txt", ".model", ".yaml"})
NO_STORES = frozenset({"file", "local", "http", "https", "ftp", "sftp", "ssh", "data"})
VERSIONS = ("ETag", "etag", "generation", "created", "mtime")  # where stores have one
EXTRAS = {"s3": "stores", "s3a": "stores", "gs": "gs", "gcs": "gs"}

T = TypeVar("T")


class StoreError(UserError):
    """A store refuses, does not answer, or does not exist; names the URL and the remedy."""


# ---- names ---------------------------------------------------------------------------------------

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(name: object) -> bool:
    """True for the URL of a store; false for a path on disk.

    >>> is_url("s3://bucket/run"), is_url("runs/a"), is_url("C:"), is_url("s3:")
    (True, False, False, False)
    """
    return isinstance(name, StorePath) or bool(isinstance(name, str) and _URL.match(name))


@dataclasses.dataclass(frozen=True)
class StorePath:
    """The URL of an object, or of the part of a key that several objects begin with.

    Args:
        scheme: such as s3.
        key: bucket and name, without slashes at its ends.
        store: that has the object.
    """

    scheme: str
    key: str
    store: "Store" = dataclasses.field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def __truediv__(self, name: str) -> "StorePath":
        return dataclasses.replace(self, key=f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def bucket(self) -> str:
        return self.key.partition("/")[0]

    @property
    def parent(self) -> "StorePath":
        """The URL without its last name; a bucket's is the bucket, as that of `/` is `/`."""
        return dataclasses.replace(self, key=self.key.rpartition("/")[0] or self.key)

    def with_suffix(self, suffix: str) -> "StorePath":
        """The same URL with another end of its name."""
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def inside(self, key: str) -> str:
        """The rest of a longer key."""
        return key.removeprefix(self.key).lstrip("/")


Place = Path | StorePath


def place(
    name: str | Path | StorePath, *, field: str = "", say: Callable[[str], None] | None = None
) -> Place:
    """A path on disk, or the URL of an object, whose store is opened but not asked yet.

    Args:
        name: a path or a URL.
        field: of a config that names it, for messages.
        say: prints a line about a store that does not answer.

    Raises:
        StoreError: nothing reads such URLs, or the package that does is missing.
    """
    if isinstance(name, StorePath) or not is_url(name):
        return name if isinstance(name, StorePath) else Path(name)
    scheme, _, key = str(name).partition("://")
    scheme, key = scheme.lower(), re.sub("/+", "/", key).strip("/")
    sign = " " if field.endswith(":") else "="
    shown = f"{field}{sign}{quoted(str(name))}" if field else quoted(str(name))
    if not key:
        raise StoreError(f"{shown} names no bucket; use {scheme}://bucket/name")
    return StorePath(scheme, key, Store(scheme, _filesystem(scheme, shown), say=say or _warn))


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


# ---- fsspec --------------------------------------------------------------------------------------


def _filesystem(scheme: str, shown: str) -> Any:
    """fsspec's file system of a scheme, without its caches of listings and its own retries."""
    try:
        import fsspec  # the optional extra
    except ImportError as error:
        extra = EXTRAS.get(scheme, "stores")
        raise StoreError(f"{shown} needs fsspec; {install(extra)}") from error
    if scheme in NO_STORES or scheme not in fsspec.available_protocols():
        raise StoreError(
            f"{shown}: no store has URLs with {scheme}://; use s3://, gs://, another that "
            "fsspec knows, or a path on disk"
        )
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        remedy = install(EXTRAS[scheme]) if scheme in EXTRAS else " ".join(str(error).split())
        raise StoreError(f"{shown} needs a package that is missing; {remedy}") from error
    options: dict[str, Any] = {"use_listings_cache": False}
    if "s3" in (kind.protocol if isinstance(kind.protocol, tuple) else (kind.protocol,)):
        once = {"mode": "standard", "total_max_attempts": 1}
        options["max_concurrency"] = 1  # several objects are read at once, not parts of one
        options["config_kwargs"] = {
            "connect_timeout": CONNECT,
            "read_timeout": READ,
            "max_pool_connections": 4 * AT_ONCE,
            "retries": once,
        }
    try:
        system = kind(**options)
    except Exception as error:  # each kind has errors of its own
        raise StoreError(f"{shown}: {_words(error)}") from error
    if hasattr(kind, "retries"):
        system.retries = 1  # `Store` tries again itself, and says so
    return system


class Store:
    """Reads and writes objects; tries again what fails for a while, and says so in one line.

    Keys include the bucket. All methods raise StoreError unless they say otherwise.

    Args:
        scheme: of its URLs.
        system: fsspec's file system.
        say: prints a line.
        wait: sleeps for some seconds.
        waits: seconds before each further attempt. None takes `WAITS`.
    """

    def __init__(
        self,
        scheme: str,
        system: Any,
        *,
        say: Callable[[str], None] = _warn,
        wait: Callable[[float], None] = time.sleep,
        waits: Sequence[float] | None = None,
    ) -> None:
        self._scheme, self._system = scheme, system
        self._say, self._wait = say, wait
        self._waits = WAITS if waits is None else waits
        self._troubled = False

    def read(self, key: str) -> bytes:
        """An object's bytes. Raises FileNotFoundError if there is none."""
        return self._try("read", key, lambda: bytes(self._system.cat_file(key)))

    def read_range(self, key: str, start: int, stop: int) -> bytes:
        """Some bytes of an object, by a range request.

        Raises:
            FileNotFoundError: there is no object.
        """

        def read() -> bytes:
            data = bytes(self._system.cat_file(key, start=start, end=stop))
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data)} bytes came, not {stop - start}")
            return data

        return self._try("read", key, read) if stop > start else b""

    def size(self, key: str) -> int | None:
        """An object's bytes; None if there is none. Does not depend on listings."""

        def ask() -> int | None:
            info = self._system.info(key)
            return None if info["type"] == "directory" else int(info["size"])

        try:
            return self._try("look for", key, ask)
        except FileNotFoundError:
            return None

    def version(self, key: str) -> str:
        """Differs once an object has been replaced; empty if there is none."""
        try:
            info = self._try("look for", key, lambda: self._system.info(key))
        except FileNotFoundError:
            return ""
        return str([info.get(name) for name in ("size", *VERSIONS)])

    def exists(self, key: str) -> bool:
        """True if there is an object under this key."""
        return self.size(key) is not None

    def write(self, key: str, data: bytes) -> None:
        """Writes an object whole, in place of an earlier one."""
        self._try("write", key, lambda: self._system.pipe_file(key, data), writing=True)

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, as far as they exist."""

        def delete(key: str) -> None:
            try:
                self._try("delete", key, lambda: self._system.rm_file(key))
            except FileNotFoundError:
                return

        self.each(delete, keys)

    def listing(self, key: str) -> dict[str, int]:
        """Keys that begin with `key/`, and their bytes; new objects may be missing for a while."""

        def ask() -> dict[str, int]:
            found = self._system.find(key, detail=True)
            inside = f"{key}/"
            return {
                name.lstrip("/"): int(info["size"] or 0)
                for name, info in found.items()
                if name.lstrip("/").startswith(inside) and info["type"] == "file"
            }

        try:
            return self._try("list", key, ask)
        except FileNotFoundError:
            return {}

    def glob(self, pattern: str) -> list[str]:
        """Keys that a pattern matches, sorted; `**` also matches slashes."""

        def ask() -> list[str]:
            found = self._system.glob(pattern, detail=True)
            return sorted(x.lstrip("/") for x, info in found.items() if info["type"] == "file")

        try:
            return self._try("list", pattern, ask)
        except FileNotFoundError:
            return []

    def open(self, key: str) -> BinaryIO:
        """An object as a file to read, by ranges. Raises FileNotFoundError if there is none."""
        size = self.size(key)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no {self._scheme}://{key}")
        return io.BufferedReader(_Ranges(self, key, size), BLOCK)

    def each(self, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """The results of some work on each item, several at a time; all have ended on return.

        The threads are daemons: a process that ends does not wait for them.

        Raises:
            BaseException: the first that a work raised; work that has not begun then is left out.
        """
        given = list(items)
        results: dict[int, T] = {}
        errors: list[BaseException] = []
        numbers, lock = iter(range(len(given))), threading.Lock()

        def run() -> None:
            while not errors:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    results[number] = work(given[number])
                except BaseException as error:
                    errors.append(error)

        threads = [
            threading.Thread(target=run, name="jaxptd-store", daemon=True)
            for _ in range(min(AT_ONCE, len(given)))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # an interrupt
            errors.append(error)
            raise
        if errors:
            raise errors[0]
        return [results[number] for number in range(len(given))]

    def _try(self, verb: str, key: str, call: Callable[[], T], *, writing: bool = False) -> T:
        """Calls until it works; waits longer each time."""
        url = f"{self._scheme}://{key}"
        waits, tried = list(self._waits), 0
        while True:
            tried += 1
            try:
                result = call()
            except Exception as error:
                if isinstance(error, FileNotFoundError) and not _no_bucket(error, writing):
                    raise FileNotFoundError(errno.ENOENT, f"there is no {url}") from error
                if not _may_pass(error):
                    raise StoreError(f"could not {verb} {url}: {_words(error)}") from error
                if not waits:
                    raise StoreError(
                        f"could not {verb} {url}: {_words(error)}; gave up after {tried} attempts"
                    ) from error
                if not self._troubled:
                    self._troubled = True
                    self._say(f"could not {verb} {url}: {_words(error)}; trying again")
                self._wait(waits.pop(0))
            else:
                if tried > 1:
                    self._troubled = False
                return result


class _Ranges(io.RawIOBase):
    """An object as a file without a buffer: each read is a range request."""

    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self._size, self._at = store, key, size, 0

    @property
    def name(self) -> str:
        """The URL; of the buffer around it as well."""
        return f"{self._store._scheme}://{self._key}"

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        data = self._store.read_range(self._key, self._at, max(stop, self._at))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


# ---- what an error means -------------------------------------------------------------------------

_PASSING = frozenset({408, 425, 429})  # answers that ask to try again, besides those from 500 on
_CODES = frozenset(
    {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "OperationAborted"}
)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_LIBRARIES = ("aiohttp", "aiobotocore", "botocore", "urllib3", "requests", "gcsfs", "google")


def _causes(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in found:
        found.append(cause)
        cause = cause.__cause__ or cause.__context__
    return found


def _answer(error: BaseException) -> tuple[int | None, str]:
    """HTTP status and code of the answer behind an error; None and "" if none came."""
    for cause in _causes(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(response.get("Error", {}).get("Code", ""))
            return status or (int(code) if code.isdigit() else None), code
        number: Any = getattr(cause, "code", None) or getattr(cause, "status", None)
        if isinstance(number, int) and 400 <= number < 600:
            return number, str(number)
    return None, ""


def _no_bucket(error: BaseException, writing: bool) -> bool:
    code = _answer(error)[1]
    said = "bucket" in str(error).lower() and "not exist" in str(error).lower()
    return code == "NoSuchBucket" or said or (writing and code in ("404", "NoSuchKey"))


def _is_about_credentials(error: BaseException) -> bool:
    names = [type(each).__name__ for each in _causes(error)]
    return any("Credential" in each or "Auth" in each or "Token" in each for each in names)


def _may_pass(error: BaseException) -> bool:
    """True for a failure that another attempt may not meet."""
    status, code = _answer(error)
    if _is_about_credentials(error):
        return False
    if status is not None or code:
        return code in _CODES or (status is not None and (status >= 500 or status in _PASSING))
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
        return False
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    library = type(error).__module__.partition(".")[0]
    invalid = "Validation" in type(error).__name__ or "Invalid" in type(error).__name__
    return (library in _LIBRARIES and not invalid) or type(error) is OSError


def _words(error: BaseException) -> str:
    """The failure in a few words, with a remedy."""
    status, code = _answer(error)
    said = quoted(" ".join(str(error).split()) or type(error).__name__, 160)
    if code in _EXPIRED:
        return f"the credential has expired ({code}); renew it"
    if _no_bucket(error, writing=False):
        return "there is no such bucket; make it, or correct the name"
    if status in (401, 403) or isinstance(error, PermissionError) or _is_about_credentials(error):
        shown = code if code and not code.isdigit() else said
        return f"the credential is missing or wrong, or may not do this ({shown})"
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return "no answer in time"
    if status == 400 and code.isdigit():  # an answer to HEAD has no body that would say why
        return "the store answered 400, as it does for a credential that has expired"
    if status is not None:
        return f"the store answered {status} ({code})" if code else f"the store answered {status}"
    if isinstance(error, NotImplementedError):
        return "it can only be read"
    return said


# ---- places on disk and in stores alike ----------------------------------------------------------


def read_bytes(where: Place) -> bytes:
    """The bytes of a file or an object. Raises OSError; FileNotFoundError if there is none."""
    return where.store.read(where.key) if isinstance(where, StorePath) else where.read_bytes()


def read_range(where: Place, start: int, stop: int) -> bytes:
    """Some bytes of a file or an object; fewer from a file that ends before. Raises OSError."""
    if isinstance(where, StorePath):
        return where.store.read_range(where.key, start, stop)
    with open(where, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def size_of(where: Place) -> int | None:
    """The bytes of a file or an object; None if there is none."""
    if isinstance(where, StorePath):
        return where.store.size(where.key)
    # Unlike `Path.is_file`, this raises nothing for a name that is too long or out of reach.
    return os.path.getsize(where) if os.path.isfile(where) else None


def open_binary(where: Place) -> BinaryIO:
    """Opens a file or an object to read. Raises OSError; FileNotFoundError if there is none."""
    return where.store.open(where.key) if isinstance(where, StorePath) else open(where, "rb")


def scratch_folder() -> Path:
    """Makes a folder on this machine that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="jaxptd-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def on_disk(where: Place) -> Path:
    """The path itself, or that of a copy of one object; of nothing, if there is no object."""
    if not isinstance(where, StorePath):
        return where
    path = scratch_folder() / where.name
    with contextlib.suppress(FileNotFoundError):
        path.write_bytes(read_bytes(where))
    return path


def local_copy(where: StorePath) -> Path:
    """A folder with copies of the small files beside a URL's weights, such as configs.

    Of folders inside it only templates: a run has its checkpoints there, a bucket anything.
    """
    inside = where.store.listing(where.key)
    small = [key for key, n in inside.items() if n <= SMALL and _is_beside(where.inside(key))]
    return fetch(where, scratch_folder(), small)


def _is_beside(name: str) -> bool:
    suffix = PurePosixPath(name).suffix
    return suffix in SMALL_FILES and ("/" not in name or suffix == ".jinja")


def fetch(where: StorePath, folder: Path, keys: Iterable[str] | None = None) -> Path:
    """Copies objects into a folder, under the rest of their keys.

    Args:
        where: what the keys begin with.
        folder: on disk.
        keys: of the objects. None takes all that are listed.
    """
    chosen = list(where.store.listing(where.key)) if keys is None else list(keys)
    for key, data in zip(chosen, where.store.each(where.store.read, chosen), strict=True):
        name = PurePosixPath(where.inside(key))
        if name.is_absolute() or ".." in name.parts:
            raise StoreError(f"{where.scheme}://{key} leads out of the folder; rename it")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
