"""Reads what a run has saved: its config, its newest good state, and its model for generation."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax

from jaxptd.checkpoint import CheckpointError, Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, params_from_canonical
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.params import Params
from jaxptd.run.checkpoints import saved_config as described_config
from jaxptd.run.devices import prepare
from jaxptd.step import Program


def load_run(run_dir: Path, *, tp: int, platform: Any) -> tuple[Program, Params]:
    """Loads the model of a run's newest good checkpoint, on `tp` devices.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=1)
    saved = saved_config(checkpoints, run_dir)
    train = dataclasses.replace(
        saved.train, platform=platform, global_batch_size=1, micro_batches=1
    )
    # cuDNN's kernel has no cache, and products of a single token gain nothing from 8 bits.
    model = dataclasses.replace(saved.model, attention="xla", products="native")
    config = Config(model, Layout(tp=tp), saved.data, saved.optimizer, train, saved.checkpoint)
    prepare(config, double=bool(jax.config.read("jax_enable_x64")))
    program = Program(config, make_mesh(config.layout))
    canonical = restore_newest(checkpoints, run_dir, abstract_canonical(program))
    return program, params_from_canonical(program, canonical)


def saved_config(checkpoints: Checkpoints, run_dir: Path) -> Config:
    """The config in the newest readable manifest; all checkpoints of a run have the same model.

    Raises:
        UserError: there is no checkpoint, or none can be read.
    """
    if not checkpoints.steps():
        raise UserError(
            f"{run_dir} holds no checkpoint; train with --train.run_dir {run_dir} first"
        )
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(CheckpointError):
            return described_config(str(run_dir), checkpoints.description(step))
    raise _all_damaged(run_dir)


def restore_newest(checkpoints: Checkpoints, run_dir: Path, target: Any) -> dict[str, Any]:
    """The state of the newest good checkpoint, canonical; warns of damaged ones.

    Raises:
        UserError: all are damaged.
    """
    found = checkpoints.restore_newest(target, report=_warn)
    if found is None:
        raise _all_damaged(run_dir)
    return found[1]


def _all_damaged(run_dir: Path) -> UserError:
    return UserError(f"no checkpoint of {run_dir} can be read; all of them are damaged")


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
