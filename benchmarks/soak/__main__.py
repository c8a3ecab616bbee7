"""Soak test: kills a small run over and over; it must lose nothing.

`python -m benchmarks.soak --minutes 120 --kills 200`

Starts `jaxptd train` in float64, on a different layout each time, and causes an accident: the run
is killed at any moment or during a save, one of two processes is killed, the disk is full, or the
run is killed and its newest checkpoint damaged. Then the same command is started again, until all
steps are done. Every logged loss must equal that of an undisturbed run, and each start must have
resumed from the newest good checkpoint. Runs follow one another until the time is up or the number
of kills is reached. Exit code 1 means that something was lost.
"""

import collections
import dataclasses
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lib.pages import head, write
from benchmarks.soak.accidents import Leg, damage, saved, wait_a_while, wait_for_a_save
from jaxptd.analysis.report import table, versions
from jaxptd.errors import Parser, run_command

# At this learning rate training does not amplify rounding: layouts give the same curve to 1e-15.
MODEL = "--config test-tiny --model.hidden_size 32 --model.dtype float64"
RUN = "--optimizer.learning_rate 1e-3 --checkpoint.every 25 "
RUN += "--train.log_every 10 --train.eval_every 0 --train.sample_tokens 0 --checkpoint.keep 3"
WAITS = "--processes.wait 60 --processes.stuck_after 60"
LAYOUTS = (
    "",
    "--layout.dp 4",
    "--layout.dp 2 --layout.tp 2 --layout.sequence_parallel true",
    "--layout.cp 2 --layout.tp 2",
    "--layout.row 2 --layout.col 2",
    "--layout.pp 2 --layout.dp 2",
    "--layout.pp 2 --layout.tp 2 --layout.schedule zb-h1",
    "--layout.dp 2 --layout.cp 2 --layout.zero 3",
)
EQUAL = 1e-12  # of losses, relative
ROOM = 20_000  # bytes that a file may grow to on a full disk: fewer than the arrays need
KILLED, DEAD, REFUSED = -9, 3, 2  # exit codes
MARGIN = 30.0  # seconds that a run may take to start and compile


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of accident, its weight among all kinds, and how long to wait for its moment."""

    name: str
    weight: int
    wait: Callable[[Leg, Path, random.Random, float], None] = wait_a_while
    processes: int = 1  # the first or the last of several is killed
    full: bool = False  # fills the disk instead of killing
    damaged: bool = False  # damages the newest checkpoint afterwards


KINDS = (
    Kind("killed", 9),
    Kind("killed during a save", 5, wait_for_a_save),
    Kind("one of two processes killed", 3, processes=2),
    Kind("a full disk", 1, full=True),
    Kind("killed, the newest checkpoint damaged", 2, damaged=True),
)


class Soak:
    """Runs with accidents, and what they revealed.

    Args:
        folder: where everything is written.
        seed: decides what happens, and when.
        steps: the length of a run.
        longest: the last second after the start at which an accident may happen.
    """

    def __init__(self, folder: Path, *, seed: int, steps: int, longest: float) -> None:
        self.folder, self.steps, self.longest = folder, steps, longest
        self.draw = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.runs: list[float] = []  # the worst loss difference of each run
        self.wrong: list[str] = []
        self.resumed = 0

    @property
    def kills(self) -> int:
        """The number of processes that were killed."""
        return sum(n for name, n in self.counts.items() if "killed" in name)

    def run(self, number: int, goes_on: Callable[[], bool]) -> None:
        """Takes one run to its end, with accidents while `goes_on`."""
        whole, other = self.folder / f"whole-{number}", self.folder / f"run-{number}"
        leg = self._leg(whole, number, "")
        assert leg.end() == [0], leg.said()
        expected, damaged = 0, 0  # earliest step to resume at; step of the damaged checkpoint
        while True:
            accident, kind = goes_on(), self._kind()
            leg = self._leg(other, number, self._layout(kind), kind if accident else None)
            codes = self._accident(leg, kind, other) if accident else leg.end()
            self._check(leg, kind, codes, expected)
            if codes == [0] * len(codes):
                break
            steps = saved(other / "checkpoints")
            if steps and steps[-1] > damaged:
                damaged = 0  # the run has saved this step and later ones again
            if kind.damaged and steps and KILLED in codes and not damaged:
                damaged = steps[-1]
                damage(other / "checkpoints" / f"{damaged:08d}", self.draw)
            expected = max((step for step in steps if step != damaged), default=0)
        self.runs.append(self._difference(whole, other))

    def _kind(self) -> Kind:
        return self.draw.choices(KINDS, [each.weight for each in KINDS])[0]

    def _layout(self, kind: Kind) -> str:
        return self.draw.choice(LAYOUTS[kind.processes > 1 :])  # two processes need two devices

    def _leg(self, run_dir: Path, number: int, layout: str, kind: Kind | None = None) -> Leg:
        output = Path(tempfile.mkdtemp(dir=self.folder))
        words = f"{MODEL} {RUN} {WAITS} {layout} --train.steps {self.steps} --train.seed {number}"
        kind, metrics = kind or KINDS[0], run_dir / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        options = [*words.split(), "--train.run_dir", str(run_dir)]
        room = size + ROOM if kind.full else None
        return Leg(options, output, processes=kind.processes, room=room)

    def _accident(self, leg: Leg, kind: Kind, run_dir: Path) -> list[int]:
        if not kind.full:
            kind.wait(leg, run_dir / "checkpoints", self.draw, self.longest)
            leg.kill(self.draw.randrange(kind.processes))
        codes = leg.end()
        self.counts[kind.name if set(codes) - {0} else "ended before its accident"] += 1
        return codes

    def _check(self, leg: Leg, kind: Kind, codes: Sequence[int], expected: int) -> None:
        """Notes everything that is wrong."""
        said = leg.said()
        if set(codes) - _allowed(kind, said) or "Traceback" in said:
            self.wrong.append(f"{kind.name}: exit codes {codes}: {said[-600:]}")
        found = re.search(r"resuming at step (\d+)", said)
        if found:
            self.resumed += 1
            if int(found[1]) < expected:
                self.wrong.append(f"{kind.name}: saved was {expected}: {said[-600:]}")

    def _difference(self, whole: Path, other: Path) -> float:
        """The largest relative difference between losses; notes missing rows."""
        curves = []
        for folder in (whole, other):
            rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
            curves.append({row["step"]: row["loss"] for row in rows})
            if len(curves[-1]) != len(rows):
                self.wrong.append(f"{folder.name}: a step is logged twice")
        expected, found = curves
        if expected.keys() != found.keys():
            self.wrong.append(f"{other.name}: other steps are logged")
            return float("inf")
        worst = max(abs(found[step] / expected[step] - 1) for step in expected)
        if not worst <= EQUAL:
            self.wrong.append(f"{other.name}: losses differ by {worst:.1e}")
        return worst


def _allowed(kind: Kind, said: str) -> set[int]:
    """Exit codes that a leg may have."""
    if kind.full:
        return {0, REFUSED} if "could not save" in said else {0}
    unjoined = {REFUSED} if kind.processes > 1 and "could not join" in said else set()
    return {0, KILLED, DEAD} | unjoined


def report(soak: Soak, minutes: float, seed: int) -> str:
    """The table of all accidents, and the verdict."""
    rows = [
        ["accident", "times"],
        *([name, str(number)] for name, number in soak.counts.most_common()),
        ["restarts that resumed", str(soak.resumed)],
        [f"completed runs of {soak.steps:,} steps", str(len(soak.runs))],
        ["largest difference between losses", f"{max(soak.runs, default=0):.1e}"],
        ["lost", str(len(soak.wrong))],
    ]
    about = f"seed {seed}, {minutes:.0f} minutes, {soak.kills} kills. {versions()}"
    return "\n".join([about, "", table(rows), *soak.wrong, ""])


def main(argv: Sequence[str] | None = None) -> int:
    """Kills runs over and over, and compares their curves with those of undisturbed runs."""
    parser = Parser(prog="python -m benchmarks.soak", description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="steps per run")
    parser.add_argument(
        "--longest", type=float, default=MARGIN, help="longest time to an accident, in seconds"
    )
    parser.add_argument("--out", help="a folder for soak.md")
    options = parser.parse_args(argv)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        # A program cache, as users have one: restarting after a kill takes seconds.
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(name) / "programs")
        soak = Soak(Path(name), seed=options.seed, steps=options.steps, longest=options.longest)

        def goes_on() -> bool:
            late = time.monotonic() - begun > 60 * options.minutes
            return not late and soak.kills < options.kills and not soak.wrong

        while goes_on():
            soak.run(len(soak.runs), goes_on)
            print(f"run {len(soak.runs)}: {soak.kills} kills, {len(soak.wrong)} lost", flush=True)
    text = report(soak, (time.monotonic() - begun) / 60, options.seed)
    print(text)
    if options.out:
        command = f"soak --seed {options.seed} --steps {options.steps}"
        title = head("Soak test: a run that is killed over and over", command)
        write(Path(options.out) / "soak.md", title + text)
    return int(bool(soak.wrong))


if __name__ == "__main__":
    run_command(main)
