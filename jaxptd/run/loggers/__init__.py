"""Where the rows of metrics.jsonl go besides: TensorBoard, CSV, Weights & Biases, MLflow."""

from jaxptd.run.loggers.chosen import LOGGERS, open_loggers, require_packages
from jaxptd.run.loggers.logger import Logger, Loggers, Start

__all__ = ["LOGGERS", "Logger", "Loggers", "Start", "open_loggers", "require_packages"]
