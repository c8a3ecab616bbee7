"""Signals are noticed while the main thread is busy outside Python."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from turns import slow

from jaxptd.errors import signal_watch

# One long call into C without the GIL, so that Python's handlers cannot run in the main thread.
BUSY = """
import hashlib, os, signal, sys, threading, time
from jaxptd.distributed.stop import Stop

def busy():
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))

def say_ready(main):  # once the main thread is in there: a signal before would find it in Python
    while sys._current_frames()[main].f_code.co_name != "busy":
        time.sleep(0.001)
    print("ready", flush=True)

end = os._exit if sys.argv[1] == "insist" else None
stop = Stop(on_asked=lambda: print("heard", flush=True), end=end)
with stop.watching(), stop.listening():
    threading.Thread(target=say_ready, args=[threading.get_ident()]).start()
    busy()
    print("asked" if stop.asked else "undisturbed", flush=True)
sys.exit(stop.exit_code)
"""
LONG, SHORT = 2_000_000_000, 300_000  # rounds: far longer than the test waits; a second
PATIENCE = 120  # seconds; a process that does not end at once takes much longer


def test_each_signal_is_passed_on_and_the_end_is_quiet():
    threads, found = set(threading.enumerate()), []
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with signal_watch(found.append):
            for _ in range(2):
                signal.raise_signal(signal.SIGUSR1)
                time.sleep(0.05)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [signal.SIGUSR1] * 2
    assert set(threading.enumerate()) == threads
    assert signal.set_wakeup_fd(-1) == -1  # unset, as before


@contextlib.contextmanager
def ready(code: str, *argv: str) -> Iterator[subprocess.Popen]:
    """Starts a process, waits until it reports ready, and kills it if it does not end by itself."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, *argv], **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), slow(signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_busy_process_at_once(number, code):
    with ready(BUSY, "insist", str(LONG)) as process:
        process.send_signal(number)
        assert process.stdout.readline() == "heard\n"  # one of two simultaneous signals may be lost
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) == code
        assert process.stderr.read() == ""


def test_without_insistence_the_process_ends_by_itself():
    with ready(BUSY, "wait", str(SHORT)) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130
        assert process.stdout.read() == "heard\nasked\n"


COMMAND = """
import hashlib, sys, time
from jaxptd.errors import run_command

def main():
    print("ready", flush=True)
    if sys.argv[1] == "busy":
        hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[2]))
    time.sleep(3600)

run_command(main)
"""


@pytest.mark.parametrize("kind", ["busy", "idle"])
def test_one_interrupt_ends_a_command(kind):
    with ready(COMMAND, kind, str(LONG)) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130
        assert process.stderr.read() == "stopped\n"
