"""Files that processes send each other, here two ends in one process, over loopback."""

import errno
import json
import os
import socket

import pytest

from jaxptd.distributed import exchange
from jaxptd.distributed.exchange import Exchange

NAME = r"[a-z]+"
TOKEN = "a" * 32
DATA = bytes(range(256)) * 5000  # more than one chunk


@pytest.fixture
def ends(tmp_path):
    """Two processes' ends of the exchange."""
    made = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        made.append(Exchange(tmp_path / name, NAME, host="127.0.0.1", token=TOKEN))
    yield made
    for each in made:
        each.close()


@pytest.fixture
def file(tmp_path, ends):
    path = tmp_path / "here" / "state"
    path.write_bytes(DATA)
    return path


def test_a_file_arrives_whole_and_its_bytes_can_be_read(ends, file, tmp_path):
    here, there = ends
    here.put(there.address, file)
    assert (tmp_path / "there" / "state").read_bytes() == DATA
    assert there.get(here.address, "state", 0, len(DATA)) == DATA
    assert there.get(here.address, "state", 300, 7) == DATA[300:307]
    assert there.get(here.address, "state", len(DATA) - 3, 100) == DATA[-3:]


def test_what_is_missing_is_an_error_with_the_reason(ends):
    with pytest.raises(FileNotFoundError, match="No such file or directory .at 127.0.0.1:"):
        ends[0].get(ends[1].address, "nothing", 0, 1)


@pytest.mark.parametrize("name", ["../here/state", "State", "", ".state.partial", "/etc/passwd"])
def test_other_names_are_refused(ends, name):
    with pytest.raises(OSError, match="not a name of such a file"):
        ends[0].get(ends[1].address, name, 0, 1)


def test_a_full_disk_there_is_said_here_and_nothing_stays(ends, file, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exchange.os, "replace", full)
    with pytest.raises(OSError, match="No space left on device .at"):
        ends[0].put(ends[1].address, file)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_full_disk_in_the_middle_is_said_too(tmp_path):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (tmp_path / "file").open("w+b") as source:
        source.write(DATA + b"next")
        source.seek(0)
        with pytest.raises(OSError, match="No space left on device"):
            exchange._copy(source, Full(), len(DATA))
        assert source.read() == b"next"  # the sender could send all of it


def test_a_sender_that_dies_leaves_no_file(ends, tmp_path):
    host, _, port = ends[1].address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        request = {"put": "state", "size": len(DATA), "token": TOKEN}
        connection.sendall(json.dumps(request).encode() + b"\n" + DATA[:1000])
        connection.shutdown(socket.SHUT_WR)
        assert b"the sender has gone" in connection.makefile("rb").readline()
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1\n",
        b"[]\n",
        b'{"get": "state"}\n',
        b'{"get": "state", "offset": 0, "size": 1, "token": "other"}\n',
        b'{"get": "state", "offset": "x", "size": 1, "token": "' + TOKEN.encode() + b'"}\n',
    ],
)
def test_strangers_get_nothing(ends, file, line):
    host, _, port = ends[0].address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert answer == b"" or b"error" in answer
    assert DATA[:1] not in answer


def test_a_process_that_has_gone_is_an_error(ends, file):
    ends[1].close()
    with pytest.raises(ConnectionRefusedError):
        ends[0].put(ends[1].address, file)
