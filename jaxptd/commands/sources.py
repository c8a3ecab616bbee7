"""`from: DIR` and `model.from: DIR`: a Hugging Face directory written out as fields of a config.

`from` takes the sizes of its model, its weights and its tokenizer; `model.from` takes only the
sizes. Both work in a config file and on the command line.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxptd.commands.table import later
from jaxptd.common_options import as_place, place_option
from jaxptd.errors import UserError
from jaxptd.stores import Place, place

FROM, SIZES = "from", "model_from"  # among parsed values
OPTIONS = {FROM: "--from", SIZES: "--model.from"}
KEYS = tuple(name.removeprefix("--") for name in OPTIONS.values())  # in a config file


def add_sources(parser: Any) -> None:
    """Adds `--from D` and `--model.from D` to a parser."""
    help_text = "take sizes, weights and tokenizer from a Hugging Face directory"
    parser.add_argument(OPTIONS[FROM], dest=FROM, type=place_option, metavar="D", help=help_text)
    help_text = "take only the model's sizes from a Hugging Face directory"
    parser.add_argument(OPTIONS[SIZES], dest=SIZES, type=place_option, metavar="D", help=help_text)


def named_in_options(named: Mapping[str, Place]) -> dict[str, Any]:
    """The fields that a directory stands for, by `section.field`.

    They override a config file, and other options override them.

    Args:
        named: the directory by `FROM` or `SIZES`, if an option names one.

    Raises:
        UserError: both options are given, or there is no such directory.
    """
    if len(named) > 1:
        raise UserError("--from and --model.from both name a model; give one of them")
    return {name: value for each in named.items() for name, value in _fields(*each).items()}


def named_in_file(
    path: str, fields: dict[str, Any], model_of: Callable[[Mapping[str, Any]], Any]
) -> dict[str, str]:
    """Replaces the directory that a config file names by the fields it stands for.

    Args:
        path: the config file.
        fields: its fields by `section.field`, changed in place.
        model_of: makes a model from such fields.

    Returns:
        the directory under `FROM` or `SIZES`, if there is one.

    Raises:
        UserError: there is no such directory, or two of them, or the file contradicts it.
    """
    keys = {dest: option.removeprefix("--") for dest, option in OPTIONS.items()}
    named = {dest: key for dest, key in keys.items() if key in fields}
    if len(named) > 1:
        raise UserError(f"{path}: from and model.from both name a model; give one of them")
    found = {}
    for dest, key in named.items():
        source = fields.pop(key)
        if not isinstance(source, str) or not source:
            raise UserError(f"{path}: {key}: expected a directory of a Hugging Face model")
        directory = as_place(source, f"{path}: {key}:")
        for name, value in _fields(dest, directory).items():
            if fields.get(name) is None:
                fields[name] = value
        check_sizes(model_of(fields), str(directory))
        found[dest] = str(directory)
    return found


def check_sizes(model: Any, directory: str) -> None:
    """Raises UserError, with the field, if a model contradicts the sizes of a directory."""
    _reader().check(model, place(directory))


def check_weights(directory: str) -> None:
    """Raises UserError for a directory without weights: its `config.json` only gives sizes."""
    _reader().check_weights(place(directory))


def check_chosen(config: Any, directory: str, *, tokenizer: bool) -> None:
    """Raises UserError if a run would silently use only the sizes of a directory.

    Args:
        config: the run's config.
        directory: the one that `model.from` names.
        tokenizer: whether data.tokenizer was given.
    """
    _reader().check_chosen(config, place(directory), tokenizer=tokenizer)


def _fields(dest: str, path: Place) -> dict[str, Any]:
    """The fields that a directory stands for, by `section.field`."""
    fields: dict[str, Any] = {FROM: _reader().start, SIZES: _reader().sizes}[dest](path)
    return fields


def _reader() -> Any:
    return later("models of Hugging Face")
