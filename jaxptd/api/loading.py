"""Loads a run from its directory, or a Hugging Face directory as a run, on any layout."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxptd.api.run import Run, open_corpus
from jaxptd.checkpoint import Checkpoints
from jaxptd.checkpoint.canonical import abstract_canonical, from_canonical
from jaxptd.config import Dtype, ModelConfig
from jaxptd.data import Data
from jaxptd.fields import checked, refuse_unknown
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import config_of
from jaxptd.hf.read import read_params
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import family_of, tokenizer_of
from jaxptd.run import reference
from jaxptd.run.devices import ready
from jaxptd.run.folder import RunDir
from jaxptd.run.saved import restore_newest, saved_config
from jaxptd.step import Program
from jaxptd.stores import Place, place


@checked("jaxptd.load")
def load(
    run_dir: str | Place,
    layout: Layout | None = None,
    *,
    platform: Literal["auto", "cpu"] | None = None,
) -> Run:
    """Restores a run from its newest good checkpoint, on the same or any other layout.

    >>> load("runs/quickstart", Layout(tp=4)).evaluate()  # doctest: +SKIP

    Args:
        run_dir: directory of the run or its URL, its `train.run_dir`.
        layout: layout to load onto; None: the one it was saved with.
        platform: as `train.platform`; None: the one it was saved with.

    Raises:
        UserError: there is no run, no good checkpoint, or too few devices.
    """
    folder = place(run_dir)
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    saved = saved_config(checkpoints, folder)
    train = dataclasses.replace(
        saved.train, run_dir=str(folder), platform=platform or saved.train.platform
    )
    config, _ = ready(dataclasses.replace(saved, layout=layout or saved.layout, train=train))
    program = Program(config, make_mesh(config.layout))
    canonical = restore_newest(checkpoints, folder, abstract_canonical(program))
    tokenizer = tokenizer_of(config)
    files = RunDir(folder)

    def opened() -> Data:
        data = open_corpus(config, tokenizer)
        reference.read(files, data)
        return data

    run = Run(program, tokenizer, opened, files, print)
    run.state = from_canonical(program, canonical)
    return run


# ---- weights of a Hugging Face directory ---------------------------------------------------------


@checked("jaxptd.from_hf")
def from_hf(
    path: str | Place,
    *,
    layout: Layout | None = None,
    dtype: Dtype = "float32",
    platform: Literal["auto", "cpu"] = "auto",
    **model_options: Any,
) -> Run:
    """Loads a Hugging Face model onto any layout, as a run at step 0.

    >>> run = from_hf("models/gpt2", layout=Layout(tp=2))  # doctest: +SKIP
    >>> loss, gradients = run.loss_and_gradients(batch)  # doctest: +SKIP

    Writes nothing until the run is saved, to `runs/NAME`.

    Args:
        path: directory with `config.json` and safetensors.
        layout: layout to load onto; None: one device.
        dtype: compute precision; with float64, also that of the parameters.
        platform: as `train.platform`.
        model_options: other fields of `ModelConfig`, such as `seq_length`.

    Raises:
        UserError: the directory is damaged or of an unknown model, the options contradict it, or
            there are too few devices.
    """
    options = [each.name for each in dataclasses.fields(ModelConfig)]
    known = ["layout", "dtype", "platform", *options]
    refuse_unknown("jaxptd.from_hf", model_options, known, see="see help(jaxptd.ModelConfig)")
    directory, layout = Directory(path), layout or Layout()
    config = config_of(directory, dtype=dtype, **model_options)
    sharing = family_of(config.model).sharing(config.model, layout)
    train = dataclasses.replace(
        config.train,
        global_batch_size=layout.sample_shards * layout.pp * sharing,
        micro_batches=layout.pp,  # enough to keep all stages busy
        run_dir=str(Path("runs") / directory.path.name),
        platform=platform,
    )
    config, _ = ready(dataclasses.replace(config, layout=layout, train=train))
    program = Program(config, make_mesh(config.layout))
    tokenizer = tokenizer_of(config)
    opened = partial(open_corpus, config, tokenizer)
    run = Run(program, tokenizer, opened, RunDir(config.train.run_dir), print)
    run.state = program.states.new(read_params(program, directory))
    return run
