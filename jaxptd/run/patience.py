"""Early stopping: a run ends when its evaluations have not improved for a while.

Whether it ends is a function of the logged evaluations at multiples of `train.eval_every`. So a run
that was killed, or stopped by a signal and evaluated there, ends at the same step as one that ran
through, on any layout.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxptd.config import Config
from jaxptd.run.evaluation import rises


@dataclasses.dataclass
class Patience:
    """Counts the evaluations since the last that was better than all before.

    Args:
        config: of the run.
        rows: of metrics.jsonl so far.
    """

    config: Config
    rows: dataclasses.InitVar[Sequence[Mapping[str, Any]]] = ()
    best: float = math.inf  # of what falls as a model gets better
    best_step: int = 0
    waited: int = 0

    def __post_init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Counts the evaluation of a row, if it has one that is due at its step."""
        train, metric = self.config.train, self.config.checkpoint.best_metric
        value = row.get(metric)
        if not train.patience or value is None or row["step"] % train.eval_every:
            return
        value = -value if rises(metric) else value
        if value < self.best - train.min_improvement:
            self.best, self.best_step, self.waited = value, row["step"], 0
        else:
            self.waited += 1

    def is_over(self) -> bool:
        """True if the run is to end."""
        return 0 < self.config.train.patience <= self.waited

    def reason(self) -> str:
        """Why the run ends, in words."""
        metric, least = self.config.checkpoint.best_metric, self.config.train.min_improvement
        best = abs(self.best) if rises(metric) else self.best
        by = f" by more than {least:g}" if least else ""
        return (
            f"{metric} has not improved{by} on {best:.4f} of step {self.best_step} in "
            f"{self.waited} evaluations (train.patience={self.config.train.patience})"
        )
