"""The supervisor, with processes that import nothing: each test takes a fraction of a second."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from together import PATIENCE, ROOT

from jaxptd.distributed import launchers
from jaxptd.distributed.supervisor import HOST, Death, free_port, shared_variables, variables

DRIVER = """
import sys
from jaxptd.distributed import supervisor
supervisor.GRACE = {grace}
supervisor.POLL_INTERVAL = {poll}
def say(line):
    print(f"launch: {{line}}", file=sys.stderr, flush=True)
run = supervisor.Supervisor(
    lambda number: [sys.executable, "-I", "-S", "-c", {code!r}, str(number)],
    count={count}, restarts={restarts}, say=say, watched={watched})
sys.exit(run.run())
"""
PROCESS = """
import os, signal, sys, time
RANK, ATTEMPT = int(os.environ["RANK"]), int(sys.argv[1])
def note(text):
    with open("noted", "a") as file:
        file.write(f"{ATTEMPT} {RANK} {text}\\n")
def say(text):
    sys.stderr.write(text + "\\n")
    sys.stderr.flush()
def hang():
    while True:
        time.sleep(1)
"""


class Supervised:
    """A supervisor in a process of its own.

    Args:
        folder: where its processes write.
        code: what each of them runs, after `PROCESS`.
    """

    def __init__(
        self,
        folder: Path,
        code: str,
        *,
        count: int | str = 2,
        restarts: int = 0,
        grace: float = PATIENCE,
        poll: float = 0.01,
    ) -> None:
        self.folder = folder
        watched = isinstance(count, str)
        counted = f"lambda: int(open({count!r}).read())" if watched else f"lambda: {count}"
        words = {"count": counted, "restarts": restarts, "grace": grace, "watched": watched}
        words["poll"] = poll
        driver = DRIVER.format(code=PROCESS + code, **words)
        self.process = subprocess.Popen(
            [sys.executable, "-c", driver],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def noted(self) -> list[str]:
        """What the processes noted so far, sorted."""
        path = self.folder / "noted"
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def wait_for(self, count: int) -> None:
        """Waits until the processes have noted this many lines."""
        end = time.monotonic() + PATIENCE
        while len(self.noted()) < count:
            assert time.monotonic() < end
            time.sleep(0.01)

    def processor_seconds(self) -> float:
        """What the supervisor itself has used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def ended(self) -> tuple[int, list[str]]:
        """Its exit code, and the lines of its stderr."""
        self.out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, err.splitlines()


@pytest.fixture
def supervise(tmp_path):
    started = []

    def start(code: str, **options) -> Supervised:
        started.append(Supervised(tmp_path, code, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_the_processes_find_each_other(supervise):
    names = sorted({**shared_variables(3), **variables(0)})
    code = f"import json\nnote(json.dumps({{k: os.environ.get(k) for k in {names}}}))\nprint('out')"
    run = supervise(code, count=3)
    assert run.ended() == (0, [])
    assert run.out == "out\n"  # of the first process alone
    worlds = []
    for line in run.noted():
        world = launchers.find(launchers.ProcessesConfig(), json.loads(line.split(maxsplit=2)[2]))
        worlds.append(world)
    assert [(each.id, each.local, each.count) for each in worlds] == [(r, r, 3) for r in range(3)]
    assert len({each.coordinator for each in worlds}) == 1


def test_a_port_is_chosen_at_random_among_those_of_no_connection():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert not ports & set(range(low, high + 1))


def test_when_one_is_killed_the_others_are_and_all_start_again(supervise):
    code = """
note("begins")
if ATTEMPT < 2:
    while RANK == 1 and sum(line.startswith(f"{ATTEMPT} ") for line in open("noted")) < 3:
        time.sleep(0.01)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL if ATTEMPT else signal.SIGSEGV)
    hang()
"""
    run = supervise(code, count=3, restarts=5)
    code, lines = run.ended()
    assert (code, lines) == (
        0,
        [
            "launch: process 1 of 3 was killed by SIGSEGV; restart 1 of 5",
            "launch: process 1 of 3 was killed by SIGKILL; restart 2 of 5",
        ],
    )
    assert run.noted() == [f"{attempt} {rank} begins" for attempt in range(3) for rank in range(3)]


def test_after_the_last_restart_the_exit_code_is_that_of_the_death(supervise):
    code, lines = supervise("os.kill(os.getpid(), 9) if RANK else hang()", restarts=1).ended()
    assert code == 128 + 9
    assert lines == [
        "launch: process 1 of 2 was killed by SIGKILL; restart 1 of 1",
        "launch: process 1 of 2 was killed by SIGKILL; no restart is left (--restarts 1)",
    ]


def test_bad_input_is_not_tried_again_and_said_once(supervise):
    code = "note('begins')\nsay('error: process 0 of 2: no such file')\nsys.exit(2)"
    run = supervise(code, restarts=3)
    assert run.ended() == (2, ["error: process 0 of 2: no such file"])
    assert len(run.noted()) <= 2


def test_after_an_error_the_others_have_time_to_say_theirs(supervise):
    code = """
if RANK:
    sys.exit(1)
time.sleep(0.3)
say("Traceback")
say("error: mine")
sys.exit(3)
"""
    code, lines = supervise(code).ended()
    assert (code, lines[:2]) == (1, ["Traceback", "error: mine"])
    assert lines[2] == "launch: process 1 of 2 ended with exit code 1; no restart is left " + (
        "(--restarts 0)"
    )


def test_an_other_that_does_not_end_after_an_error_is_killed(supervise):
    code, lines = supervise("sys.exit(1) if RANK else hang()", grace=0.05).ended()
    assert (code, len(lines)) == (1, 1)


def test_lines_of_other_processes_have_their_number(supervise):
    code, lines = supervise("say(f'warning: {RANK}\\nand more')").ended()
    assert code == 0
    expected = ["and more", "process 1: and more", "process 1: warning: 1", "warning: 0"]
    assert sorted(lines) == expected


# Printed by process 1 of jax 0.12 when process 0 was killed.
JAX_ABORTS = """\
E1201 00:18:23.685911 17091 coordination_service_agent.cc:288] Polled an error from coordination \
service (this can be an error from this or another task).
F1201 00:18:23.686521 17091 client.h:86] Terminating process because the JAX distributed service \
detected fatal errors. This most likely indicates that another task died; see the other task logs \
for more details. Disable Python buffering, i.e. `python -u`, to be sure to see all the previous \
output. absl::Status: UNAVAILABLE: Failed to send RPC to coordination service. Either the leader \
task was preempted/died/restarted unexpectedly or this task is experiencing network issues.
Additional GRPC error information from remote target coordination_service:
:UNAVAILABLE:Stream removed (Socket closed)

error: process 0 of 2 is gone
:more
"""


def test_of_jaxs_abort_one_line_is_shown(supervise):
    code = f"if RANK: say('before\\n' + {JAX_ABORTS!r} + 'after')\nelse: say('mine')"
    code, lines = supervise(code).ended()
    assert sorted(lines) == [
        "error: process 0 of 2 is gone",
        "mine",
        "process 1: JAX ended it: UNAVAILABLE: Failed to send RPC to coordination service",
        "process 1: before",
    ]


TAKES_SIGNALS = """
def take(number, _):
    note(signal.Signals(number).name)
    if {ends}:
        sys.exit(128 + number)
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, take)
note("begins")
hang()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_stops_all_and_nothing_starts_again(supervise, name):
    run = supervise(TAKES_SIGNALS.format(ends=True), restarts=3)
    run.wait_for(2)
    number = getattr(signal, name)
    run.process.send_signal(number)
    code, lines = run.ended()
    assert code == 128 + number
    assert run.noted() == sorted(f"0 {rank} {each}" for rank in (0, 1) for each in ("begins", name))
    (line,) = lines
    assert line.startswith(f"launch: {name} goes to all processes; ")


def test_a_second_signal_ends_those_that_did_not_answer(supervise):
    run = supervise(TAKES_SIGNALS.format(ends=False), restarts=3, grace=0.05)
    run.wait_for(2)
    for count in (4, 6):
        run.process.send_signal(signal.SIGTERM)
        if count == 4:
            run.wait_for(count)
    code, lines = run.ended()
    assert (code, len(lines)) == (128 + 9, 2)


def test_processes_stop_when_their_supervisor_is_killed(supervise):
    run = supervise(TAKES_SIGNALS.format(ends=True))
    run.wait_for(2)
    run.process.kill()
    run.wait_for(4)
    assert [line for line in run.noted() if "SIGTERM" in line] == ["0 0 SIGTERM", "0 1 SIGTERM"]


def test_when_another_number_may_run_all_stop_and_as_many_start(supervise, tmp_path):
    available = tmp_path / "available"
    available.write_text("2")
    run = supervise(TAKES_SIGNALS.format(ends=True), count="available")
    run.wait_for(2)
    (tmp_path / "new").write_text("3")
    os.replace(tmp_path / "new", available)
    run.wait_for(2 + 2 + 3)
    run.process.send_signal(signal.SIGINT)
    code, lines = run.ended()
    assert code == 130
    assert lines[0] == "launch: from 2 to 3 processes: the run saves and goes on"
    assert len(lines) == 2  # it is no death
    attempts = [line.split()[0] for line in run.noted() if "begins" in line]
    assert attempts == ["0", "0", "1", "1", "1"]
    # Not SIGTERM: a Ctrl-C meanwhile would be the second one, which ends a process at once.
    assert {line.split()[2] for line in run.noted()} == {"begins", "SIGUSR1", "SIGINT"}


def test_with_too_few_processes_it_waits(supervise, tmp_path):
    available = tmp_path / "available"
    available.write_text("0")
    run = supervise("note('begins')", count="available")
    assert run.process.stderr.readline() == "launch: waits until enough processes are available\n"
    (tmp_path / "new").write_text("1")
    os.replace(tmp_path / "new", available)
    assert run.ended() == (0, [])
    assert run.noted() == ["0 0 begins"]


def test_between_two_looks_it_sleeps(supervise, tmp_path):
    """Even after a process of the last attempt has ended."""
    (tmp_path / "available").write_text("0")
    run = supervise("note('begins')", count="available", poll=0.3)
    assert "waits until enough" in run.process.stderr.readline()
    run.process.send_signal(signal.SIGCHLD)
    before = run.processor_seconds()
    time.sleep(1)
    assert run.processor_seconds() - before <= 0.1


def test_a_run_for_which_nothing_is_left_saves_and_waits(supervise, tmp_path):
    available = tmp_path / "available"
    available.write_text("2")
    run = supervise(TAKES_SIGNALS.format(ends=True), count="available")
    run.wait_for(2)
    (tmp_path / "new").write_text("0")
    os.replace(tmp_path / "new", available)
    lines = [run.process.stderr.readline() for _ in range(2)]
    assert lines == [
        "launch: from 2 to 0 processes: the run saves and waits\n",
        "launch: waits until enough processes are available\n",
    ]


def test_a_signal_ends_the_wait_for_processes(supervise, tmp_path):
    (tmp_path / "available").write_text("0")
    run = supervise("note('begins')", count="available")
    run.process.stderr.readline()
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == (143, [])
    assert run.noted() == []


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        (1, 1, "ended with exit code 1"),
        (-6, 134, "was killed by SIGABRT"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_a_death_in_words(code, exit_code, words):
    death = Death(0, code)
    assert (death.exit_code, death.words) == (exit_code, words)


def test_it_uses_loopback_alone():
    assert shared_variables(2)["MASTER_ADDR"] == HOST == "127.0.0.1"
