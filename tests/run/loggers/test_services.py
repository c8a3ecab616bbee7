"""Weights & Biases and MLflow, replaced by packages that record what they are sent."""

import importlib.machinery
import json
import re
import sys
import types

import pytest

from jaxptd.commands.command_line import load_config
from jaxptd.config import Config, TrainConfig, to_dict
from jaxptd.run.folder import RunDir


def row(step: int, **more: float) -> dict:
    return {"step": step, "loss": 1.0 / step, "mfu": None, **more}


class Service(types.ModuleType):
    """A fake package that records rows: `points[run]` is a list of (step, numbers)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.points: dict[str, list] = {}
        self.ended: list[str] = []
        self.broken = False

    def take(self, run: str, numbers: dict, step: int) -> None:
        if self.broken:
            raise ValueError("the server\nis gone")
        self.points[run].append((step, numbers))


class FakeWandb(Service):
    def init(self, **options):
        assert options["resume"] == "allow"
        self.options, run = options, options["id"]
        self.points.setdefault(run, [])
        return types.SimpleNamespace(
            log=lambda numbers, step: self.take(run, numbers, step),
            finish=lambda: self.ended.append(run),
        )


class FakeMLflow(Service):
    def start_run(self, run_id=None, run_name=None):
        self.run = run_id or f"run{len(self.points)}"
        self.name = run_name or self.name
        assert (run_id is None) == (self.run not in self.points)
        self.points.setdefault(self.run, [])
        self.parameters = getattr(self, "parameters", {})
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=self.run))

    def log_text(self, text: str, name: str) -> None:
        self.text, self.file = text, name

    def log_params(self, parameters: dict) -> None:
        assert len(parameters) <= 100  # a server's limit per request
        assert not set(parameters) & set(self.parameters)  # MLflow forbids changes
        self.parameters |= parameters

    def log_metrics(self, numbers, step, synchronous):
        # Names of metrics that MLflow accepts.
        assert all(re.fullmatch(r"[\w\-. /:]+", name) for name in numbers)
        assert not synchronous  # the run does not wait for the server
        self.take(self.run, numbers, step)

    def flush_async_logging(self) -> None:
        self.flushed = True

    def end_run(self) -> None:
        assert self.flushed
        self.ended.append(self.run)


@pytest.fixture(params=[FakeWandb, FakeMLflow])
def service(request, monkeypatch):
    name = {"FakeWandb": "wandb", "FakeMLflow": "mlflow"}[request.param.__name__]
    found = request.param(name)
    found.name = name
    monkeypatch.setitem(sys.modules, name, found)
    return found


def open_run(path, service, *, step: int = 0, say=pytest.fail) -> RunDir:
    run_dir = RunDir(path, say=say)
    config = Config(train=TrainConfig(loggers=[service.__name__]))
    run_dir.check(config)
    run_dir.open(config, step=step)
    return run_dir


def test_a_service_gets_every_number_of_a_row(tmp_path, service) -> None:
    run_dir = open_run(tmp_path / "first", service)
    more = {"expert_load/0": 1.5, "validation_loss": 2.0}
    run_dir.log(row(5, **more))
    run_dir.close()
    ((run, points),) = service.points.items()
    assert points == [(5, {"loss": 0.2, **more})]
    assert service.ended == [run]
    assert json.loads((tmp_path / "first" / f"{service.__name__}.json").read_text()) == {
        "run": run,
        "step": 5,
    }


def test_a_resumed_run_is_the_same_one_and_has_each_step_once(tmp_path, service) -> None:
    """The run is killed after step 7, killed again after 6, and resumes from step 5 each time."""
    run_dir = open_run(tmp_path / "run", service)
    for step in range(1, 8):
        run_dir.log(row(step))
    again = open_run(tmp_path / "run", service, step=5)
    again.log(row(6))
    third = open_run(tmp_path / "run", service, step=5)
    for step in (6, 7, 8):
        third.log(row(step))
    third.close()
    ((_, points),) = service.points.items()
    assert [step for step, _ in points] == list(range(1, 9))
    assert [each["step"] for each in third.metrics()] == list(range(1, 9))


def test_runs_in_other_directories_are_other_runs(tmp_path, service) -> None:
    service.parameters = {}
    for name in ("a", "b"):
        service.parameters = {}
        open_run(tmp_path / name, service).log(row(1))
    assert [len(points) for points in service.points.values()] == [1, 1]


def test_a_service_that_is_gone_does_not_end_the_run(tmp_path, service) -> None:
    lines = []
    run_dir = open_run(tmp_path / "run", service, say=lines.append)
    service.broken = True
    for step in (1, 2):
        run_dir.log(row(step))
    assert len(lines) == 1
    assert lines[0].startswith("warning: cannot write the ")
    assert lines[0].endswith(": the server is gone; the run continues")
    assert len(run_dir.metrics()) == 2


def test_a_service_that_does_not_open_is_a_warning(tmp_path, service, monkeypatch) -> None:
    def no_login(**_):
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(service, "init", no_login, raising=False)
    monkeypatch.setattr(service, "start_run", no_login, raising=False)
    lines = []
    run_dir = open_run(tmp_path / "run", service, say=lines.append)
    run_dir.log(row(1))
    name = service.__name__
    assert lines == [f"warning: this run logs nothing to {name}: api_key not configured"]
    assert not (tmp_path / "run" / f"{name}.json").exists()


def test_a_service_gets_the_config(tmp_path, service) -> None:
    open_run(tmp_path / "mine", service)
    config = Config(train=TrainConfig(loggers=[service.__name__]))
    if service.__name__ == "wandb":
        assert service.options["config"] == to_dict(config)
        assert (service.options["name"], service.options["dir"]) == ("mine", str(tmp_path / "mine"))
    else:
        fields = {f"{s}.{n}" for s, section in to_dict(config).items() for n in section}
        assert set(service.parameters) == fields
        assert (service.name, service.file) == ("mine", "config.yaml")
        (tmp_path / "config.yaml").write_text(service.text)
        assert load_config(tmp_path / "config.yaml") == config
