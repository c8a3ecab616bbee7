"""An S3 server on this machine (moto's, over loopback), which can be made to fail in between."""

import dataclasses
import functools
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moto.backends import get_backend
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from jaxptd import stores

XML = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{0}</Code><Message>{0}</Message></Error>'
STATUS = {"InternalError": "500 Server", "SlowDown": "503 Slow", "ExpiredToken": "400 Bad"}
STATUS |= {
    "TooManyRequests": "429 Many",
    "InvalidAccessKeyId": "403 Forbidden",
    "AccessDenied": "403 Forbidden",
}

Request = tuple[str, str]  # method, and bucket/key
Fault = Callable[[str, str], str | None]


@dataclasses.dataclass
class Faults:
    """What goes wrong between a client and the server.

    Args:
        fault: of a request; a code of S3, "drop" (no answer, a closed connection), "hang" (no
            answer until `release`), or None, which lets it pass.
        unlisted: keys that listings lack although the objects are there.
        ghosts: keys that listings still have although the objects are gone.
        requests: all so far, also those that failed.
        sent: bytes of bodies of GET.
        received: bytes of bodies of PUT and POST.
    """

    fault: Fault = lambda method, key: None
    unlisted: set[str] = dataclasses.field(default_factory=set)
    ghosts: set[str] = dataclasses.field(default_factory=set)
    requests: list[Request] = dataclasses.field(default_factory=list)
    sent: int = 0
    received: int = 0
    release: threading.Event = dataclasses.field(default_factory=threading.Event)

    def times(self, number: int, code: str, *, method: str = "", key: str = "") -> None:
        """The next requests of this kind fail this many times."""
        left = [number]

        def fault(how: str, what: str) -> str | None:
            if left[0] and method in ("", how) and re.search(key, what):
                left[0] -= 1
                return code
            return None

        self.fault = fault

    def of(self, method: str, key: str = "") -> list[str]:
        """The keys of the requests of this kind so far."""
        return [what for how, what in self.requests if how == method and re.search(key, what)]


class Between:
    """The server's application with faults before it."""

    def __init__(self, application: Any) -> None:
        self.application, self.faults = application, Faults()

    def __call__(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        faults, method = self.faults, environ["REQUEST_METHOD"]
        key = environ["PATH_INFO"].lstrip("/")
        faults.requests.append((method, key))
        code = faults.fault(method, key)
        if code == "hang":
            faults.release.wait(60)
            code = "drop"
        if code == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("dropped")
        if code is not None:
            body = XML.format(code).encode()
            start(STATUS[code], [("Content-Type", "application/xml")])
            return [body if method != "HEAD" else b""]
        faults.received += int(environ.get("CONTENT_LENGTH") or 0)
        return self._answered(environ, start, method)

    def _answered(self, environ: dict[str, Any], start: Any, method: str) -> Iterable[bytes]:
        said: list[Any] = []
        body = b"".join(self.application(environ, lambda *each: said.append(each)))
        status, headers, *_ = said[0]
        if method == "GET" and "list-type" in environ.get("QUERY_STRING", ""):
            body = self._listed(body.decode(), environ["PATH_INFO"].strip("/")).encode()
            headers = [each for each in headers if each[0].lower() != "content-length"]
            headers.append(("Content-Length", str(len(body))))
        elif method == "GET":
            self.faults.sent += len(body)
        start(status, headers)
        return [body]

    def _listed(self, text: str, bucket: str) -> str:
        def kept(match: re.Match[str]) -> str:
            key = re.search(r"<Key>(.*?)</Key>", match[0])
            lacks = key is not None and f"{bucket}/{key[1]}" in self.faults.unlisted
            return "" if lacks else match[0]

        text = re.sub(r"<Contents>.*?</Contents>", kept, text, flags=re.DOTALL)
        for ghost in sorted(self.faults.ghosts):
            entry = (
                f"<Contents><Key>{ghost.partition('/')[2]}</Key><Size>1</Size>"
                "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                '<ETag>"0"</ETag><StorageClass>STANDARD</StorageClass></Contents>'
            )
            text = text.replace("</ListBucketResult>", f"{entry}</ListBucketResult>")
        return text


@functools.cache
def server() -> tuple[str, Between]:
    """Starts the server of this process once; its URL and what stands before it."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    between = Between(DomainDispatcherApplication(create_backend_app))
    made = make_server("127.0.0.1", 0, between, threaded=True)
    made.daemon_threads = True  # type: ignore[attr-defined]  # of the mixin for threads
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{made.server_port}", between


BUCKET, ACCOUNT = "bucket", "123456789012"  # the account is that of any key
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
}


def faulty_server(monkeypatch: Any) -> Iterator[Faults]:
    """The server with an empty bucket and no waits, for one test."""
    get_backend("s3").reset()
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(stores, "WAITS", (0.0, 0.0, 0.0))
    faults = _empty()
    yield faults
    faults.release.set()


def start(fault: Fault) -> str:
    """The server with an empty bucket for this process and those it starts; the bucket's URL."""
    os.environ.update(environment())
    _empty().fault = fault
    return f"s3://{BUCKET}"


def environment() -> dict[str, str]:
    """Variables by which clients find the server."""
    return {**ENVIRONMENT, "AWS_ENDPOINT_URL": server()[0]}


def _empty() -> Faults:
    """Makes the bucket; the faults that its requests will meet."""
    _, between = server()
    get_backend("s3")[ACCOUNT]["aws"].create_bucket(BUCKET, "us-east-1")
    between.faults = Faults()
    return between.faults
