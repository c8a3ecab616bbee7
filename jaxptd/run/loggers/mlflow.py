"""Metrics for MLflow."""

from jaxptd.config import to_dict
from jaxptd.config.written import as_yaml
from jaxptd.run.loggers.logger import Start
from jaxptd.run.loggers.service import Sent, as_os_error, numbers
from jaxptd.run.metrics import Row


class MLflow:
    """Sends rows to a run of MLflow, which has the config as parameters and as a file.

    A resumed run goes into the same one, whose parameters stay as they are: MLflow lets none
    change. Server and experiment are those of the package's own environment variables
    (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, ...).

    Args:
        start: of the run.
    """

    def __init__(self, start: Start) -> None:
        import mlflow

        self._mlflow, self._sent = mlflow, Sent(start, "mlflow")
        new = self._sent.id is None
        run = mlflow.start_run(run_id=self._sent.id, run_name=start.path.name if new else None)
        self.where = f"the MLflow run {run.info.run_id}"
        self._sent.open(run.info.run_id)
        mlflow.log_text(as_yaml(start.config), "config.yaml")
        for section, fields in to_dict(start.config).items() if new else ():
            # One call a section: a server takes at most 100 parameters at once.
            mlflow.log_params({f"{section}.{name}": value for name, value in fields.items()})

    def log(self, row: Row) -> None:
        with as_os_error():
            if self._sent.is_new(row):
                self._mlflow.log_metrics(numbers(row), step=row["step"], synchronous=False)

    def close(self) -> None:
        with as_os_error():
            self._mlflow.flush_async_logging()
            self._mlflow.end_run()
