"""The model of a directory: its config, and its program with parameters, to generate."""

import os
from pathlib import Path
from typing import Any

from jaxptd.config import Config, ModelConfig, from_dict
from jaxptd.data.tokenizer_folders import TOKENIZER
from jaxptd.data.tokenizers import BYTES
from jaxptd.hf.directory import Directory, is_directory
from jaxptd.hf.read import read_params, sizes_of
from jaxptd.hf.sizes import check_sizes
from jaxptd.mesh import Layout
from jaxptd.params import Params
from jaxptd.run.saved import load_run, to_generate
from jaxptd.step import Program


def config_of(directory: Directory, **model: Any) -> Config:
    """The config of a directory's model, on one device.

    Args:
        directory: with the sizes, and perhaps the tokenizer; else that is bytes.
        model: fields of `ModelConfig` to set.

    Raises:
        UserError: there are no such sizes, or no such fields.
    """
    name = str(directory.path) if os.path.isfile(directory.path / TOKENIZER) else BYTES
    return from_dict({"model": sizes_of(directory) | model, "data": {"tokenizer": name}})


def sizes(path: Path) -> dict[str, Any]:
    """The fields of `ModelConfig` that a directory decides. Raises UserError as `config_of`."""
    return sizes_of(Directory(path))


def check(model: ModelConfig, path: Path) -> None:
    """Raises UserError, with the field, if a model contradicts the sizes of a directory."""
    check_sizes(model, sizes(path), where=path)


def load_model(path: Path, *, layout: Layout, platform: Any) -> tuple[Program, Params]:
    """Loads the model of a Hugging Face directory, or of a run's newest good checkpoint.

    Raises:
        UserError: it is neither, it is damaged, or there are too few devices.
    """
    if not is_directory(path):
        return load_run(path, layout=layout, platform=platform)
    directory = Directory(path)
    program = to_generate(config_of(directory), layout=layout, platform=platform)
    return program, read_params(program, directory)
