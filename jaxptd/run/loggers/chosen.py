"""The loggers by name, as `train.loggers` chooses them."""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from jaxptd.config import Config
from jaxptd.config.training import LoggerName
from jaxptd.errors import UserError, install
from jaxptd.run.loggers.comma_separated import CommaSeparated
from jaxptd.run.loggers.logger import Logger, Start
from jaxptd.run.loggers.mlflow import MLflow
from jaxptd.run.loggers.tensorboard import TensorBoard
from jaxptd.run.loggers.wandb import WeightsAndBiases


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of logger.

    Args:
        open: makes one.
        package: that it imports; None: it needs none.
        remedy: how that is installed.
    """

    open: Callable[[Start], Logger]
    package: str | None = None
    remedy: str = ""


LOGGERS: Mapping[LoggerName, Kind] = MappingProxyType(
    {
        "tensorboard": Kind(TensorBoard, "tensorboardX", install("tb")),
        "csv": Kind(CommaSeparated),
        "wandb": Kind(WeightsAndBiases, "wandb", "pip install wandb"),
        "mlflow": Kind(MLflow, "mlflow", "pip install mlflow"),
    }
)


def require_packages(config: Config) -> None:
    """Raises UserError if a logger that the config names lacks its package."""
    for name in config.train.loggers or ():
        kind = LOGGERS[name]
        if not _is_installed(kind):
            raise UserError(
                f"train.loggers names {name}, which needs the package {kind.package}; "
                f"{kind.remedy}, or leave {name} out"
            )


def open_loggers(start: Start, say: Callable[[str], None]) -> Iterator[Logger]:
    """Opens the loggers of a run; without any named, TensorBoard if its package is there.

    One that cannot be opened is named in a warning, and left out.
    """
    named = start.config.train.loggers
    names: list[LoggerName] = ["tensorboard"] if named is None else named
    for name in names:
        try:
            if named is not None or _is_installed(LOGGERS[name]):
                yield LOGGERS[name].open(start)
        except Exception as error:  # no disk space, no login, or a package that another one broke
            reason = " ".join(str(error).split())[:300]
            say(f"warning: this run logs nothing to {name}: {reason}")


def _is_installed(kind: Kind) -> bool:
    return kind.package is None or importlib.util.find_spec(kind.package) is not None
