"""What differs between processes: clocks, versions, devices, files, and problems of one of them."""

import json
import re
from pathlib import Path

import pytest
from together import Together

from jaxptd.config import ProcessesConfig
from jaxptd.distributed.launchers import World
from jaxptd.doctor import processes
from jaxptd.doctor.page import Verdict
from jaxptd.doctor.processes import Exchange, Facts, compared, launch

FIRST = Facts("node01", {"jax": "0.12.0"}, [["NVIDIA H200", 8]], True, [])
ON_TIME = [(0.0, 0.0), (0.002, 0.001), (-0.5, 0.01)]


def unusual(facts: list[Facts], clocks=ON_TIME) -> list[str]:
    rows = compared(facts, clocks)
    return [f"{row.verdict} {row.name}: {row.finding}" for row in rows if row.verdict != "ok"]


def other(**changes) -> Facts:
    return Facts(**{**vars(FIRST), "host": "node02", **changes})


def test_processes_that_are_alike() -> None:
    rows = compared([FIRST, other()], ON_TIME)
    assert [row.finding for row in rows] == [
        "node01: 8 x NVIDIA H200",
        "node02: 8 x NVIDIA H200; clock +0.002 s (within 0.001 s)",
    ]
    assert unusual([FIRST, other(), other()]) == []


@pytest.mark.parametrize(
    ("ahead", "error", "verdict"),
    [(30.0, 0.01, "problem"), (-30.0, 0.01, "problem"), (2.0, 0.1, "note"), (2.0, 1.5, "ok")],
)
def test_a_clock_that_differs(ahead, error, verdict) -> None:
    rows = compared([FIRST, other()], [(0.0, 0.0), (ahead, error)])
    assert [str(row.verdict) for row in rows] == ["ok", verdict]


def test_what_differs_is_named() -> None:
    changed = other(versions={"jax": "0.11.1"}, devices=[["NVIDIA H100", 8]], sees=False)
    assert unusual([FIRST, other(), changed]) == [
        "problem process 2: jax 0.11.1, process 0 has 0.12.0",
        "problem process 2: other devices than process 0 (8 x NVIDIA H100)",
        "problem process 2: does not see process 0's files in the run directory",
    ]
    assert unusual([FIRST, other(versions={})])[0].endswith("jax none, process 0 has 0.12.0")


def test_a_problem_of_several_processes_is_one_row() -> None:
    alike, own = ["system", "locks", "none", "use a disk"], ["flags", "A", "b", "c"]
    facts = [Facts(**{**vars(FIRST), "problems": [own]})]
    facts += [other(problems=each) for each in ([own], [alike], [alike, own], [alike], [], [alike])]
    clocks = [(0.0, 0.0)] * len(facts)
    assert unusual(facts, clocks) == ["problem process 2-4, 6: node02, system, locks: none"]


def test_many_processes_have_only_unusual_rows() -> None:
    facts = [FIRST] + [other() for _ in range(99)]
    facts[50] = other(sees=False)
    rows = compared(facts, [(0.0, 0.0)] * 100)
    assert [row.name for row in rows] == ["processes", "process 50"]
    assert rows[0].finding == "100 on 2 hosts"


def test_what_launched_them() -> None:
    world = World(2, 1, "127.0.0.1:5555")
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    first, *_, last = launch(world, ProcessesConfig(), environ)
    assert first.finding == "process 1 of 2, by the environment (RANK, WORLD_SIZE)"
    assert last.name == "coordinator"
    given = ProcessesConfig(coordinator="127.0.0.1:5555", count=2, id=1)
    assert launch(world, given, {})[0].finding == "process 1 of 2, by the config"
    assert launch(World(), ProcessesConfig(), {})[0].finding == "one"


def test_a_host_whose_name_has_no_address(monkeypatch) -> None:
    monkeypatch.setattr(processes.socket, "gethostname", lambda: "no.such.host.invalid")
    _, row = launch(World(), ProcessesConfig(), {})
    assert (row.name, row.verdict) == ("host", Verdict.NOTE)


def test_the_quickest_answer_tells_the_time(monkeypatch) -> None:
    took = iter([0, 8, 0, 2, 0, 6, 0, 4, 0, 10])
    monkeypatch.setattr(processes.time, "perf_counter", lambda: next(took))
    monkeypatch.setattr(processes.coordination, "put_first", lambda name, value: value)
    monkeypatch.setattr(processes.coordination, "wait_for_first", lambda name, **_: "130.0")
    exchange = Exchange(World(2, 0), clock=lambda: 100.0)
    assert exchange.clocks() == [(0.0, 0.0), (29.0, 1.0)]


def test_a_folder_that_cannot_be_used_holds_nobody_up(tmp_path, monkeypatch) -> None:
    """Each process still comes to the barrier, so the rest is compared."""
    said: dict[str, str] = {}
    came: list[str] = []
    there = processes.coordination
    monkeypatch.setattr(there, "put_first", said.__setitem__)
    monkeypatch.setattr(there, "wait_for_first", lambda name, **_: said[name])
    monkeypatch.setattr(there, "barrier", lambda name, **_: came.append(name))
    first, second = (Exchange(World(2, rank)) for rank in range(2))
    assert first.seen(tmp_path / "none") is None
    assert second.seen(tmp_path) is None
    assert first.seen(tmp_path) is True
    assert second.seen(tmp_path / "none") is False
    assert len(came) == 4
    assert list(tmp_path.iterdir()) == []


# The second process has another clock, version and host, and sees another folder.
TWO = """
import os, time
from pathlib import Path
import jax
from jaxptd.commands import doctor
from jaxptd.doctor import folder, packages, processes, system
from jaxptd.errors import run_command

folder.WRITTEN = 2**20
if os.environ["RANK"] == "1":
    exchange, versions = processes.Exchange, packages.versions
    processes.Exchange = lambda world: exchange(world, clock=lambda: time.time() + 30)
    packages.versions = lambda: versions() | {"numpy": "1.26"}
    folder.nearest = lambda path: Path("/")
    folder.other_takes = lambda path: "taken"
if __name__ == "__main__":
    run_command(doctor.main)
"""


def test_two_real_processes(tmp_path: Path) -> None:
    argv = ["--run-dir", str(tmp_path / "run"), "--json"]
    first, second = Together(TWO, argv, tmp_path).ended()
    assert (first.code, second.code) == (1, 1), first.err + second.err
    assert second.lines == []
    page = json.loads(first.lines[-1])
    rows = page["sections"]["processes"]
    found = [row for row in rows if row["verdict"] != "ok" and row["name"] != "host"]
    texts = "\n".join(f"{row['name']}: {row['finding']}" for row in found)
    ahead = float(re.search(r"process 1: .*clock \+([\d.]+) s", texts)[1])
    assert ahead == pytest.approx(30, abs=1)
    assert "process 1: numpy 1.26, process 0 has 2" in texts
    assert "process 1: does not see process 0's files" in texts
    assert re.search(r"process 1: .*, run directory, (locks|writing): ", texts)
    assert {row["verdict"] for row in found} == {"problem"}
    assert not list(tmp_path.glob(".jaxptd*"))
