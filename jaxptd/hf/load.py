"""A directory's model: its config, its program to generate, and step 0 of a run from it."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxptd.config import Config, FamilyName, ModelConfig, from_dict, nested
from jaxptd.config.training import RANDOM
from jaxptd.config.written import RUN_CONFIG
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import is_token_file
from jaxptd.data.tokenizer_folders import TOKENIZER
from jaxptd.data.tokenizers import BYTES
from jaxptd.errors import UserError, quoted
from jaxptd.hf.directory import Directory, is_directory
from jaxptd.hf.read import read_params, remarks_of, sizes_of, sizes_without_weights
from jaxptd.hf.sizes import FURTHER, check_sizes
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import FAMILIES, family_of
from jaxptd.params import Params
from jaxptd.run.devices import ready
from jaxptd.run.saved import load_run, program_to_generate, restore_weights
from jaxptd.run.upcycle import begun_from, given_as, upcycles
from jaxptd.step import Program, State
from jaxptd.stores import Place, place, size_of

# ---- the state of step 0 of a run that starts from weights ---------------------------------------

MOST_OF_BYTES = 512  # ids: 257, special tokens, and some spare


def first_state(program: Program, *, say: Callable[[str], None]) -> State:
    """The state of step 0: random parameters, or those that `checkpoint.start` names.

    Moments are zero in both cases.

    Raises:
        UserError: the directory does not exist, is damaged, or has another model.
    """
    start = program.config.checkpoint.start
    if start in (None, RANDOM):
        if upcycles(program.config.model):
            raise UserError(
                f"model.moe.upcycle=true with checkpoint.start={start or 'null'}: there are no "
                "weights to copy; name a dense model as checkpoint.start, or leave upcycle out"
            )
        return program.init_state()
    path = place(str(start), field="checkpoint.start", say=say)
    if isinstance(path, Path) and not path.is_dir():
        raise UserError(
            f"checkpoint.start: there is no folder {quoted(start)}; name a run, a checkpoint in "
            "one, or a Hugging Face model"
        )
    if is_directory(path):
        directory = Directory(path)
        params = read_params(program, directory)
        for line in (*remarks_of(directory), *_of_strangers(program.config, path)):
            say(line)
    else:
        params = restore_weights(program, path)
    say(f"starting from the weights of {path}")
    return program.states.new(params)


def _of_strangers(config: Config, path: Place) -> Iterator[str]:
    """A sentence if text is read as bytes but the weights were trained on other tokens."""
    size = config.model.vocab_size or 0
    if config.data.tokenizer != BYTES or not family_of(config.model).has_vocabulary:
        return
    if size_of(path / TOKENIZER) is not None:
        remedy = f"use --data.tokenizer {path} for the model's own tokenizer"
    elif size > MOST_OF_BYTES:
        remedy = "name the model's own tokenizer.json as data.tokenizer"
    else:
        return
    source = config.data.source
    files = find_files(source if isinstance(source, str) else list(source))
    if not all(map(is_token_file, files)):
        yield (
            f"warning: data.tokenizer=bytes reads text as bytes, but the weights of {path} know "
            f"{size} other tokens; {remedy}"
        )


def config_of(directory: Directory, **model: Any) -> Config:
    """The config of a run that starts from a directory, on one device.

    Args:
        directory: has the sizes, and perhaps a tokenizer (else bytes).
        model: fields of `ModelConfig` to set.

    Raises:
        UserError: the directory lacks sizes, or a field does not exist.
    """
    sections = {name: values for name, values in model.items() if isinstance(values, Mapping)}
    fields = {name: value for name, value in model.items() if name not in sections}
    fields |= {f"{name}.{key}": x for name, values in sections.items() for key, x in values.items()}
    path = str(directory.path)
    name = path if size_of(directory.path / TOKENIZER) is not None else BYTES
    return from_dict(
        {
            "model": nested(sizes_of(directory) | fields),
            "data": {"tokenizer": name},
            "checkpoint": {"start": _as_start(directory.path)},
        }
    )


def start(path: Place) -> dict[str, Any]:
    """The fields that `--from` stands for, `section.field`: a run that starts from a directory.

    Models of text take the directory's tokenizer, which need not exist if the data's is another.

    Raises:
        UserError: the directory lacks sizes.
    """
    fields = sizes(path)
    tokenizer = {"data.tokenizer": str(path)} if _reads_text(fields["model.family"]) else {}
    return fields | {"checkpoint.start": _as_start(path)} | tokenizer


def sizes(path: Place) -> dict[str, Any]:
    """The fields of a model, `model.field`, that a directory decides. Raises as `start` does."""
    return {f"model.{name}": value for name, value in _sizes(path).items()}


def _sizes(path: Place) -> dict[str, Any]:
    if size_of(path / RUN_CONFIG) is not None:
        raise UserError(
            f"{path} is the directory of a run; use --run-dir {path} to continue it, or --config "
            f"{path / RUN_CONFIG} --checkpoint.start {path} to start another from its weights"
        )
    directory = Directory(path)
    return sizes_of(directory) if directory.has_weights else sizes_without_weights(directory)


def check_weights(path: Place) -> None:
    """Raises UserError if a directory has only a `config.json`, which gives sizes."""
    Directory(path).weight_files()


def _as_start(path: Place) -> str:
    """A path as `checkpoint.start` takes it, where some words are not paths."""
    name = str(path)
    return os.path.join(os.curdir, name) if name in (RANDOM, "null") else name


def check_chosen(config: Config, path: Place, *, tokenizer: bool) -> None:
    """Raises UserError if a run takes only sizes from a directory, and nothing chooses the rest.

    Args:
        config: of the run.
        path: the directory.
        tokenizer: whether the run's tokenizer was chosen.
    """
    if config.checkpoint.start is None:
        raise UserError(
            f"--model.from {path} gives only sizes, and no weights are chosen; use --from "
            f"{path} for its weights and tokenizer too, or --checkpoint.start {RANDOM} to draw new "
            "ones"
        )
    has_tokenizer = size_of(path / TOKENIZER) is not None and _reads_text(config.model.family)
    if has_tokenizer and not tokenizer:
        raise UserError(
            f"--model.from {path} gives only sizes, and data.tokenizer={config.data.tokenizer} "
            f"although {path} has a {TOKENIZER}; use --data.tokenizer {path}, or confirm with "
            f"--data.tokenizer {config.data.tokenizer}"
        )


def _reads_text(family: FamilyName) -> bool:
    return FAMILIES[family].has_vocabulary


def check(model: ModelConfig, path: Place) -> None:
    """Raises UserError, with the field, if a model contradicts the sizes of a directory."""
    sizes = _sizes(path)
    begun = begun_from(model, sizes["family"], where=path)
    check_sizes(begun, sizes, where=path, named=partial(given_as, model, begun))


def program_of(directory: Directory, run_dir: Place, **model: Any) -> Program:
    """The program of a directory's model, on one simulated device.

    Args:
        directory: has the sizes.
        run_dir: directory of the run that the program is for.
        model: as of `config_of`.
    """
    config = config_of(directory, **model)
    train = dataclasses.replace(config.train, run_dir=str(run_dir), platform="cpu")
    config, _ = ready(dataclasses.replace(config, layout=Layout(), train=train))
    return Program(config, make_mesh(config.layout))


def load_model(
    path: Place, *, layout: Layout, platform: Any, modules: bool = False, ema: bool = False
) -> tuple[Program, Params]:
    """Loads the model of a Hugging Face directory, or of a run's newest good checkpoint.

    Args:
        path: of either.
        layout: to load onto.
        platform: as `train.platform`.
        modules: whether a directory's layers behind the last are read too, which predict further
            tokens; a run's are its model's.
        ema: take the moving averages of a run's parameters.

    Raises:
        UserError: it is neither of these, it is damaged, or there are too few devices.
    """
    if not is_directory(path):
        return load_run(path, layout=layout, platform=platform, ema=ema)
    if ema:
        raise UserError(f"{path} is no run, and keeps no moving average; leave ema out")
    directory = Directory(path)
    further: dict[str, Any] = {"mtp": {"layers": directory.config.get(FURTHER) or 0}}
    config = config_of(directory, **(further if modules else {}))
    program = program_to_generate(config, layout=layout, platform=platform)
    return program, read_params(program, directory)
