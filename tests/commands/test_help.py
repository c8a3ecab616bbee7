"""`--help` fits on one screen; `--help-all` lists every option."""

import pytest

from jaxptd.commands.table import COMMANDS, Command
from jaxptd.config import Config
from jaxptd.config.written import field_types

FIELDS = [f"--{name}" for name in field_types()]


def shown(command: Command, option: str, capsys: pytest.CaptureFixture) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        command.load().main([option])
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_a_screen_with_usage_and_examples(command, option, capsys):
    lines = shown(command, option, capsys)
    assert lines[0].startswith(f"usage: jaxptd {command.name} ")
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 100
    examples = lines[lines.index("examples:") + 1 :]
    assert examples
    assert all(line.startswith(f"  jaxptd {command.name} ") for line in examples)


@pytest.mark.parametrize("name", ["train", "verify", "comms", "memory", "profile"])
def test_help_all_has_every_field_and_every_own_option(name, capsys):
    command = next(each for each in COMMANDS if each.name == name)
    text = " ".join(shown(command, "--help-all", capsys))
    short = " ".join(shown(command, "--help", capsys))
    for option in [*FIELDS, "--config", "--run-dir", "--json", "--quiet", "--help-all"]:
        assert f" {option} " in text.replace(",", " ")  # Python 3.13 writes `--a, --b VALUE`
    assert 10 < sum(f" {field} " in short for field in FIELDS) < 24


@pytest.mark.parametrize("name", ["comms", "memory"])
def test_what_takes_long_is_said(name, capsys):
    command = next(each for each in COMMANDS if each.name == name)
    (line,) = (x for x in shown(command, "--help", capsys) if x.startswith("  --compiled"))
    assert line.split(maxsplit=2)[1:] == [
        "true",
        "also compile the step, which takes most of the time",
    ]


@pytest.mark.parametrize("name", ["train", "verify"])
def test_short_help_shows_defaults(name, capsys):
    command = next(each for each in COMMANDS if each.name == name)
    words = (line.split() for line in shown(command, "--help", capsys))
    rows = {row[0]: row[1] for row in words if len(row) > 1}
    assert rows["--layout.zero"] == "0"
    assert rows["--layout.sequence_parallel"] == "false"
    assert rows["--model.num_layers"] == str(Config().model.num_layers)


def test_the_same_words_are_everywhere(capsys):
    """Commands that print a result take `--json` and `--quiet`; those of a config, `--config`."""
    pictures = {"mesh", "pipeline", "plan", "profile", "memory", "comms"}
    for command in COMMANDS[:-1]:
        text = " ".join(shown(command, "--help", capsys))
        wanted = ["--json", "--quiet", "--config", "--run-dir"]
        if command.name in ("convert", "plan"):  # these need no config
            wanted = wanted[:2]
        if command.name == "launch":  # what it starts has the others
            wanted = ["--quiet"]
        assert [word for word in wanted if f" {word} " not in text] == [], command.name
        assert (" --picture " in text) == (command.name in pictures)
