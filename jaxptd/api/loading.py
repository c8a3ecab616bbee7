"""Loads a run from its directory, on any layout."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal

from jaxptd.api.run import Run, open_corpus
from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical
from jaxptd.fields import checked
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import tokenizer_of
from jaxptd.run.devices import ready
from jaxptd.run.folder import RunDir
from jaxptd.run.saved import restore_newest, saved_config
from jaxptd.step import Program


@checked("jaxptd.load")
def load(
    run_dir: str | Path,
    layout: Layout | None = None,
    *,
    platform: Literal["auto", "cpu"] | None = None,
) -> Run:
    """Restores the newest good checkpoint of a run, on any layout.

    >>> load("runs/quickstart", Layout(tp=4)).evaluate()  # doctest: +SKIP

    Args:
        run_dir: `train.run_dir` of the run.
        layout: of the loaded run; None: the one it was saved with.
        platform: as `train.platform`; None: the one it was saved with.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    folder = Path(run_dir)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    saved = saved_config(checkpoints, folder)
    train = dataclasses.replace(
        saved.train, run_dir=str(folder), platform=platform or saved.train.platform
    )
    config, _ = ready(dataclasses.replace(saved, layout=layout or saved.layout, train=train))
    program = Program(config, make_mesh(config.layout))
    canonical = restore_newest(checkpoints, folder, abstract_canonical(program))
    tokenizer = tokenizer_of(config)
    run = Run(program, tokenizer, partial(open_corpus, config, tokenizer), RunDir(folder), print)
    run.state = from_canonical(program, canonical)
    return run
