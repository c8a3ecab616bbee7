"""Options override files in any order, also those of `load_config`; `--print_config`."""

import itertools

import pytest
import yaml

from jaxptd.commands.command_line import load_config, make_parser, parse
from jaxptd.config import Config, from_dict, to_dict
from jaxptd.errors import UserError

FIELDS = {f"{section}.{name}" for section, each in to_dict(Config()).items() for name in each}


def read(*argv: str) -> Config:
    return parse(make_parser("prog", "what it does"), argv)[0]


def test_print_config_is_a_config_file_with_every_field(capsys, write):
    with pytest.raises(SystemExit) as stop:
        read("--train.steps", "3", "--print_config")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    shown = yaml.safe_load(out)
    assert {f"{s}.{name}" for s, fields in shown.items() for name in fields} == FIELDS
    assert load_config(write(out)) == from_dict({"train": {"steps": 3}})


@pytest.mark.parametrize("words", list(itertools.permutations(range(3))))
def test_the_order_of_options_does_not_matter(capsys, write, words):
    options = [
        ["--train.steps", "3"],
        ["--config", write("{layout: {dp: 2}, train: {steps: 5}}")],
        ["--print_config"],
    ]
    with pytest.raises(SystemExit):
        read(*(word for i in words for word in options[i]))
    found = load_config(write(capsys.readouterr().out))
    assert (found.train.steps, found.layout.dp) == (3, 2)


def test_the_options_of_a_command_are_not_printed(capsys, write):
    parser = make_parser("prog", "what it does")
    parser.add_argument("--json", action="store_true")
    with pytest.raises(SystemExit):
        parse(parser, ["--json", "--print_config"])
    assert load_config(write(capsys.readouterr().out)) == from_dict({})


def test_an_impossible_config_is_not_printed(capsys):
    with pytest.raises(UserError, match="use a multiple of 3"):
        read("--layout.dp", "3", "--print_config")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("overrides", ["--layout.dp=2", {"layout.dp": 2}, None, 3])
def test_overrides_are_a_list_of_options(overrides):
    with pytest.raises(
        UserError, match="jaxptd.load_config: overrides is .*; expected a list, each of them a text"
    ):
        load_config("test-tiny", overrides)


@pytest.mark.parametrize("option", ["--help", "--help-all", "--print_config", "--config=x", "-h"])
def test_overrides_are_fields(option):
    with pytest.raises(UserError, match="unknown key"):
        load_config("test-tiny", [option])
