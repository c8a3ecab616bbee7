"""Restarts in seconds: processes of a run are killed over and over; how long until it goes on?

`python -m benchmarks.soak.restarts --kills 20`

Runs `jaxptd train` in float64 in several processes, as `jaxptd launch` does, but each on a host of
its own: a folder that stands for the host's memory, with copies at the partner's over loopback.
Processes are killed at random moments, half of them while a state is written or sent and half
between (if they are stopped in time), and with every second one goes the memory of its host, unless
that had the only copy of a shard. With `--elastic` the number of processes changes with each kill,
on as many hosts as the fewest. With `--store` the run directory is in an S3 store, a server on this
machine that fails one request in fifty. Every logged loss must equal that of an undisturbed run.
Programs are cached. `work` is the processor time of a process from its start to that step, which
depends less on what else runs on the machine. Exit code 1 means that something was lost.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import s3_server
from benchmarks.lib.pages import head, write
from benchmarks.soak.__main__ import EQUAL, MODEL
from jaxptd import stores
from jaxptd.analysis.report import table, versions
from jaxptd.checkpoint.memory import NAME
from jaxptd.errors import Parser, run_command

EVERY = 10  # steps between states in memory
RUN = "--optimizer.learning_rate 1e-3 --train.global_batch_size 8 --train.log_every 1 "
RUN += "--train.eval_every 0 --train.sample_tokens 0 "
RUN += f"--layout.zero 1 --checkpoint.memory_every {EVERY} --checkpoint.memory_dir HOST"
LOST = 2 * EVERY  # most steps: a state is written while the next `EVERY` steps run
NEVER, SAVES = 10**6, 50  # steps between checkpoints: on a disk, in a store
FAILS = 0.02  # of the requests to the store
PATIENCE = 1800.0  # seconds
# What `jaxptd launch` does, with a host for each process, and as many as a file says.
SUPERVISOR = """
import sys
from pathlib import Path
from jaxptd.distributed.supervisor import Supervisor
from benchmarks.soak import restarts
available, *options = sys.argv[1:]
def say(line):
    print(f"launch: {line}", file=sys.stderr, flush=True)
command = [sys.executable, "-c", restarts.PROCESS, *options]
count = lambda: int(Path(available).read_text())
sys.exit(Supervisor(lambda number: command, count=count, restarts=10**6, say=say).run())
"""
PROCESS = """
import os, sys
from jaxptd.errors import run_command
from jaxptd.train import main
host = os.path.join(os.environ["HOSTS"], str(int(os.environ["RANK"]) % int(os.environ["NUMBER"])))
os.makedirs(host, exist_ok=True)
sys.argv = [each.replace("HOST", host) for each in sys.argv]
run_command(main)
"""


@dataclasses.dataclass
class Kill:
    """One kill, and what came of it.

    Args:
        writing: while a state was written or sent.
        host: the memory of the process's host was lost with it.
        seconds: from the kill to the end of the next step.
        work: processor seconds of each new process until then, the mean.
        lost: steps that ran again.
    """

    writing: bool
    host: bool
    seconds: float
    work: float
    lost: int


class Launched:
    """A supervised run, whose output is read as it comes.

    Args:
        folder: where it writes.
        options: of `jaxptd train`.
        count: its processes.
        number: of hosts. None: one for each process.
    """

    def __init__(
        self, folder: Path, options: Sequence[str], count: int, number: int | None = None
    ) -> None:
        self.folder, self.hosts, self._number = folder, folder / "hosts", number or count
        self.hosts.mkdir(exist_ok=True)
        self._available = folder / "available"
        self.resize(count)
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(self._available), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "HOSTS": str(self.hosts),
                "NUMBER": str(self._number),
                "PYTHONUNBUFFERED": "1",
            },
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def resize(self, count: int) -> None:
        """Sets how many processes the next attempt has."""
        self._available.with_suffix(".new").write_text(str(count))
        self._available.with_suffix(".new").replace(self._available)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def said(self) -> str:
        return "".join(line for _, line in self.lines)

    def end(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait(PATIENCE)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def found(self, pattern: str, begin: int = 0) -> tuple[float, int] | None:
        """Time and number of the last line from line `begin` on that has a pattern."""
        for moment, line in reversed(self.lines[begin:]):
            if match := re.search(pattern, line):
                return moment, int(match[1])
        return None

    def first(self, pattern: str, begin: int) -> tuple[float, int] | None:
        """As `found`, but the first such line."""
        for moment, line in self.lines[begin:]:
            if match := re.search(pattern, line):
                return moment, int(match[1])
        return None

    def next_step(self, begin: int) -> tuple[float, int] | None:
        """Time and number of the first step of a start that is in line `begin` or later."""
        lines = [i for i, (_, x) in enumerate(self.lines[begin:], begin) if re.search(STARTED, x)]
        return self.first(STEP, lines[0]) if lines else None

    def children(self) -> list[int]:
        """The processes of the run, in the order of their ranks."""
        pid = self.process.pid
        try:
            return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        except OSError:
            return []

    def work(self) -> float:
        """Processor seconds of a process of the run so far, the mean."""
        found = []
        for pid in self.children():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
        return statistics.mean(found) if found else 0.0

    def kill(self, draw: random.Random, *, host: bool) -> tuple[bool, bool] | None:
        """Kills one of the processes, and with it its host's memory if `host` and others suffice.

        Returns:
            Whether a state was being written, and whether the memory was lost. None if no process
            was there any more.
        """
        children = self.children()
        try:
            for each in children:  # so that what is found here still holds when one is killed
                os.kill(each, signal.SIGSTOP)
            _wait(lambda: all(map(_has_stopped, children)))
            rank = draw.randrange(len(children))
            writing, lost = self.writes(), str(rank % self._number)
            if host := host and self.is_whole_without(lost):
                shutil.rmtree(self.hosts / lost)
            os.kill(children[rank], signal.SIGKILL)
        except (ProcessLookupError, ValueError):
            return None
        finally:
            for each in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)
        return writing, host

    def is_whole_without(self, host: str) -> bool:
        """True if the other hosts have every file of some state."""
        found = collections.defaultdict(set)
        for path in self.hosts.glob("*/jaxptd-*/*"):
            if path.parts[-3] != host and (match := re.fullmatch(NAME, path.name)):
                found[match[1], match[2], int(match[4])].add(match[3])
        return any(len(ranks) == count for (*_, count), ranks in found.items())

    def writes(self) -> bool:
        """True while a state is written or sent: not every process has its file and its copy."""
        files = [each.name for each in self.hosts.glob("*/jaxptd-*/*")]
        newest = max((name.partition(".")[0] for name in files if name[0] != "."), default="")
        there = sum(name.startswith(f"{newest}.") for name in files)
        return any(name[0] == "." for name in files) or 0 < there < 2 * len(self.children())


STEP, RESUMED = r"^step (\d+)/", r"^resuming at step (\d+) "
STARTED = r" simulated CPU device"  # in the first line of a start


class Restarts:
    """Runs in a number of processes that are killed.

    Args:
        folder: where everything is written.
        counts: numbers of processes; with several, each attempt draws one.
        curve: the loss of each step of an undisturbed run.
        steps: of a run.
        seed: of everything drawn.
        url: the store that has the run directories. None: they are in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        counts: Sequence[int],
        curve: dict[int, float],
        *,
        steps: int,
        seed: int,
        url: str | None = None,
    ) -> None:
        self.folder, self.counts, self.curve, self.steps = folder, counts, curve, steps
        self.draw, self.url = random.Random(seed), url
        self.kills: list[Kill] = []
        self.wrong: list[str] = []
        self.worst, self.runs = 0.0, 0

    @property
    def name(self) -> str:
        return " or ".join(map(str, self.counts))

    def run_dir(self, folder: Path) -> str:
        return f"{self.url}/{folder.name}" if self.url else str(folder / "run")

    def options(self, folder: Path) -> list[str]:
        most = max(self.counts)
        words = f"{MODEL} {RUN} --train.steps {self.steps} --layout.dp {most}"
        words += f" --processes.elastic [{min(self.counts)},{most}] --train.micro_batches 1"
        words += f" --checkpoint.every {SAVES if self.url else NEVER}"
        return [*words.split(), "--train.run_dir", self.run_dir(folder)]

    def warm(self) -> None:
        """Compiles the programs of every number of processes."""
        for count in self.counts:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            for steps in (2 * EVERY + 2, 2 * EVERY + 4):  # the second one restores a state
                words = [*self.options(folder), "--train.steps", str(steps)]
                run = Launched(folder, words, count, min(self.counts))
                if run.end():
                    self.wrong.append(run.said()[-2000:])

    def run(self, kills: int, end: float) -> None:
        """Runs until this many processes were killed, or until a time of the monotonic clock."""

        def goes_on() -> bool:
            return len(self.kills) < kills and time.monotonic() < end and not self.wrong

        while goes_on():
            self._run(goes_on)

    def _run(self, goes_on: Callable[[], bool]) -> None:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        count = self.draw.choice(self.counts)
        run = Launched(folder, self.options(folder), count, min(self.counts))
        while goes_on() and run.running:
            self._kill(run)
        if self.wrong:
            run.process.terminate()
        code = run.end()
        if code or "Traceback" in run.said():
            self.wrong.append(f"exit code {code}: {run.said()[-2000:]}")
            return
        self.runs += 1
        rows = _rows(self.run_dir(folder))
        found, expected = {row["step"]: row["loss"] for row in rows}, self.curve
        if found.keys() != expected.keys() or len(found) != len(rows):
            lacking, other = sorted({*expected} - {*found}), sorted({*found} - {*expected})
            words = f"lacks steps {lacking}, has others {other}, {len(rows) - len(found)} twice"
            self.wrong.append(f"{self.name}: the log {words}: {run.said()[-2000:]}")
            return
        worst = max(abs(found[step] / expected[step] - 1) for step in expected)
        self.worst = max(self.worst, worst)
        if not worst <= EQUAL:
            self.wrong.append(f"{self.name}: losses differ by {worst:.1e}")
        left = [path for path in run.hosts.glob("*/*/*") if path.is_file()]
        if left:
            self.wrong.append(f"{self.name}: {len(left)} files of states are left")
        shutil.rmtree(folder)

    def _kill(self, run: Launched) -> None:
        """Waits for some moment after the first step of an attempt, and kills a process."""
        begin = len(run.lines)
        if not _wait(lambda: run.first(STEP, max(0, begin - 1)) or not run.running):
            self.wrong.append(f"no step in {PATIENCE:.0f} s: {run.said()[-2000:]}")
        time.sleep(self.draw.uniform(0, 3))
        writing, host = self.draw.random() < 0.5, self.draw.random() < 0.5
        _wait(lambda: run.writes() == writing or not run.running)
        run.resize(self.draw.choice(self.counts))
        before, begin = run.found(STEP), len(run.lines)
        begun = time.monotonic()
        if (killed := run.kill(self.draw, host=host)) is None:
            return
        if not _wait(lambda: run.next_step(begin) or not run.running):
            self.wrong.append(f"no step after a kill: {run.said()[-2000:]}")
        if (step := run.next_step(begin)) is None:  # it had run its last step
            return
        work, resumed = run.work(), run.first(RESUMED, begin)  # None before the first state
        lost = max(0, (before[1] if before else 0) - (resumed[1] if resumed else 0))
        self.kills.append(Kill(*killed, step[0] - begun, work, lost))
        if lost > LOST:
            self.wrong.append(f"{self.name}: {lost} steps lost: {run.said()[-2000:]}")
        print(f"{self.name}: {self.kills[-1]}", flush=True)


def _has_stopped(pid: int) -> bool:
    """True once all threads of a process have stopped, or it has gone: a signal takes a moment."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
        states = [(each / "stat").read_text().rpartition(")")[2].split()[0] for each in threads]
    except OSError:
        return True
    return all(state in "TtZX" for state in states)


def _wait(until: Callable[[], Any], seconds: float = PATIENCE) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if until():
            return True
        time.sleep(0.002)
    return False


def _rows(run_dir: str) -> list[dict[str, Any]]:
    """What a run has logged."""
    where = stores.place(run_dir)
    assert where is not None
    return [json.loads(x) for x in stores.read_bytes(where / "metrics.jsonl").splitlines()]


def row(each: Restarts) -> list[str]:
    seconds = [kill.seconds for kill in each.kills]
    return [
        each.name,
        str(each.runs),
        str(len(each.kills)),
        str(sum(kill.writing for kill in each.kills)),
        str(sum(kill.host for kill in each.kills)),
        f"{statistics.median(seconds):.1f}" if seconds else "",
        f"{max(seconds, default=0):.1f}",
        f"{statistics.median(kill.work for kill in each.kills):.1f}" if seconds else "",
        f"{statistics.mean(kill.lost for kill in each.kills):.1f}" if seconds else "",
        str(max((kill.lost for kill in each.kills), default=0)),
        f"{each.worst:.0e}",
    ]


HEADS = ["processes", "runs", "kills", "while writing", "with its host"]
HEADS += ["seconds: median", "longest", "work", "steps lost: mean", "most", "difference"]


def main(argv: Sequence[str] | None = None) -> int:
    """Kills processes of runs that keep their newest state in memory, and times the restarts."""
    parser = Parser(prog="python -m benchmarks.soak.restarts", description=main.__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each number of processes")
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument(
        "--elastic", type=int, nargs="*", default=[], help="numbers that one run has in turn"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="ends it earlier")
    parser.add_argument("--store", action="store_true", help="run directories in an S3 store")
    parser.add_argument("--steps", type=int, default=600, help="steps per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a folder for restarts.md")
    options = parser.parse_args(argv)
    done: list[Restarts] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        curve = _undisturbed(folder / "whole", options.steps)
        url = _store(options.seed) if options.store else None
        end = time.monotonic() + 60 * options.minutes
        sizes = [[count] for count in options.processes]
        for counts in [*sizes, options.elastic] if options.elastic else sizes:
            each = Restarts(folder, counts, curve, steps=options.steps, seed=options.seed, url=url)
            each.warm()
            each.run(options.kills, end)
            done.append(each)
            print(f"{each.name}: {len(each.kills)} kills, {len(each.wrong)} lost", flush=True)
    wrong = [line for each in done for line in each.wrong]
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
    about = f"seed {options.seed}, states in memory every {EVERY} steps, {load}. {versions()}"
    text = "\n".join([about, "", table([HEADS, *map(row, done)]), *wrong, ""])
    print(text)
    if options.out:
        title = head("Restarts: from a death to the next step", _command(options))
        write(Path(options.out) / "restarts.md", title + text)
    return int(bool(wrong))


def _command(options: Any) -> str:
    """How to make the page again."""
    words = ["soak.restarts --kills", options.kills, "--processes", *options.processes]
    words += ["--elastic", *options.elastic] if options.elastic else []
    words += ["--minutes", f"{options.minutes:g}"] if options.minutes < math.inf else []
    words += ["--store"] * options.store + ["--steps", options.steps, "--seed", options.seed]
    return " ".join(map(str, words))


def _undisturbed(run_dir: Path, steps: int) -> dict[int, float]:
    """The losses of a run on one device that nobody kills."""
    words = f"{MODEL} {RUN} --train.steps {steps} --train.micro_batches 1"
    words += f" --checkpoint.every {NEVER}"
    words = words.replace("--layout.zero 1", "").replace("HOST", str(run_dir.parent))
    command = [
        sys.executable,
        "-m",
        "jaxptd.train",
        *words.split(),
        "--train.run_dir",
        str(run_dir),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {each["step"]: each["loss"] for each in _rows(str(run_dir))}


def _store(seed: int) -> str:
    """Starts a store on this machine that fails now and then; a URL in it."""
    draw = random.Random(seed)
    return s3_server.start(lambda method, key: "InternalError" if draw.random() < FAILS else None)


if __name__ == "__main__":
    run_command(main)
