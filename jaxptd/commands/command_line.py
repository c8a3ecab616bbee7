"""Reads a config from YAML (`--config F`) and overrides (`--model.num_layers 4`).

An unknown key, a wrong type or an impossible layout raises `UserError`: one line with the field
and the remedy.
"""

import argparse
import dataclasses
import functools
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from jaxptd.commands.help import add_help
from jaxptd.commands.sources import (
    FROM,
    KEYS,
    SIZES,
    add_sources,
    check_chosen,
    check_sizes,
    named_in_file,
    named_in_options,
)
from jaxptd.config import Config, ModelConfig, from_dict, nested
from jaxptd.config.files import describe_type, find_config, option_value, typed
from jaxptd.config.written import (
    as_yaml,
    field_types,
    nearest_key,
    read_file,
    section_names,
    sections,
)
from jaxptd.errors import Parser, UserError, quoted
from jaxptd.fields import checked

CONFIG, PRINT = "--config", "--print_config"
PLAIN = (bool, int, float)  # option types whose values are parsed like fields


class ConfigParser(Parser):
    """A parser with `--config F` and an option per field; an option not given has no value."""

    def add_argument(self, *names: str, type: Any = None, **options: Any) -> argparse.Action:
        """Adds an option as argparse does; numbers and booleans are parsed like fields."""
        if type in PLAIN and "nargs" not in options:
            options |= {"action": _Value, "kind": type}
        elif type:
            options["type"] = type
        return super().add_argument(*names, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads a command line. Raises UserError for a word that is not an option."""
        words = list(sys.argv[1:] if args is None else args)
        given, unknown = self.parse_known_args(words, namespace)
        if unknown or "--" in words:
            self._refuse(next(iter(unknown), "--"))
        return given

    def _refuse(self, word: str) -> NoReturn:
        """Raises UserError for a word that is not an option, and suggests the nearest field."""
        name = "".join(word.removeprefix("--").split()[:1]).partition("=")[0]
        if not word.strip():
            raise UserError(
                "one of the arguments is empty; remove it, or name an option (see --help)"
            )
        if name in sections() and word.startswith("--"):
            raise UserError(f"--{name} is a section; give its fields, as --{name}.name value")
        raise UserError(
            f"unknown key {quoted(name or word)}; {nearest_key(name, self._option_string_actions)}"
        )


class _Value(argparse.Action):
    """An option whose value is read as YAML and has a field's type."""

    def __init__(self, *, kind: Any, shown: Any = None, **options: Any) -> None:
        """kind: the type. shown: the default that help shows, if the option has none."""
        super().__init__(**options)
        self.kind, self.shown = kind, self.default if shown is None else shown
        self.label = self.option_strings[0] if "." not in self.dest else self.dest

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, option_value(self.label, values, self.kind))


def make_parser(
    prog: str, description: str, *, usual: Sequence[str] = (), examples: Sequence[str] = ()
) -> ConfigParser:
    """Makes a parser with `--config F` and an option per field, which raises instead of exiting.

    usual, examples: what `--help` shows, see `add_help`.
    """
    parser = ConfigParser(
        prog=prog,
        description=inspect.cleandoc(description),
        usage="%(prog)s [--config F] [--section.field value ...] [options]",
        add_help=False,
        formatter_class=_HelpFormatter,
    )
    add_help(parser, usual=usual, examples=examples)
    help_text = "YAML file, or the name of a packaged config; options override it"
    parser.add_argument(CONFIG, action="append", default=[], metavar="F", help=help_text)
    add_sources(parser)
    help_text = "print the resulting config, and exit"
    parser.add_argument(PRINT, action="store_true", help=help_text)
    for section, cls in sections().items():
        _add_section(parser, section, cls)
    return parser


def _add_section(parser: ConfigParser, section: str, cls: Any) -> None:
    """Adds the options of a section's fields, with the lines of its docstring."""
    lines = argument_lines(cls)
    title = (inspect.getdoc(cls) or section).partition("\n")[0]
    group = parser.add_argument_group(title.removesuffix("."))
    for field in dataclasses.fields(cls):
        if (kind := field_types().get(name := f"{section}.{field.name}")) is None:
            continue  # a section
        default = None if "." in section else field.default
        group.add_argument(
            f"--{name}",
            action=_Value,
            kind=kind,
            shown="null" if default is None else default,
            default=argparse.SUPPRESS,
            metavar=field.name.upper(),
            help=lines[field.name],
        )


def argument_lines(cls: Any) -> dict[str, str]:
    """Returns what the docstring of a class says about each argument, on one line each.

    >>> argument_lines(ModelConfig)["hidden_size"]
    'width of the residual stream.'
    """
    arguments = (inspect.getdoc(cls) or "").partition("Args:\n")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.M)
    return {name: " ".join(text.split()) for name, text in entries}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the type and the default of each field after its help."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not isinstance(action, _Value):
            return text
        default = "" if action.shown is None else f", default: {action.shown}"
        return f"{text} (type: {describe_type(action.kind)}{default})"


# ---- a command line as a config ------------------------------------------------------------------


class Parsed(typing.NamedTuple):
    """A command line that was read.

    Args:
        config: the resulting config.
        options: values of the parser's other options.
        given: `section.field` of each field that the command line or its config file sets.
        source: the directory that `from` names, if any.
        sizes: the directory that `model.from` names, if any.
    """

    config: Config
    options: dict[str, Any]
    given: frozenset[str]
    source: str | None
    sizes: str | None


def parse(parser: ConfigParser, argv: Sequence[str] | None) -> tuple[Config, dict[str, Any]]:
    """Reads the config of a command line. Returns it with the values of the parser's other options.

    Fields override the file wherever `--config` stands; with several files, the last one wins.
    `--print_config` prints and exits.

    Args:
        parser: made by `make_parser`; may have options besides the config's.
        argv: the command line without the program. None takes this process's.

    Raises:
        UserError: unknown key, wrong type, impossible layout, unreadable file.
    """
    parsed = parse_all(parser.parse_args(argv))
    return parsed.config, parsed.options


def parse_all(
    words: argparse.Namespace,
    *,
    check: Callable[[Parsed], None] = lambda parsed: None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Parsed:
    """Makes the config of a command line.

    Args:
        words: the options, as a parser of `make_parser` reads them.
        check: raises UserError for options the command rejects, before anything is printed.
        defaults: the command's own, by `section.field`, for fields that nothing sets. They do not
            count as given.
    """
    options = dict(vars(words))
    fields = {name: options.pop(name) for name in field_types().keys() & options.keys()}
    printing = options.pop(PRINT.removeprefix("--"))
    named = {dest: path for dest in (FROM, SIZES) if (path := options.pop(dest)) is not None}
    given, sources = _of_files(options.pop(CONFIG.removeprefix("--")))
    sources |= {dest: str(path) for dest, path in named.items()}
    _override(given, named_in_options(named) | fields)
    config = from_dict(nested({**defaults, **given}))
    source, sizes = sources.get(FROM), sources.get(SIZES)
    if source and config.checkpoint.start == source:
        check_sizes(config.model, source)
    parsed = Parsed(config, options, frozenset(given), source, sizes)
    check(parsed)
    if printing:
        print(as_yaml(config), end="")
        raise SystemExit(0)
    return parsed


def _of_files(names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of config files, later files winning, and the directories they name."""
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in names:
        path = find_config(name)
        fields = read_file(path, KEYS)
        sources |= named_in_file(path, fields, _model_of)
        _override(given, _typed(fields))
    return given, sources


def _override(given: dict[str, Any], fields: Mapping[str, Any]) -> None:
    """Sets fields; a section set to null drops its fields, and a field drops a null section."""
    for name, value in fields.items():
        section = name.rpartition(".")[0]
        given.pop(section, None)
        if name in sections():
            for other in [each for each in given if each.startswith(f"{name}.")]:
                del given[other]
        given[name] = value


def _typed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file, with their types checked; nulls are checked later."""
    return {
        name: value if value is None else typed(name, value, field_types()[name])
        for name, value in fields.items()
    }


def _model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """The model that a file's fields describe."""
    own = {name: value for name, value in _typed(fields).items() if name.startswith("model.")}
    model: dict[str, Any] = nested(own)["model"]
    return ModelConfig(**model)


@checked("jaxptd.load_config")
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file or a packaged config, with overrides as on a command line.

    >>> load_config("quickstart", ["--layout.dp=1", "--train.steps=50"]).layout
    Layout(tp=2, sequence_parallel=True)

    Warns if a config takes only its model's sizes from a directory (`model.from`) and would
    silently train random weights or drop the tokenizer: `jaxptd train` refuses such a config.

    Raises:
        UserError: as `parse`.
    """
    _check_overrides(overrides)
    parsed = parse_all(_parser_of_fields().parse_args([f"{CONFIG}={path}", *overrides]))
    if parsed.sizes:
        try:
            check_chosen(parsed.config, parsed.sizes, tokenizer="data.tokenizer" in parsed.given)
        except UserError as error:
            warnings.warn(str(error), stacklevel=3)  # `checked` adds a frame
    return parsed.config


@functools.cache
def _parser_of_fields() -> ConfigParser:
    """Makes a parser without other options, once."""
    return make_parser("jaxptd", "a run")


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError unless these are options of fields: no `--help`, no `--config`."""
    for option in overrides:
        name = option.removeprefix("--").partition("=")[0]
        is_field = name.partition(".")[0] in section_names()
        if option.startswith("-") and not is_field and name not in KEYS:
            raise UserError(f"unknown key {quoted(name)}; {nearest_key(name)}")
