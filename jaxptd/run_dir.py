"""The run directory: the resolved config, and one line of metrics for each logged step."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxptd.command_line import load_config
from jaxptd.config import Config, to_dict
from jaxptd.errors import UserError

# What a resumed run may change: it changes where and how fast the numbers come, not the numbers.
_FREE_SECTIONS = frozenset({"layout", "checkpoint"})
_FREE = frozenset(
    {
        *(f"model.{name}" for name in ("remat", "attention", "scan_layers")),
        *(
            f"train.{name}"
            for name in ("steps", "micro_batches", "log_every", "eval_every", "eval_batches")
        ),
        *(f"train.{name}" for name in ("sample_tokens", "run_dir", "platform")),
    }
)


def difference(config: Config, saved: Config) -> str | None:
    """The first field in which two configs are different runs, in words; None if they are the same."""
    old = to_dict(saved)
    for section, fields in to_dict(config).items():
        for name, value in fields.items():
            key = f"{section}.{name}"
            if section not in _FREE_SECTIONS and key not in _FREE and value != old[section][name]:
                return f"{key} is {value}, was {old[section][name]}"
    return None


class RunDir:
    """Where a run writes: `config.yaml`, `metrics.jsonl`, `checkpoints/`. Makes nothing until `open`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._config, self._metrics = self.path / "config.yaml", self.path / "metrics.jsonl"

    def check(self, config: Config) -> None:
        """Raises UserError if this directory holds another run, or one that is not to be resumed."""
        with _explained(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise UserError(f"train.run_dir={self.path} is a file; name a directory")
            if not self._config.exists():
                return
        if config.checkpoint.resume == "never":
            raise UserError(
                f"train.run_dir={self.path} holds a run and checkpoint.resume is never; "
                "use another directory, or checkpoint.resume=auto"
            )
        changed = difference(config, load_config(self._config))
        if changed:
            raise UserError(
                f"train.run_dir={self.path} holds another run: {changed}; "
                "use another directory, or that run's config"
            )

    def open(self, config: Config, *, step: int) -> None:
        """Makes the directory, writes the config, and drops metrics of steps after `step`."""
        with _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self._config, yaml.safe_dump(to_dict(config), sort_keys=False))
            rows = [row for row in self.metrics() if row["step"] <= step]
            _write(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, row: dict[str, Any]) -> None:
        """Appends one step's metrics."""
        with _explained(self.path), self._metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every step logged so far; a last line cut short by a kill is left out."""
        if not self._metrics.exists():
            return []
        rows = []
        for line in self._metrics.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
        return rows


def _write(path: Path, text: str) -> None:
    """Written aside, then moved into place."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"train.run_dir={path}: {error.strerror or error}; use a directory that can be written"
        ) from error
