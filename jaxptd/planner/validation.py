"""Holds predictions against measured steps of rows and of runs: errors, and their bars."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxptd.config import Config
from jaxptd.config.written import RUN_CONFIG, read_config
from jaxptd.errors import UserError, quoted
from jaxptd.hardware import Accelerator, Cluster, find_accelerator
from jaxptd.models.families import with_vocabulary
from jaxptd.planner.planning import expected_error
from jaxptd.planner.rows import Row
from jaxptd.planner.steps.step import predict
from jaxptd.run.metrics import Metrics

# Largest errors allowed on rows outside the fit, by accelerator. `DATA_SHEET` is for accelerators
# none of whose limits were fitted.
BARS: Mapping[str, float] = {"a100": 0.07, "h100": 0.08}
DATA_SHEET = 0.12


class Measured(Protocol):
    """A step that was timed: a row's, or a run's."""

    @property
    def name(self) -> str:
        """Its name, for a person."""

    @property
    def program(self) -> str:
        """The program that ran."""

    @property
    def hardware(self) -> str:
        """Its accelerator's name."""

    @property
    def gpus(self) -> int:
        """Its devices."""

    @property
    def seconds(self) -> float:
        """Its time."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One measured step and its prediction.

    Args:
        row: as measured.
        seconds: predicted.
        bar: the largest error allowed, as a share.
    """

    row: Measured
    seconds: float
    bar: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.seconds / self.row.seconds - 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "program": self.row.program,
            "hardware": self.row.hardware,
            "gpus": self.row.gpus,
            "measured": self.row.seconds,
            "predicted": self.seconds,
            "error": self.error,
            "bar": self.bar,
        }


@dataclasses.dataclass(frozen=True)
class Validation:
    """Predictions of several rows.

    Args:
        title: says how the predictions were made.
        outcomes: of the rows, in their order.
    """

    title: str
    outcomes: tuple[Outcome, ...]

    @property
    def mean(self) -> float:
        """Mean of the errors' sizes."""
        return float(np.mean([abs(each.error) for each in self.outcomes]))

    @property
    def worst(self) -> float:
        return max(abs(each.error) for each in self.outcomes)

    def missed(self) -> list[str]:
        """The bars that are missed, a sentence each."""
        return [
            f"{each.row.name}: {abs(each.error):.1%} is above {each.bar:.1%}"
            for each in self.outcomes
            if abs(each.error) > each.bar
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "rows": [each.as_dict() for each in self.outcomes],
            "mean": self.mean,
            "worst": self.worst,
            "missed": self.missed(),
        }


def predicted_rows(rows: Sequence[Row], accelerators: Mapping[str, Accelerator]) -> Validation:
    """Predicts rows with the accelerators as they are: nothing is fitted."""
    outcomes = tuple(
        Outcome(
            row,
            row.predict(accelerators[row.hardware]).seconds,
            BARS.get(row.hardware, DATA_SHEET),
        )
        for row in rows
    )
    return Validation("predicted, nothing fitted to these rows", outcomes)


# ---- steps of runs, as they have logged them -----------------------------------------------------

NEWEST = 20  # rows of a run whose median is its time: the first steps and short pauses do not count


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The steps of one run.

    Args:
        name: its directory.
        config: of the run.
        hardware: the accelerator that it ran on.
        seconds: of a step, as logged.
    """

    name: str
    config: Config
    hardware: str
    seconds: float
    program: str = "jaxptd"

    @property
    def gpus(self) -> int:
        """Devices of its layout."""
        return self.config.layout.num_devices

    def predict(self, cluster: Cluster) -> float:
        """The predicted seconds of its step, as `jaxptd plan` has them for its layout.

        Raises:
            UserError: the cost model lacks something that its config asks for.
        """
        try:
            return predict(self.config, cluster).seconds
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error


def predicted_runs(
    folders: Sequence[Path], gpu: str, *, node: int = 0, hardware: Path | None = None
) -> Validation:
    """Predicts the steps of runs as `jaxptd plan` does; nothing is fitted.

    Args:
        folders: directories of runs.
        gpu: the accelerator that all of them ran on.
        node: devices of a node; 0: as many as NVLink joins.
        hardware: YAML file of accelerators beside the packaged ones.

    Raises:
        UserError: a directory has no run or no logged step, or the step has no prediction.
    """
    cluster = Cluster(find_accelerator(gpu, hardware), node)
    bar = expected_error(gpu, hardware)
    runs = [read_run(folder, gpu) for folder in folders]
    outcomes = tuple(Outcome(run, run.predict(cluster), bar) for run in runs)
    return Validation("predicted, nothing fitted to these runs", outcomes)


def read_run(folder: Path, gpu: str) -> LoggedRun:
    """Reads the config of a run, and the median of its newest logged step times.

    Raises:
        UserError: there is no run, or it has logged no step.
    """
    metrics = Metrics(folder / "metrics.jsonl")
    config = with_vocabulary(read_config(folder / RUN_CONFIG))
    try:
        times = [row.get("step_time") for row in metrics.rows()][-NEWEST:]
    except OSError as error:
        raise UserError(f"cannot read {metrics.path}: {error.strerror}; name a run") from error
    seconds = [time for time in times if time and time > 0]
    if not seconds:
        name = quoted(str(folder))
        raise UserError(f"{name} has logged no step; train there first, or name another run")
    return LoggedRun(quoted(str(folder)), config, gpu, statistics.median(seconds))
