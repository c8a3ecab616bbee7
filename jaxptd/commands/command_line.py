"""Reads a config from YAML (`--config F`) and overrides (`--model.num_layers 4`).

jsonargparse does the parsing. An unknown key, a wrong type or an impossible layout raises
`UserError`: one line with the field and the remedy.
"""

import argparse
import functools
import itertools
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonargparse

from jaxptd.commands.help import add_help
from jaxptd.commands.sources import (
    FROM,
    KEYS,
    SIZES,
    add_sources,
    as_option,
    check_chosen,
    check_sizes,
    file_written_out,
    written_out,
)
from jaxptd.config import Config, ModelConfig, from_dict
from jaxptd.config.files import check_value, find_config
from jaxptd.config.written import (
    as_yaml,
    check_file,
    describe_type,
    field_types,
    nearest_key,
    section_names,
)
from jaxptd.errors import QUOTED, Parser, UserError, quoted
from jaxptd.fields import checked

PRINT = "--print_config"


def make_parser(
    prog: str, description: str, *, usual: Sequence[str] = (), examples: Sequence[str] = ()
) -> jsonargparse.ArgumentParser:
    """Makes a parser with `--config F` and an option per field, which raises instead of exiting.

    usual, examples: what `--help` shows, see `add_help`.
    """
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
        add_help=False,
        print_config=None,  # it would print what it has read so far
    )
    add_help(parser, usual=usual, examples=examples)
    help_text = "YAML file, or the name of a packaged config; options override it"
    parser.add_argument("--config", action=_ConfigFile, metavar="F", help=help_text)
    add_sources(parser)
    help_text = "print the resulting config, and exit"
    parser.add_argument(PRINT, action="store_true", help=help_text)
    parser.add_class_arguments(Config, None, fail_untyped=True)
    for action in parser._actions:
        if action.dest in section_names():  # `--model FILE`, which --config makes superfluous
            action.help = argparse.SUPPRESS
    return parser


class _ConfigFile(jsonargparse.ActionConfigFile):
    """jsonargparse's option for a config file, which also takes the name of a packaged config."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        text = file_written_out(find_config(values), _model_of)
        super().__call__(parser, namespace, text, option_string)


def _model_of(fields: Mapping[str, Any]) -> ModelConfig:
    """The model of the fields of a file."""
    options = [as_option(f"model.{name}", value) for name, value in fields.items()]
    return parse(_parser_of_fields(), options)[0].model


class Parsed(typing.NamedTuple):
    """A command line that was read.

    Args:
        config: of it.
        options: values of the parser's other options.
        given: `section.field` of each field that the command line, or its config file, sets.
        source: the directory that `from` names, if any.
        sizes: the directory that `model.from` names, if any.
    """

    config: Config
    options: dict[str, Any]
    given: frozenset[str]
    source: str | None
    sizes: str | None


def parse(
    parser: jsonargparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[Config, dict[str, Any]]:
    """Reads the config of a command line. Returns it with the values of the parser's other options.

    Fields override the file, wherever `--config` stands. `--print_config` prints and exits.

    Args:
        parser: made by `make_parser`; may have options besides the config's.
        argv: the command line without the program; None is that of this process.

    Raises:
        UserError: unknown key, wrong type, impossible layout, unreadable file.
    """
    parsed = parse_all(parser, argv)
    return parsed.config, parsed.options


def parse_all(
    parser: jsonargparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    check: Callable[[Parsed], None] = lambda parsed: None,
) -> Parsed:
    """Reads a command line as `parse` does, with what else is known of it.

    check: raises UserError for what a command does not take, before anything is printed.
    """
    argv = _file_first(written_out(sys.argv[1:] if argv is None else argv))
    _check_options(argv)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jsonargparse's own deprecations
            values = parser.parse_args(argv, defaults=False)  # Config has them, much faster
    except argparse.ArgumentError as error:
        raise UserError(_rephrase(str(error), parser._option_string_actions)) from error
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{quoted(str(error), 4 * QUOTED)}; see --help") from error
    tree = _other_defaults(parser) | values.as_dict()
    sections = {name: tree.pop(name) for name in section_names() if name in tree}
    tree.pop("config", None)
    printing, source, sizes = (tree.pop(name) for name in (PRINT.removeprefix("--"), FROM, SIZES))
    config = from_dict(sections)
    if source and config.checkpoint.start == source:
        check_sizes(config.model, source)
    given = frozenset(f"{name}.{key}" for name, fields in sections.items() for key in fields)
    parsed = Parsed(config, tree, given, source, sizes)
    check(parsed)
    if printing:
        print(as_yaml(config), end="")
        raise SystemExit(0)
    return parsed


def _other_defaults(parser: jsonargparse.ArgumentParser) -> dict[str, Any]:
    """The defaults of options that are no fields of a config, which has its own."""
    sections = section_names()
    return {
        each.dest: each.default
        for each in parser._actions
        if each.dest.partition(".")[0] not in sections and each.default != argparse.SUPPRESS
    }


def _file_first(argv: Sequence[str]) -> list[str]:
    """The command line with `--config F` before the fields; of several files the last wins."""
    parser = Parser(add_help=False)
    parser.add_argument("--config", action="append", default=[])
    files, others = parser.parse_known_args(argv)
    return [*(f"--config={name}" for name in files.config), *others]


@checked("jaxptd.load_config")
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file, or a packaged config by its name, with overrides as on a command line.

    >>> load_config("quickstart", ["--layout.dp=1", "--train.steps=50"]).layout
    Layout(tp=2, sequence_parallel=True)

    A config that takes only its model's sizes from a directory (`model.from`) warns if its weights
    would be drawn, or its tokenizer left out, unasked: `jaxptd train` refuses it.

    Raises:
        UserError: as `parse`.
    """
    _check_overrides(overrides)
    parsed = parse_all(_parser_of_fields(), [f"--config={path}", *overrides])
    if parsed.sizes:
        try:
            check_chosen(parsed.config, parsed.sizes, tokenizer="data.tokenizer" in parsed.given)
        except UserError as error:
            warnings.warn(str(error), stacklevel=3)  # `checked` is a frame of its own
    return parsed.config


@functools.cache
def _parser_of_fields() -> jsonargparse.ArgumentParser:
    """Makes a parser without other options, once: it takes as long as parsing does."""
    return make_parser("jaxptd", "a run")


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError unless these are options of fields: no `--help`, no `--config`."""
    for option in overrides:
        name = option.removeprefix("--").partition("=")[0]
        is_field = name.partition(".")[0] in section_names()
        if option.startswith("-") and not is_field and name not in KEYS:
            raise UserError(f"unknown key {quoted(name)}; {nearest_key(name)}")


def _check_options(argv: Sequence[str]) -> None:
    """Raises UserError for an option that names a section, or for YAML that is wrong.

    The YAML is that of the `--config` file and of values with brackets, anchors, aliases or tags.
    """
    for option, following in itertools.zip_longest(argv, argv[1:]):
        if option.startswith("--config="):
            check_file(find_config(option.removeprefix("--config=")), KEYS)
            continue
        name, _, value = option.removeprefix("--").partition("=")
        if name in section_names() and option.startswith("--"):
            raise UserError(f"--{name} is a section; give its fields, as --{name}.name value")
        check_value(name, value or following or "", field_types().get(name.rstrip("+"), Any))


def _rephrase(message: str, options: Iterable[str]) -> str:
    """Turns a message of jsonargparse into one line that names the field and the remedy."""
    text = " ".join(message.split())
    if text.lower().endswith("unrecognized arguments:"):
        return "one of the arguments is empty; remove it, or give it a name, see --help"
    if match := re.search(r"Group '(\S+)' does not accept option '(\S+)'", text):
        key = f"{match[1]}.{match[2]}"
        return f"unknown key {quoted(key)}; {nearest_key(key)}"
    if match := re.search(
        r"(?:[Uu]nrecognized arguments: (?:--)?|Option ')([^\s'=]+)(?:' is not accepted)?", text
    ):
        return f"unknown key {quoted(match[1])}; {nearest_key(match[1], options)}"
    match = re.search(r'Parser key "([\w.]+)".*(?:Got|Given) value: ?(.*)', text)
    if match and match[1] in field_types():
        expected = describe_type(field_types()[match[1]])
        return f"{match[1]}: expected {expected}, got {quoted(match[2] or 'nothing')}"
    if match := re.search(
        r'Parser key "(\w+)": Expected an? <class .(\w+).>. Got value: ?(.*)', text
    ):
        return f"--{match[1]}: expected {match[2]}, got {quoted(match[3] or 'nothing')}"
    return f"{quoted(text, 4 * QUOTED)}; see --help"
