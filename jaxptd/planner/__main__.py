"""`jaxptd plan`: the fastest layouts of so many GPUs, and how well they are predicted."""

import functools
import importlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from jaxptd import plot
from jaxptd.atomic_files import explained, write_whole
from jaxptd.commands.words import add_words, as_path, picture_path
from jaxptd.config.command_line import as_yaml
from jaxptd.config.run_options import read_run, run_parser
from jaxptd.display import Table
from jaxptd.errors import UserError, run_command
from jaxptd.planner.calibrate import check_out
from jaxptd.planner.planning import MAX_MEMORY, Plan, plan
from jaxptd.planner.search.pins import PINNED

ACTIONS = {"validate": "jaxptd.planner.validate", "calibrate": "jaxptd.planner.calibrate"}
USUAL = ("--model.num_layers", "--model.hidden_size", "--model.seq_length", "--layout.tp")
HOURS = 24


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts which layouts of a model are fastest on so many GPUs, and what they need.

    `jaxptd plan validate` compares such predictions with published steps, and `jaxptd plan
    calibrate` measures what this machine reaches.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ACTIONS:
        found: int = importlib.import_module(ACTIONS[argv[0]]).main(argv[1:])
        return found
    pins, others = _pins(argv)
    config, options = read_run(parser(), others)
    given = {name: options[name] for name in ("out", "hardware") if options[name]}
    options |= {name: as_path(path, f"--{name}") for name, path in given.items()}
    _check(options)
    picture = picture_path(options["picture"])
    if options["compile"]:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs
    made = plan(
        config,
        gpus=options["gpus"],
        gpu=options["gpu"],
        node=options["node"],
        hardware=options["hardware"],
        pins=pins,
        max_memory=options["max_memory"],
        top=options["top"],
        compile=options["compile"],
        say=lambda line: None if options["quiet"] else print(line, file=sys.stderr, flush=True),
    )
    if options["explain"] is not None and not 1 <= options["explain"] <= len(made.best):
        raise UserError(
            f"--explain {options['explain']}: use 1 to {len(made.best)}, a line's number"
        )
    if options["out"]:
        _write(options["out"], as_yaml(made.best[0].config))
    if picture:
        plot.save(plot.plan(made), picture)
    if options["json"]:
        print(json.dumps(made.as_dict()))
    else:
        print("\n".join(_lines(made, options, _given(others))))
    return 0


def _check(options: dict[str, Any]) -> None:
    """Raises UserError for options that are missing or impossible, before anything is searched."""
    if options["gpus"] is None or options["gpu"] is None:
        raise UserError("--gpus and --gpu: say how many of which, as --gpus 64 --gpu h200")
    for name in ("tokens", "price"):
        if options[name] is not None and options[name] <= 0:
            raise UserError(f"--{name} {options[name]:g}: use a number above 0")
    if options["price"] and not options["tokens"]:
        raise UserError("--price has no effect without --tokens; give that too")
    if options["overwrite"] and not options["out"]:
        raise UserError("--overwrite has no effect without --out; give that too")
    if options["out"]:
        check_out(options["out"], overwrite=options["overwrite"])


@functools.cache
def parser() -> jsonargparse.ArgumentParser:
    """Makes the parser of this command."""
    examples = (
        "--config gpt2-1.5b --gpus 64 --gpu h200",
        "--config llama3-70b --gpus 512 --gpu h100 --layout.tp 8 --explain 1",
        "--config llama3-70b --gpus 512 --gpu h100 --tokens 2e12 --out plan.yaml",
    )
    made = run_parser("plan", main.__doc__ or "", examples=examples, usual=USUAL)
    _add(made, "gpus", int, None, "N", "devices")
    _add(made, "gpu", str, None, "NAME", "accelerator: a100, h100, h200, gb200, v100")
    _add(made, "node", int, 0, "N", "devices of a node; default: as many as NVLink joins")
    help_text = "a YAML file of accelerators, beside the packaged ones"
    made.add_argument("--hardware", metavar="F", help=help_text)
    _add(made, "max_memory", float, MAX_MEMORY, "SHARE", "of a device's memory that a step may use")
    _add(made, "top", int, 5, "N", "layouts to print, each with other sizes of the axes")
    _add(made, "compile", int, 0, "K", "compile the best K layouts, and rank them again")
    _add(made, "explain", int, None, "K", "print every part of the time of the K-th layout")
    _add(made, "tokens", float, None, "N", "print the days that training on so many tokens takes")
    _add(made, "price", float, None, "P", "of a GPU and hour: print the cost of --tokens as well")
    help_text = "write the config of the best layout"
    made.add_argument("--out", metavar="F", help=help_text)
    made.add_argument("--overwrite", action="store_true", help="replace that file if it exists")
    quiet = "print the options of the best layout only"
    add_words(made, json="the layouts", quiet=quiet, picture="time, memory and a roofline")
    return made


def _add(made: Any, name: str, kind: type, default: Any, metavar: str, text: str) -> None:
    option = f"--{name.replace('_', '-')}"
    made.add_argument(option, dest=name, type=kind, default=default, metavar=metavar, help=text)


def _pins(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Fields that are pinned by options, and the options that are left.

    Raises:
        UserError: a value is missing, or no YAML.
    """
    pins, others, words = {}, [], iter(argv)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in PINNED:
            others.append(word)
            continue
        if not equals and (text := next(words, "")) == "":
            raise UserError(f"{word}: expected a value, got nothing; give one")
        try:
            pins[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"{name}: {text!r} is no value; see --help-all") from error
    return pins, others


def _lines(made: Plan, options: dict[str, Any], given: Sequence[str]) -> list[str]:
    """The table of layouts, or of one's time, and the options of the best."""
    chosen = made.best[(options["explain"] or 1) - 1]
    command = " ".join(["jaxptd train", *given, *made.options(chosen)])
    if options["quiet"]:
        return [command]
    lines = [repr(made)]
    if options["explain"]:
        memory = [(name, f"{size / 2**30:.2f}") for name, size in chosen.memory.parts.items()]
        lines += [
            "",
            str((chosen.compiled or chosen).step.table()),
            "",
            str(Table("memory", ("part", "GiB"), memory)),
        ]
    if options["tokens"]:
        lines += ["", _budget(made, options)]
    return [*lines, "", command]


def _write(path: Path, text: str) -> None:
    remedy = "name a file in a folder that exists and can be written"
    write_whole({path: text.encode()}, lambda file: explained(f"cannot write {file}", remedy))


def _given(argv: Sequence[str]) -> list[str]:
    """The options that name the config and override its fields, as a shell reads them."""
    found, words = [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.startswith("--") and (name in ("--config", "--run-dir") or "." in name):
            found.append(shlex.join([word] if equals else [word, next(words, "")]))
    return found


def _budget(made: Plan, options: dict[str, Any]) -> str:
    """Days and cost of so many tokens."""
    days = made.days(made.best[0], options["tokens"])
    hours = days * HOURS * made.gpus
    cost = (
        f", {hours * options['price']:,.0f} at {options['price']:g} each"
        if options["price"]
        else ""
    )
    return f"{options['tokens']:,.0f} tokens: {days:.1f} days, {hours:,.0f} GPU hours{cost}"


if __name__ == "__main__":
    run_command(main)
