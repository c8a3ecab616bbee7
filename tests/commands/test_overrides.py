"""Options override files in any order, also in `load_config`; tests `--print_config`."""

import itertools

import pytest
import yaml

from jaxptd.commands.command_line import load_config, make_parser, parse
from jaxptd.config import Config, Rope, from_dict, to_dict
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


def test_fields_of_a_sections_section_override_each_other_one_by_one(tmp_path):
    texts = {
        "a": "{family: llama, rope: {theta: 5.0, scaling: linear, factor: 2.0}}",
        "b": "{rope: {factor: 4.0}}",
        "c": "{rope: null}",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"model: {text}")
    a, b, c = (f"--config={tmp_path / name}" for name in texts)
    assert read(a).model.rope == Rope(5.0, "linear", 2.0)
    assert read(a, b).model.rope == Rope(5.0, "linear", 4.0)
    assert read(a, b, c).model.rope == Rope()  # the family's default
    assert read(a, c, b, "--model.rope.scaling=linear").model.rope == Rope(1e4, "linear", 4.0)
    options = ["--model.rope.scaling=null", "--model.rope.factor=null"]
    assert read(a, *options).model.rope == Rope(5.0)
    assert read(a, *options, "--model.rope.theta=null").model.rope == Rope()
    with pytest.raises(UserError, match="--model.rope is a section; give its fields, as --model.r"):
        read(a, "--model.rope", "null")


@pytest.mark.parametrize(
    "family", ["llama --model.rope.theta=5e5", "t5", "swin-unet --model.images.depths=[2,2,2]"]
)
def test_the_sections_of_a_family_are_printed_and_read_back(capsys, write, family):
    options = [f"--model.family={family}".split(" ")[0], *family.split(" ")[1:]]
    with pytest.raises(SystemExit):
        read(*options, "--print_config")
    assert load_config(write(capsys.readouterr().out)) == read(*options)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--model.images.size=16", "model.images.size=16 has no effect with the family gpt; leave"),
        ("--model.rope.theta=x", "model.rope.theta: expected float or null, got x"),
        ("--model.rope.thet=2", "unknown key model.rope.thet; did you mean model.rope.theta?"),
        ("--model.rope_theta=2", "unknown key model.rope_theta; did you mean model.rope.theta?"),
        ("--model.image_size=2", "unknown key model.image_size; did you mean model.images.size?"),
        ("--model.num_layer=2", "unknown key model.num_layer; did you mean model.num_layers?"),
    ],
)
def test_a_section_that_is_not_there_or_misspelt(option, line):
    with pytest.raises(UserError) as error:
        read(option)
    assert str(error.value).startswith(line)


def test_an_impossible_config_is_not_printed(capsys):
    with pytest.raises(UserError, match="use a multiple of 3"):
        read("--layout.dp", "3", "--print_config")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("overrides", ["--layout.dp=2", {"layout.dp": 2}, None, 3])
def test_overrides_are_a_list_of_options(overrides):
    with pytest.raises(
        UserError, match="jaxptd.load_config: overrides is .*; expected a list, each item a text"
    ):
        load_config("test-tiny", overrides)


@pytest.mark.parametrize("option", ["--help", "--help-all", "--print_config", "--config=x", "-h"])
def test_overrides_are_fields(option):
    with pytest.raises(UserError, match="unknown key"):
        load_config("test-tiny", [option])
