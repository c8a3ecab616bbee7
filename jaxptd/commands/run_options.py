"""Options of a command that takes a config: `--config F`, `--run-dir D`, fields, its own."""

import argparse
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxptd.commands.command_line import (
    ConfigParser,
    Parsed,
    load_config,
    make_parser,
    parse_all,
)
from jaxptd.commands.sources import FROM, check_chosen, check_weights
from jaxptd.common_options import place_option
from jaxptd.config import Config
from jaxptd.config.written import RUN_CONFIG
from jaxptd.errors import UserError
from jaxptd.stores import Place, StorePath, on_disk, size_of

MODEL = tuple(f"--model.{name}" for name in ("num_layers", "hidden_size", "seq_length", "dtype"))
LAYOUT = tuple(f"--layout.{name}" for name in ("dp", "tp", "sequence_parallel", "pp", "cp", "zero"))
BATCH = ("--train.global_batch_size", "--train.micro_batches", "--train.platform")
RUN_DIR = "train.run_dir"
USUAL = (*MODEL, *LAYOUT, *BATCH)


def run_parser(
    name: str, description: str, *, examples: Sequence[str], usual: Sequence[str] = USUAL
) -> ConfigParser:
    """Makes the parser of a command that takes a config.

    Args:
        name: of the command, as in `jaxptd NAME`.
        description: what the command does.
        examples: options of the example command lines at the end of `--help`.
        usual: fields of the config that `--help` shows.
    """
    lines = [f"jaxptd {name} {example}" for example in examples]
    parser = make_parser(f"jaxptd {name}", description, usual=usual, examples=lines)
    help_text = "directory or URL of a run, whose config is used"
    parser.add_argument(
        "--run-dir", type=place_option, action="append", metavar="D", help=help_text
    )
    return parser


def read_run(
    parser: ConfigParser, argv: Sequence[str] | None, *, new: bool = False
) -> tuple[Config, dict[str, Any]]:
    """Reads a command line as `parse` does; `--run-dir` names a run, and so its config.

    Args:
        parser: made by `run_parser`.
        argv: the command line without the program. None takes this process's.
        new: the command trains. The run in `--run-dir` need not exist yet if `--config` or
            `--from` is given, and a model whose sizes alone are taken needs an explicit choice
            of weights.

    Raises:
        UserError: as `parse`, or there is no such run.
    """
    parsed = read_all(parser, argv, new=new)
    return parsed.config, parsed.options


def read_all(
    parser: ConfigParser,
    argv: Sequence[str] | None,
    *,
    new: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Parsed:
    """Reads a command line as `read_run` does; the result also says which fields were given.

    `defaults` are the command's own, by `section.field`, for fields that nothing sets.
    """
    check = _check_chosen if new else lambda parsed: None
    words = parser.parse_args(argv)
    _name_config(words, words.__dict__.pop("run_dir"), new=new)
    return parse_all(words, check=check, defaults=defaults)


def _check_chosen(parsed: Parsed) -> None:
    """Raises UserError for random weights or the byte tokenizer that nobody asked for.

    Also for a directory whose weights are to be trained, and which has none.
    """
    if parsed.source and parsed.config.checkpoint.start == parsed.source:
        check_weights(parsed.source)
    if parsed.sizes:
        check_chosen(parsed.config, parsed.sizes, tokenizer="data.tokenizer" in parsed.given)


def _name_config(words: argparse.Namespace, run_dirs: Sequence[Place] | None, *, new: bool) -> None:
    """Replaces `--run-dir D` by `--config D/config.yaml --train.run_dir D` in a command line."""
    if not run_dirs:
        return
    run_dir, config = run_dirs[0], run_dirs[0] / RUN_CONFIG
    if len(run_dirs) > 1 or RUN_DIR in words:
        raise UserError("--run-dir is given twice; give it once")
    setattr(words, RUN_DIR, str(run_dir))
    model = getattr(words, FROM)
    if (words.config or model) and new:
        return
    if model:
        raise UserError("--from and --run-dir both name a model; give one of them")
    if words.config:
        raise UserError("--config and --run-dir both name a config; give one of them")
    if not _exists(config):
        raise UserError(
            f"--run-dir {run_dir} holds no run: {config} does not exist; name the directory of a "
            f"run, or {'add --config or --from to train there' if new else 'give --config instead'}"
        )
    # Not in place: the list is the parser's default.
    words.config = [*words.config, str(on_disk(config))]


def _exists(config: Place) -> bool:
    return size_of(config) is not None if isinstance(config, StorePath) else os.path.exists(config)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds `--config F` and `--run-dir D` to a parser whose command needs no config."""
    parser.add_argument("--config", metavar="F", help="a config, which fills in options left out")
    parser.add_argument(
        "--run-dir",
        type=place_option,
        metavar="D",
        help="a run, whose config fills in options left out",
    )


def named_config(args: argparse.Namespace) -> Config | None:
    """The config that `--config` or `--run-dir` names; None if neither is given.

    Raises:
        UserError: both are given, or there is no such config.
    """
    if args.config and args.run_dir:
        raise UserError("--config and --run-dir both name a config; give one of them")
    name = on_disk(args.run_dir / RUN_CONFIG) if args.run_dir else args.config
    return load_config(name) if name else None
