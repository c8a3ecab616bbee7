"""`from: DIR` and `model.from: DIR`: a Hugging Face directory written out as fields of a config.

`from` is the sizes of its model, its weights and its tokenizer; `model.from` is the sizes alone.
Both can stand in a config file and on a command line.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxptd.commands.table import later
from jaxptd.common_options import as_path, path_option
from jaxptd.config.files import Dumper
from jaxptd.errors import Parser, UserError

FROM, SIZES = "from", "model_from"  # among parsed values
OPTIONS = {FROM: "--from", SIZES: "--model.from"}
KEYS = tuple(name.removeprefix("--") for name in OPTIONS.values())  # in a config file


def add_sources(parser: Any) -> None:
    """Adds `--from D` and `--model.from D` to a parser."""
    help_text = "sizes, weights and tokenizer of a Hugging Face directory"
    parser.add_argument(OPTIONS[FROM], dest=FROM, metavar="D", help=help_text)
    help_text = "only the sizes of a Hugging Face directory's model"
    parser.add_argument(OPTIONS[SIZES], dest=SIZES, metavar="D", help=help_text)


def written_out(argv: Sequence[str]) -> list[str]:
    """The command line with the fields that a directory stands for in front of all other options.

    They override a config file, and other options override them.

    Raises:
        UserError: both options are given, or there is no such directory.
    """
    words = Parser(add_help=False)
    for dest, name in OPTIONS.items():
        words.add_argument(name, dest=dest, type=path_option, action="append", default=[])
    given, others = words.parse_known_args(argv)
    named = {dest: path[-1] for dest, path in vars(given).items() if path}
    if len(named) > 1:
        raise UserError("--from and --model.from both name a model; give one of them")
    for dest, path in named.items():
        fields = (as_option(name, value) for name, value in _fields(dest, path).items())
        others = [*fields, *others, as_option(OPTIONS[dest].removeprefix("--"), str(path))]
    return others


def file_written_out(path: str, model_of: Callable[[Mapping[str, Any]], Any]) -> str:
    """The path of a config file; of one that names a directory, its text with the fields of that.

    Args:
        path: of the file.
        model_of: makes a model of the fields of a section.

    Raises:
        UserError: there is no such directory, or two of them, or the file contradicts it.
    """
    tree = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    named = {FROM: tree} if FROM in tree else {}
    named |= {SIZES: tree["model"]} if FROM in (tree.get("model") or {}) else {}
    if len(named) > 1:
        raise UserError(f"{path}: from and model.from both name a model; give one of them")
    for dest, section in named.items():
        source, name = section.pop(FROM), OPTIONS[dest].removeprefix("--")
        if not isinstance(source, str) or not source:
            raise UserError(f"{path}: {name}: expected a directory of a Hugging Face model")
        directory = as_path(source, f"{path}: {name}:")
        for key, value in _fields(dest, directory).items():
            part, _, field = key.partition(".")
            tree[part] = tree.get(part) or {}
            if tree[part].get(field) is None:
                tree[part][field] = value
        check_sizes(model_of(tree["model"]), str(directory))
        tree[dest] = str(directory)
    return str(yaml.dump(tree, Dumper=Dumper)) if named else path


def check_sizes(model: Any, directory: str) -> None:
    """Raises UserError, with the field, if a model contradicts the sizes of a directory."""
    _reader().check(model, Path(directory))


def check_chosen(config: Any, directory: str, *, tokenizer: bool) -> None:
    """Raises UserError if a run would use the sizes of a directory, and no more of it, unasked.

    Args:
        config: of the run.
        directory: that `model.from` names.
        tokenizer: whether data.tokenizer was given.
    """
    _reader().check_chosen(config, Path(directory), tokenizer=tokenizer)


def _fields(dest: str, path: Path) -> dict[str, Any]:
    """The fields that a directory stands for, by `section.field`."""
    fields: dict[str, Any] = {FROM: _reader().start, SIZES: _reader().sizes}[dest](path)
    return fields


def _reader() -> Any:
    return later("models of Hugging Face")


def as_option(name: str, value: Any) -> str:
    """A field as an option of a command line."""
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
