"""Files that processes of a run send each other over TCP: put a whole one, get bytes of one.

Each process serves the files of one folder. A request is a line of JSON, and for `put` the bytes
after it; the answer is a line of JSON, and for `get` the bytes after it. Only processes of this run
know the token that every request has to name. Nothing here uses jax or runs code that it receives.
"""

import contextlib
import hmac
import json
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from jaxptd.config.run import address_of

TIMEOUT = 60.0  # seconds without a byte after which a connection counts as broken
LONGEST = 4096  # bytes of a request's line
CHUNK = 2**20  # bytes copied at a time


class Exchange:
    """Serves the files of a folder to the other processes, and reads theirs.

    Args:
        folder: of this process's files; must exist when a file is put.
        pattern: of the names of files that may be put and got.
        host: at which the other processes reach this one.
        token: which all processes of the run know.
    """

    def __init__(self, folder: Path, pattern: str, *, host: str, token: str) -> None:
        self._folder, self._pattern, self._token = folder, re.compile(pattern), token
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = _Server((host, 0), self._answer, family)
        self.address = address_of(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # ---- the other processes' files -------------------------------------------------------------

    def put(self, address: str, path: Path) -> None:
        """Copies a file of this process into another one's folder, whole or not at all.

        Raises:
            OSError: the other process is gone or cannot write it.
        """
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            with self._asked(address, {"put": path.name, "size": size}) as (connection, answers):
                connection.sendfile(file)
                _check_answer(answers, address)

    def get(self, address: str, name: str, offset: int, size: int) -> bytes:
        """Bytes of a file in another process's folder, fewer at its end. Raises OSError."""
        request = {"get": name, "offset": offset, "size": size}
        with self._asked(address, request) as (_, answers):
            length = _check_answer(answers, address)
            data = answers.read(length)
        if len(data) != length:
            raise ConnectionResetError(f"{address} sent {len(data)} bytes of {length}")
        return data

    @contextlib.contextmanager
    def _asked(self, address: str, request: dict[str, Any]) -> Iterator[tuple[Any, IO[bytes]]]:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT) as connection:
            connection.sendall(json.dumps({**request, "token": self._token}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                yield connection, answers

    # ---- this process's files -------------------------------------------------------------------

    def _answer(self, requests: IO[bytes], answers: IO[bytes]) -> None:
        try:
            request = json.loads(requests.readline(LONGEST))
            if not hmac.compare_digest(str(request["token"]).encode(), self._token.encode()):
                raise PermissionError("another token")
            data = self._put(request, requests) if "put" in request else self._got(request)
        except OSError as error:
            reply: dict[str, Any] = {"error": error.strerror or str(error), "number": error.errno}
            data = b""
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # nothing of this run
        else:
            reply = {"size": len(data)}
        answers.write(json.dumps(reply).encode() + b"\n" + data)

    def _put(self, request: dict[str, Any], content: IO[bytes]) -> bytes:
        path, size = self._path(request["put"]), int(request["size"])
        aside = path.with_name(f".{path.name}.partial")
        try:
            with aside.open("wb") as file:
                _copy(content, file, size)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        return b""

    def _got(self, request: dict[str, Any]) -> bytes:
        with self._path(request["get"]).open("rb") as file:
            file.seek(int(request["offset"]))
            return file.read(int(request["size"]))

    def _path(self, name: Any) -> Path:
        if not isinstance(name, str) or not self._pattern.fullmatch(name):
            raise PermissionError("not a name of such a file")
        return self._folder / name


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """Copies bytes; after a failure it reads on to the end, so that the sender gets the reason."""
    failure: OSError | None = None
    while size:
        data = source.read(min(size, CHUNK))
        if not data:
            raise ConnectionResetError("the sender has gone")
        size -= len(data)
        try:
            if failure is None:
                target.write(data)
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def _check_answer(answers: IO[bytes], address: str) -> int:
    """The number of bytes that follow. Raises OSError with the other process's reason."""
    line = answers.readline(LONGEST)
    if not line:
        raise ConnectionResetError(f"{address} does not answer")
    reply = json.loads(line)
    if "error" in reply:
        raise OSError(reply["number"] or 0, f"{reply['error']} (at {address})")
    return int(reply["size"])


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[[IO[bytes], IO[bytes]], None],
        family: socket.AddressFamily,
    ) -> None:
        self.address_family = family

        class Handler(socketserver.StreamRequestHandler):
            timeout = TIMEOUT

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the other process has gone
                    answer(cast(IO[bytes], self.rfile), cast(IO[bytes], self.wfile))

        super().__init__(address, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a broken connection is noticed by the process that asked."""
