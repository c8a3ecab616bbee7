"""Loggers that a config names: chosen, refused, and one that fails among others."""

import importlib.util
import re
from pathlib import Path

import pytest

from jaxptd.config import Config, TrainConfig
from jaxptd.errors import UserError
from jaxptd.run.folder import RunDir
from jaxptd.run.loggers import LOGGERS, Loggers, Start, open_loggers, require_packages


def config(*names: str) -> Config:
    return Config(train=TrainConfig(loggers=list(names)))


def opened(path: Path, config: Config) -> list[str]:
    return [type(each).__name__ for each in open_loggers(Start(path, config), pytest.fail)]


def test_tensorboard_is_the_default_and_an_empty_list_is_none(tmp_path) -> None:
    assert opened(tmp_path, Config()) == ["TensorBoard"]
    assert opened(tmp_path, config()) == []
    assert opened(tmp_path, config("csv", "tensorboard")) == ["CommaSeparated", "TensorBoard"]


@pytest.mark.parametrize("name", [name for name, kind in LOGGERS.items() if kind.package])
def test_a_logger_without_its_package_is_refused_before_anything_is_written(
    name: str, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    kind = LOGGERS[name]
    line = f"train.loggers names {name}, which needs the package {kind.package}; "
    with pytest.raises(UserError, match=re.escape(f"{line}{kind.remedy}, or leave {name} out")):
        RunDir(tmp_path / "run").check(config("csv", name))
    assert list(tmp_path.iterdir()) == []
    require_packages(Config())  # the default uses what is installed
    assert opened(tmp_path, Config()) == []


class Broken:
    where = "a service"

    def log(self, row) -> None:
        raise OSError(5, "gone")

    def close(self) -> None:
        raise OSError(5, "gone")


class Good:
    where = "a list"

    def __init__(self) -> None:
        self.rows = []

    def log(self, row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.rows.append(None)


def test_one_that_fails_is_named_once_and_the_others_get_every_row() -> None:
    lines, good = [], Good()
    loggers = Loggers([Broken(), good], lines.append)
    for step in (1, 2):
        loggers.log({"step": step})
    loggers.close()
    assert lines == ["warning: cannot write a service: gone; the run continues"]
    assert good.rows == [{"step": 1}, {"step": 2}, None]
