"""A run from Python that an interrupt ends after a few steps."""

import dataclasses
import signal
from typing import Any

import pytest
from runs import CONFIG, TEXT

import jaxptd
from jaxptd.api import Run

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """An interrupted run, the rows passed to its callback, and the signal handlers after it.

    firsts: the index of the first sample of each training batch.
    """

    run: Run
    rows: list[dict[str, Any]]
    handlers: tuple[Any, ...]
    firsts: list[int]


@pytest.fixture(scope="package")
def config(tmp_path_factory) -> jaxptd.Config:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text(TEXT)
    values = {"data.source": folder / "text.txt", "train.run_dir": folder / "run"}
    return jaxptd.load_config(CONFIG, [f"--{key}={value}" for key, value in values.items()])


@pytest.fixture(scope="package")
def interrupted(config: jaxptd.Config) -> Interrupted:
    rows: list[dict[str, Any]] = []

    def on_log(row: dict[str, Any]) -> None:
        rows.append(row)
        if row["step"] == 3:
            signal.raise_signal(signal.SIGINT)

    read, firsts = Run.read_batch, []

    def noted(run: Run, windows: Any, first: int, **options: Any) -> Any:
        if windows is run.data.train:
            firsts.append(first)
        return read(run, windows, first, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "read_batch", noted)
        run = jaxptd.train(config, on_log=on_log, quiet=True)
    handlers = tuple(signal.getsignal(number) for number in SIGNALS)
    return Interrupted(run, rows, handlers, firsts)
