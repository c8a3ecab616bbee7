"""Compares predictions with measured steps of rows and runs: errors, and their bars."""

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

# Largest errors allowed on rows outside the fit, by accelerator. `DATA_SHEET` applies to
# accelerators without fitted limits.
BARS: Mapping[str, float] = {"a100": 0.07, "h100": 0.08}
DATA_SHEET = 0.12
EXPERTS = 0.15  # models with experts, which one row of each program calibrates


class Measured(Protocol):
    """A timed step: a row's, or a run's."""

    @property
    def name(self) -> str:
        """Its name, for display."""

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
        row: the measurement.
        seconds: the prediction.
        bar: the largest error allowed, as a share.
    """

    row: Measured
    seconds: float
    bar: float

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
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
        title: says how predictions were made.
        outcomes: the rows', in order.
    """

    title: str
    outcomes: tuple[Outcome, ...]

    @property
    def mean(self) -> float:
        """Mean absolute error."""
        return float(np.mean([abs(each.error) for each in self.outcomes]))

    @property
    def worst(self) -> float:
        return max(abs(each.error) for each in self.outcomes)

    def missed(self) -> list[str]:
        """Missed bars, one sentence each."""
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
    """Predicts rows with the given accelerators; nothing is fitted."""
    outcomes = tuple(
        Outcome(
            row,
            row.predict(accelerators[row.hardware]).seconds,
            EXPERTS if row.shape.num_experts else BARS.get(row.hardware, DATA_SHEET),
        )
        for row in rows
    )
    return Validation("predicted, nothing fitted to these rows", outcomes)


# ---- steps of runs, as logged --------------------------------------------------------------------

NEWEST = 20  # a run's time is the median of these rows, to ignore first steps and short pauses


@dataclasses.dataclass(frozen=True)
class LoggedRun:
    """The steps of one run.

    Args:
        name: its directory.
        config: the run's.
        hardware: the accelerator that it ran on.
        seconds: a step's time, as logged.
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
        """The seconds that `jaxptd plan` predicts for its layout.

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
        node: devices per node; 0: as many as NVLink joins.
        hardware: YAML file of accelerators that adds to the packaged ones.

    Raises:
        UserError: a directory has no run or no logged step, or the step cannot be predicted.
    """
    cluster = Cluster(find_accelerator(gpu, hardware), node)
    bar = expected_error(gpu, hardware)
    runs = [read_run(folder, gpu) for folder in folders]
    outcomes = tuple(Outcome(run, run.predict(cluster), bar) for run in runs)
    return Validation("predicted, nothing fitted to these runs", outcomes)


def read_run(folder: Path, gpu: str) -> LoggedRun:
    """Reads the config of a run, and the median of its newest logged step times.

    Raises:
        UserError: there is no run, or it has not logged a step.
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
        raise UserError(f"{name} has not logged a step; train there first, or name another run")
    return LoggedRun(quoted(str(folder)), config, gpu, statistics.median(seconds))
