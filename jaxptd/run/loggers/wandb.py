"""Metrics for Weights & Biases."""

import uuid

from jaxptd.config import to_dict
from jaxptd.run.loggers.logger import Start
from jaxptd.run.loggers.service import Sent, as_os_error, numbers
from jaxptd.run.metrics import Row


class WeightsAndBiases:
    """Sends rows to a run of Weights & Biases, which has the config and the run directory's name.

    A resumed run goes into the same one. Project, entity, login and mode are those of the package's
    own environment variables (`WANDB_PROJECT`, `WANDB_MODE=offline`, ...).

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        import wandb

        self._sent = Sent(start, "wandb")
        run = self._sent.id or uuid.uuid4().hex[:8]
        self.where = f"the Weights & Biases run {run}"
        self._run = wandb.init(
            id=run,
            resume="allow",
            reinit="finish_previous",  # a notebook may have a run of its own
            name=start.path.name,
            dir=str(start.path),
            config=to_dict(start.config),
            allow_val_change=True,  # of the fields that a resumed run may change
        )
        self._sent.open(run)

    def log(self, row: Row) -> None:
        with as_os_error():
            if self._sent.is_new(row):
                self._run.log(numbers(row), step=row["step"])

    def close(self) -> None:
        with as_os_error():
            self._run.finish()
