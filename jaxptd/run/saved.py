"""Reads what a run has saved: its config, its newest good state, its weights for other runs."""

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxptd.checkpoint import (
    CheckpointError,
    Checkpoints,
    check_part,
    check_whole,
    load_part,
    read_description,
    read_tensors,
    restore_part,
)
from jaxptd.checkpoint.canonical import (
    abstract_canonical,
    from_canonical,
    params_from_canonical,
)
from jaxptd.checkpoint.manifest import MANIFEST
from jaxptd.config import Config, Kernels, ModelConfig, flat, option
from jaxptd.config.lora import INSIDE
from jaxptd.data.tokenizer_folders import TEMPLATE, TOKENIZER
from jaxptd.data.tokenizers import BYTES
from jaxptd.errors import UserError
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import family_of
from jaxptd.params import Params
from jaxptd.run.checkpoints import saved_config as described_config
from jaxptd.run.devices import prepare
from jaxptd.run.folder import BASE
from jaxptd.run.upcycle import (
    DenseSource,
    Read,
    begun_from,
    dense_shapes,
    given_as,
    upcycled,
    upcycles,
)
from jaxptd.step import Program
from jaxptd.stores import Place, StorePath, is_url, local_copy, size_of

# Names of parameters, and of their moving averages, in a checkpoint: where, key there, parameter.
PARAMS, AVERAGES = r"(params)\.((.+))", r"(optimizer)\.(\d+\.average\.(.+))"

# Model fields that change how the weights are used, not the weights.
_NO_WEIGHTS = frozenset(
    {
        *("vocab_multiple", "dropout", "dtype", "products"),
        *("remat", "remat_layers", "attention", "kernels", "scan_layers"),
        "images.drop_path",
        *("moe.bias_rate", "moe.balance_loss", "moe.z_loss"),
        *("moe.chunk", "moe.replay", "moe.upcycle", "mtp.weight"),
        *("preference", "preference.loss", "preference.beta"),
    }
)


def load_run(
    run_dir: Place, *, layout: Layout, platform: Any, ema: bool = False
) -> tuple[Program, Params]:
    """Loads the model of a run's newest good checkpoint, to generate.

    ema: take the moving averages of its parameters.

    Raises:
        UserError: there is no run, no good checkpoint, no average, or too few devices.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=1)
    saved = _with_average(saved_config(checkpoints, run_dir), run_dir, ema)
    program = program_to_generate(saved, layout=layout, platform=platform)
    canonical = restore_newest(checkpoints, run_dir, abstract_canonical(program))
    if ema:
        return program, program.states.averaged(from_canonical(program, canonical))
    return program, params_from_canonical(program, canonical)


def _with_average(config: Config, run_dir: Place, ema: bool) -> Config:
    """The config of a run. Raises UserError if a moving average is asked for and it keeps none."""
    if ema and not config.optimizer.ema_decay:
        raise UserError(
            f"{run_dir} keeps no moving average of its parameters (optimizer.ema_decay=0.0); "
            "leave ema out"
        )
    return config


def program_to_generate(saved: Config, *, layout: Layout, platform: Any) -> Program:
    """A program with the model of a config, to generate on another layout.

    Raises:
        UserError: too few devices, or the model does not fit the layout.
    """
    size = layout.sample_shards * family_of(saved.model).sharing(saved.model, layout)
    train = dataclasses.replace(
        saved.train, platform=platform, global_batch_size=size, micro_batches=1
    )
    # cuDNN's kernel supports no cache, and matmuls of a single token gain nothing from fp8. Triton
    # may not be available on this machine.
    kernels: Kernels = "auto" if saved.model.kernels == "triton" else saved.model.kernels
    model = dataclasses.replace(saved.model, products="native", kernels=kernels)
    if family_of(model).writing is not None:
        model = dataclasses.replace(model, attention="xla")
    config = Config(model, layout, saved.data, saved.optimizer, train, saved.checkpoint)
    prepare(config, double=bool(jax.config.read("jax_enable_x64")))
    return Program(config, make_mesh(config.layout))


def saved_config(checkpoints: Checkpoints, run_dir: Place) -> Config:
    """The config in the newest readable manifest; all checkpoints of a run have the same model.

    If the file of the tokenizer or of the chat template has gone, the copy that the run keeps of
    its base model takes its place.

    Raises:
        UserError: there is no checkpoint, or none can be read.
    """
    if not checkpoints.steps():
        raise UserError(
            f"{run_dir} holds no checkpoint; train with --train.run_dir {run_dir} first"
        )
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(CheckpointError):
            config = described_config(str(run_dir), checkpoints.description(step))
            return with_kept_files(config, run_dir / BASE)
    raise _all_damaged(run_dir)


def with_kept_files(config: Config, kept: Place) -> Config:
    """The config with the run's own copies of a tokenizer and a chat template that have gone."""
    data = config.data
    names = {"tokenizer": TOKENIZER, "chat_template": TEMPLATE}
    gone = {name: file for name, file in names.items() if _has_gone(getattr(data, name))}
    there = {name for name, file in gone.items() if size_of(kept / file) is not None}
    if not there:
        return config
    folder = local_copy(kept) if isinstance(kept, StorePath) else kept
    places: dict[str, Any] = {"tokenizer": str(folder), "chat_template": str(folder / TEMPLATE)}
    return dataclasses.replace(
        config, data=dataclasses.replace(data, **{name: places[name] for name in there})
    )


def _has_gone(name: str | None) -> bool:
    return not (name in (None, BYTES) or is_url(name) or os.path.exists(str(name)))


def restore_newest(checkpoints: Checkpoints, run_dir: Place, target: Any) -> dict[str, Any]:
    """The state of the newest good checkpoint, in canonical form; warns of damaged ones.

    Raises:
        UserError: all are damaged.
    """
    restored = checkpoints.restore_newest(target, report=_warn)
    if restored is None:
        raise _all_damaged(run_dir)
    return restored[1]


def restore_weights(program: Program, path: Place) -> Params:
    """The parameters of a checkpoint with the same model, or of a run's newest good one.

    With `model.moe.upcycle` the checkpoint has the dense model without experts. Adapters that it
    lacks begin as in a new run.

    Raises:
        UserError: there is no such checkpoint, it is damaged, it has another model, or a number
            is NaN or infinite.
    """
    path = _checkpoint(path)
    _check_model(program.config.model, path)
    if upcycles(program.config.model):
        return upcycled(program, _reader_of_dense(program, path))
    targets, there = abstract_canonical(program)["params"], read_tensors(path)
    lacking = [name for name in targets if INSIDE in name and f"params.{name}" not in there]
    wanted = {name: x for name, x in targets.items() if name not in lacking}
    restored = restore_part(path, {"params": wanted})
    for name, x in restored["params"].items():
        _check_finite(path, name, x)
    return program.initial(lacking) | params_from_canonical(program, restored)


def _checkpoint(path: Place) -> Place:
    """The folder of a checkpoint, or of a run's newest good one."""
    if size_of(path / MANIFEST) is not None:
        return path
    if isinstance(path, Path) and not os.path.isdir(path / "checkpoints"):
        return path
    steps = Checkpoints(path / "checkpoints", keep=1).steps()
    if not steps:
        raise UserError(
            f"checkpoint.start={path} has no checkpoints; name a run that has some, one of "
            "its checkpoints, or a Hugging Face model"
        )
    return _folder(path, steps[-1])


def _check_model(model: ModelConfig, path: Place) -> None:
    """Raises UserError unless a checkpoint has the weights that a model begins with."""
    saved = described_config(str(path), read_description(path)).model
    begun = begun_from(model, saved.family, where=f"checkpoint.start={path}")
    if saved.lora:
        begun = dataclasses.replace(begun, lora=model.lora)
    for name in flat(saved) | flat(begun):
        ours, theirs = option(begun, name), option(saved, name)
        if name not in _NO_WEIGHTS and ours != theirs:
            field = given_as(model, begun, name)
            raise UserError(
                f"model.{field}={ours}, but checkpoint.start={path} has {theirs}; use a "
                "config with the same model"
            )


def _reader_of_dense(program: Program, path: Place) -> Read:
    """Reads the parameters of a dense model's checkpoint, once all are checked."""
    shapes, dtype = dense_shapes(program), program.states.dtype
    every = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    check_part(path, {"params": every})

    def read(source: DenseSource, part: jax.ShapeDtypeStruct) -> jax.Array:
        held = source.held(shapes[source.name], part)
        x = load_part(path, {"params": {source.name: held}})["params"][source.name]
        _check_finite(path, source.name, x)
        return source.rows(x, part)

    return read


def _check_finite(path: Place, name: str, x: jax.Array) -> None:
    held = {str(shard.index): shard.data for shard in x.addressable_shards}
    bad = sum(np.count_nonzero(~np.isfinite(np.asarray(each))) for each in held.values())
    check_finite(f"{path}: {name}", int(bad))


def check_finite(where: str, bad: int) -> None:
    """Raises UserError if a parameter has bad numbers.

    Args:
        where: file and parameter, for the message.
        bad: how many of its elements are NaN or infinite.
    """
    if bad:
        raise UserError(
            f"{where} has {bad:,} elements that are NaN or infinite, so every loss would be; "
            "start from other weights"
        )


class SavedParams:
    """The parameters of a run's newest good checkpoint in canonical form, read one at a time.

    Args:
        run_dir: of the run.
        ema: read the moving averages of the parameters.

    Raises:
        UserError: there is no run, no good checkpoint, or no average.
    """

    def __init__(self, run_dir: Place, *, ema: bool = False) -> None:
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=1)
        self.run_dir = run_dir
        self.config = _with_average(saved_config(checkpoints, run_dir), run_dir, ema)
        self.step = _newest_undamaged(checkpoints, run_dir)
        self._path = _folder(run_dir, self.step)
        saved, self._tensors = read_tensors(self._path), dict[str, Any]()
        self._places: dict[str, tuple[str, str]] = {}
        for form in (PARAMS, AVERAGES)[: 1 + ema]:
            for found in filter(None, (re.fullmatch(form, name) for name in saved)):
                self._tensors[found[3]] = saved[found[0]]
                self._places[found[3]] = found[1], found[2]
        self.shapes = {name: tuple(each["shape"]) for name, each in self._tensors.items()}
        self.dtypes = {name: each["dtype"] for name, each in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One parameter."""
        wide = self.dtypes[name] == "float64"
        with _in_float64() if wide else contextlib.nullcontext():
            x: Any = jax.ShapeDtypeStruct(self._tensors[name]["shape"], self.dtypes[name])
            where, key = self._places[name]
            return np.asarray(load_part(self._path, {where: {key: x}})[where][key])


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Enables float64 in all threads: `jax.enable_x64` is per thread, and orbax reads in others."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _newest_undamaged(checkpoints: Checkpoints, run_dir: Place) -> int:
    for step in reversed(checkpoints.steps()):
        try:
            check_whole(_folder(run_dir, step))
        except CheckpointError as error:
            _warn(f"{error}; skipped")
        else:
            return step
    raise _all_damaged(run_dir)


def _folder(run_dir: Place, step: int) -> Place:
    return run_dir / "checkpoints" / f"{step:08d}"


def _all_damaged(run_dir: Place) -> UserError:
    return UserError(
        f"no checkpoint of {run_dir} can be read: all are damaged; train again, or load another run"
    )


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)
