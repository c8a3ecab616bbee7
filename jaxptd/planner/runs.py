"""Holds predictions of this library's own steps against what runs have logged."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from jaxptd.config import Config
from jaxptd.config.written import RUN_CONFIG, read_config
from jaxptd.errors import UserError, quoted
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.models.families import with_vocabulary
from jaxptd.planner.own.step import predict
from jaxptd.planner.planning import expected_error
from jaxptd.planner.published.validation import Outcome, Validation
from jaxptd.run.metrics import Metrics

NEWEST = 20  # rows of a run whose median is its time: the first steps and short pauses do not count


@dataclasses.dataclass(frozen=True)
class Run:
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


def read_run(folder: Path, gpu: str) -> Run:
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
    return Run(quoted(str(folder)), config, gpu, statistics.median(seconds))
