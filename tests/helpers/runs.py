"""Starts, kills, signals and reads runs of the training command on the tiny config."""

import dataclasses
import functools
import signal
from pathlib import Path

import pytest

from jaxptd.api import Run
from jaxptd.checkpoint import Checkpoints
from jaxptd.errors import run_command
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir
from jaxptd.train import main

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "test-tiny.yaml"
TEXT = "".join(f"def function_{n}(a, b): return a + b * {n}\n" for n in range(400))
STEPS, EVERY = 12, 5  # checkpoints at 5, 10 and 12
EVALUATION = ["validation_loss", "perplexity"]
TIMES = ("tokens_per_second", "step_time", "mfu", "slowest_process", "slowest_seconds")

SEQUENCE = "--layout.sequence_parallel=true"
TP2 = ("--layout.tp=2",)
TP4 = ("--layout.tp=4",)
DP2_TP2 = ("--layout.dp=2", *TP2)
DP2_TP4 = ("--layout.dp=2", *TP4)
CONTEXT = ("--layout.dp=2", "--layout.cp=2", *TP2, SEQUENCE)
GRID = ("--layout.row=2", "--layout.col=2")
PP2 = ("--layout.pp=2",)


def options(folder: Path, *overrides: str) -> list[str]:
    """Options of a run in a folder that writes all its files but samples no text."""
    source = folder / "text.txt"
    if not source.exists():
        source.write_text(TEXT)
    values = {
        "data.source": source,
        "train.run_dir": folder / "run",
        "train.steps": STEPS,
        "train.sample_tokens": 0,
        "checkpoint.every": EVERY,
    }
    given = [f"--{key}={value}" for key, value in values.items()]
    return ["--config", str(CONFIG), *given, *overrides]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a command: exit code and output."""

    code: int
    out: str
    err: str


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Runs the command on the tiny config, in this process, in a separate folder."""

    folder: Path
    capture: pytest.CaptureFixture

    @property
    def options(self) -> list[str]:
        return options(self.folder)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def steps(self) -> list[int]:
        return Checkpoints(self.run_dir.checkpoints, keep=1).steps()

    def __call__(self, *overrides: str) -> Outcome:
        self.capture.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(functools.partial(main, [*self.options, *overrides]))
        return Outcome(end.value.code or 0, *self.capture.readouterr())

    def refused(self, *overrides: str) -> str:
        """Runs a command that must fail, and returns its one line on stderr."""
        outcome = self(*overrides)
        assert outcome.code == 2, outcome
        assert outcome.err.startswith("error: ")
        assert outcome.err.count("\n") == 1, outcome.err
        return outcome.err

    def contents(self) -> dict[str, bytes]:
        """All files of the run directory."""
        files = (path for path in self.run_dir.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.run_dir.path)): path.read_bytes() for path in files}


def numbers(rows: list[dict]) -> list[dict]:
    """Rows without their times."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


class Killed(BaseException):
    """Ends a run, leaving the files that a kill would leave."""


def killed(*_, **__):
    raise Killed


def kill_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends a run after a step, but never during a save, which this process would complete."""
    log, save = RunDir.log, Checkpoints.save_async

    def deadly(self, row):
        log(self, row)
        if row["step"] == step:
            raise Killed

    def at_once(self, *args, **kwargs):
        save(self, *args, **kwargs)
        self.wait()

    monkeypatch.setattr(Checkpoints, "save_async", at_once)

    monkeypatch.setattr(RunDir, "log", deadly)


def signal_in(method: str, number: int, *, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process a signal while it logs, evaluates or saves `step`."""
    owner = {"log": RunDir, "evaluate": Run, "save": RunCheckpoints}[method]
    original = getattr(owner, method)

    def signalling(self, *args):
        now = args[0]["step"] if method == "log" else args[1] if method == "save" else self.step
        if now == step:
            signal.raise_signal(number)
        return original(self, *args)

    monkeypatch.setattr(owner, method, signalling)
