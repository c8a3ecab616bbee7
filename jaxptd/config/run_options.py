"""The options of a command that takes a config: `--config F`, `--run-dir D`, fields, its own."""

import importlib
import json
import os
from collections.abc import Sequence
from typing import Any

import jsonargparse

from jaxptd.commands.words import path_option
from jaxptd.config import Config
from jaxptd.config.command_line import make_parser, parse
from jaxptd.errors import Parser, UserError

MODEL = tuple(f"--model.{name}" for name in ("num_layers", "hidden_size", "seq_length", "dtype"))
LAYOUT = tuple(f"--layout.{name}" for name in ("dp", "tp", "sequence_parallel", "pp", "cp", "zero"))
BATCH = ("--train.global_batch_size", "--train.micro_batches", "--train.platform")
USUAL = (*MODEL, *LAYOUT, *BATCH)
RUN_CONFIG = "config.yaml"  # in a run's directory, see `jaxptd.run.folder`


def run_parser(
    name: str, description: str, *, examples: Sequence[str], usual: Sequence[str] = USUAL
) -> jsonargparse.ArgumentParser:
    """Makes the parser of a command that takes a config; this takes as long as parsing does.

    Args:
        name: of the command, as in `jaxptd NAME`.
        description: what it does.
        examples: options of command lines that `--help` ends with.
        usual: fields of the config that `--help` shows.
    """
    lines = [f"jaxptd {name} {example}" for example in examples]
    parser = make_parser(f"jaxptd {name}", description, usual=usual, examples=lines)
    help_text = "directory of a run, which has its config"
    parser.add_argument("--run-dir", metavar="D", help=help_text)
    help_text = "Hugging Face directory whose config.json has the model's sizes"
    parser.add_argument("--model.from", dest="model_from", metavar="D", help=help_text)
    return parser


def read_run(
    parser: jsonargparse.ArgumentParser, argv: Sequence[str] | None, *, new: bool = False
) -> tuple[Config, dict[str, Any]]:
    """Reads a command line as `parse` does; `--run-dir` names a run, and so its config.

    Args:
        parser: made by `run_parser`.
        argv: the command line without the program; None is that of this process.
        new: with `--config`, the run in `--run-dir` need not exist yet.

    Raises:
        UserError: as `parse`, or there is no such run.
    """
    return parse(parser, _with_sizes(_expanded(argv, new=new)))


def _with_sizes(argv: Sequence[str]) -> list[str]:
    """The command line with `--model.from DIR` written as the sizes of a Hugging Face directory.

    They override a config file, and other options override them.
    """
    words = Parser(add_help=False)
    words.add_argument("--model.from", dest="source", type=path_option, action="append", default=[])
    given, others = words.parse_known_args(argv)
    # Found by its name: it is above the config, which it makes.
    found = [importlib.import_module("jaxptd.hf.load").sizes(path) for path in given.source[-1:]]
    fields = ((name, json.dumps(value)) for each in found for name, value in each.items())
    return [*(f"--model.{name}={value.strip(chr(34))}" for name, value in fields), *others]


def _expanded(argv: Sequence[str] | None, *, new: bool) -> list[str]:
    """The command line with `--run-dir D` written as `--config D/config.yaml --train.run_dir D`."""
    words = Parser(add_help=False)
    words.add_argument("--run-dir", type=path_option, action="append", default=[])
    given, others = words.parse_known_args(argv)
    if not given.run_dir:
        return others
    run_dir, names = given.run_dir[0], {other.partition("=")[0] for other in others}
    if len(given.run_dir) > 1 or "--train.run_dir" in names:
        raise UserError("--run-dir: the directory of the run is given twice; give it once")
    directory = f"--train.run_dir={run_dir}"
    if "--config" in names and new:
        return [*others, directory]
    if "--config" in names:
        raise UserError("--config and --run-dir both name a config; give one of them")
    config = run_dir / RUN_CONFIG
    if not os.path.exists(config):
        raise UserError(
            f"--run-dir {run_dir} holds no run: there is no {config}; name the directory of a run, "
            f"or {'add --config to train there' if new else 'give --config instead'}"
        )
    return [f"--config={config}", *others, directory]
