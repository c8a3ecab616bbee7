"""Messages that refuse a long value are short: they cut off what the user typed."""

import contextlib
import dataclasses
import sys

import pytest

from jaxptd.__main__ import main
from jaxptd.commands.table import COMMANDS
from jaxptd.config import Config
from jaxptd.errors import UserError

LONGEST = 500
PATH = "/".join(["a" * 200] * 15)
VALUES = (PATH, "a" * 3000, int("1" * 3000), [1] * 1000, ["a1"] * 1000, {"a" * 3000: 0})
# Options that precede the one under test.
BEFORE = {
    "mesh": "--world-size 8",
    "pipeline": "--stages 4 --micro-batches 8",
    "plan": "--config quickstart --gpus 8 --gpu h100",
    "data": "--source text.txt --out new.bin",
    "generate": "--run-dir nowhere",
    "convert": "--check nowhere",
    "completion": "bash",
    "launch": "-n 1",
    "doctor": "--config quickstart --wait 0",
}


def lengths_of(*runs) -> list[int]:
    """Lengths of the messages of refused runs."""
    found = []
    for run in runs:
        with contextlib.suppress(SystemExit):
            try:
                run()
            except UserError as error:
                found.append(len(str(error)))
    return found


@pytest.mark.parametrize("section", dataclasses.fields(Config), ids=lambda field: field.name)
def test_a_fields_value_is_cut(section) -> None:
    kind = section.type
    runs = [
        lambda name=field.name, value=value: kind(**{name: value})
        for field in dataclasses.fields(kind)
        for value in VALUES
    ]
    lengths = lengths_of(*runs)
    assert len(lengths) >= len(runs) / 2
    assert max(lengths) <= LONGEST


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_an_options_value_is_cut(command, folder, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("jax.devices", lambda *_: sys.exit("no device is needed"))
    sections = {field.name for field in dataclasses.fields(Config)}
    options = [
        action.option_strings[0]
        for action in command.load().parser()._actions
        if action.option_strings and action.nargs != 0 and action.dest.split(".")[0] not in sections
    ]
    if command.name == "train":
        options += ["--data.source", "--data.tokenizer", "--checkpoint.start", "--layout.schedule"]
    before = [command.name, *BEFORE.get(command.name, "--config quickstart").split()]
    extras = [*([option, PATH] for option in options), [PATH], [f"--{PATH}"], ["x"] * 1000]
    lengths = lengths_of(*(lambda extra=extra: main([*before, *extra]) for extra in extras))
    assert len(lengths) >= 2
    assert max(lengths) <= LONGEST


def test_a_short_path_is_shown_whole_and_both_ends_of_a_long_one() -> None:
    assert str(UserError(f"{'a' * 199}: no")) == f"{'a' * 199}: no"
    assert str(UserError(f"x {'a' * 100}{'b' * 101} no")) == f"x {'a' * 40}...{'b' * 40} no"
