"""The S3 server that tests of stores talk to."""

from collections.abc import Iterator

import pytest

from benchmarks.lib.s3_server import Faults, faulty_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    yield from faulty_server(monkeypatch)
