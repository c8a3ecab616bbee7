"""Reads a config from YAML and options; errors are one line with the field and the remedy."""

import dataclasses
import re
import subprocess
import sys

import pytest
import yaml

from jaxptd.commands.command_line import load_config, make_parser, parse
from jaxptd.config import Config, flat, from_dict, to_dict
from jaxptd.config.written import field_types
from jaxptd.errors import UserError, run_command

FIELDS = {name: flat(Config()).get(name) for name in field_types()}


def read(*argv: str) -> Config:
    return parse(make_parser("prog", "what it does"), argv)[0]


def complaint(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        read(*argv)
    return " ".join(str(caught.value).split())


# --- Valid input


def test_nothing_given_is_the_defaults():
    assert read() == Config()


def test_options_override_the_file_and_the_file_the_defaults(write):
    path = write("model: {num_layers: 2, dropout: 0.1}\ntrain: {steps: 7}\n")
    config = read("--config", path, "--model.num_layers", "3", "--layout.tp=2")
    changes = {
        "model": {"num_layers": 3, "dropout": 0.1},
        "train": {"steps": 7},
        "layout": {"tp": 2},
    }
    assert config == from_dict(changes)
    assert load_config(path, ["--model.num_layers", "3", "--layout.tp=2"]) == config


def test_a_later_file_overrides_an_earlier_one(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {steps: 1, seed: 5}")
    (tmp_path / "b.yaml").write_text("train: {steps: 2}")
    config = read("--config", str(tmp_path / "a.yaml"), f"--config={tmp_path / 'b.yaml'}")
    assert (config.train.steps, config.train.seed) == (2, 5)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--optimizer.learning_rate", "1e-3"], "optimizer.learning_rate", 0.001),
        (["--optimizer.learning_rate", "1"], "optimizer.learning_rate", 1.0),
        (["--model.vocab_size", "null"], "model.vocab_size", None),
        (["--model.tie_embeddings", "false"], "model.tie_embeddings", False),
        (["--data.source", "some text.txt"], "data.source", "some text.txt"),
        (["--data.source", "[a.txt, b.txt]"], "data.source", ["a.txt", "b.txt"]),
        (["--data.source", "{b.jsonl: 3, a/*: 0.7}"], "data.source", {"a/*": 0.7, "b.jsonl": 3.0}),
        (["--data.source={stdlib: 1}", "--data.source", "a.txt"], "data.source", "a.txt"),
        (["--train.run_dir", "3"], "train.run_dir", "3"),
        (["--layout.pp=3", "--layout.stage_layers", "[3, 0, 5]"], "layout.stage_layers", (3, 0, 5)),
        (["--layout.stage_layers=null"], "layout.stage_layers", None),
        (["--layout.pp=2", "--layout.virtual_stages=3"], "layout.virtual_stages", 3),
        (["--layout.pp=2", "--layout.schedule", "mine.csv"], "layout.schedule", "mine.csv"),
    ],
)
def test_values(argv, field, value):
    section, _, name = field.partition(".")
    found = getattr(getattr(read(*argv), section), name)
    assert (found, type(found)) == (value, type(value))


def test_a_written_config_reads_back(write):
    config = from_dict({"data": {"source": ["a", "b"]}, "optimizer": {"learning_rate": 1e-5}})
    assert load_config(write(yaml.safe_dump(to_dict(config)))) == config


def test_options_of_the_caller_are_returned_with_the_config():
    parser = make_parser("prog", "what it does")
    parser.add_argument("--json", action="store_true")
    assert parse(parser, ["--json", "--train.steps", "3"]) == (
        from_dict({"train": {"steps": 3}}),
        {"json": True},
    )


def test_numbers_and_truth_values_of_the_caller_are_read_as_those_of_fields():
    parser = make_parser("prog", "what it does")
    parser.add_argument("--tokens", type=float, default=0.5)
    parser.add_argument("--compiled", type=bool, default=True)
    assert parse(parser, ())[1] == {"tokens": 0.5, "compiled": True}
    found = parse(parser, ["--tokens=2e12", "--compiled", "no"])[1]
    assert (found, type(found["tokens"])) == ({"tokens": 2e12, "compiled": False}, float)
    with pytest.raises(UserError, match="^--tokens: expected float, got nan$"):
        parse(parser, ["--tokens", "nan"])


# --- --help-all


def test_help_shows_every_field_with_its_default(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help-all")
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field, default in FIELDS.items():
        entry = rf" --{re.escape(field)}[ ,].*?\(type: [^)]*, default: ([^)]*)\)"
        found = re.search(entry, text.partition(" options: ")[2])
        assert found, field
        assert found[1] == ("null" if default is None else str(default)), field
    assert "Path to a configuration file" not in text  # no option sets a whole section


# --- Errors in options


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--model.num_layer", "model.num_layers"),
        ("--modle.num_layers", "model.num_layers"),
        ("--train.learning_rate", "optimizer.learning_rate"),
        ("--tp", "layout.tp"),
        ("--model.tp", "layout.tp"),
        ("--steps", "train.steps"),
        ("--cnfig", "--config"),
        ("--print_confg", "--print_config"),
    ],
)
@pytest.mark.parametrize("spaced", [True, False])
def test_an_unknown_option_names_the_nearest_field(option, meant, spaced):
    argv = [option, "2"] if spaced else [f"{option}=2"]
    assert complaint(*argv) == f"unknown key {option[2:]}; did you mean {meant}?"


@pytest.mark.parametrize("option", ["--nonsense", "nonsense", "--model.zz"])
def test_an_unknown_option_like_no_field(option):
    assert complaint(option) == f"unknown key {option.lstrip('-')}; see jaxptd train --help-all"


@pytest.mark.parametrize("argv", [["--model", "{num_layers: 3}"], ["--model=other.yaml"]])
def test_a_section_is_no_option(argv):
    assert "--model is a section; give its fields, as --model.name value" in complaint(*argv)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model.num_layers", "x", "int"),
        ("train.steps", "1.5", "int"),
        ("train.steps", "true", "int"),
        ("train.steps", "", "int"),
        ("model.dropout", "high", "float"),
        ("model.vocab_size", "many", "int or null"),
        ("model.tie_embeddings", "maybe", "bool"),
        ("model.dtype", "int8", "one of float32, bfloat16, float16, float64"),
        ("optimizer.decay", "cosin", "one of cosine, linear, wsd, constant"),
        ("layout.virtual_stages", "two", "int or null"),
        ("layout.stage_layers", "3", "tuple[int, ...] or null"),
    ],
)
def test_a_wrong_type_names_the_field_and_what_is_expected(field, value, expected):
    message = complaint(f"--{field}", value)
    assert message.startswith(f"{field}: expected {expected}, got")
    assert message.lower().endswith(value or "nothing")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--model.num_heads", "7"],
            ["model.hidden_size=256", "model.num_heads=7", "(1, 2, 4, 8"],
        ),
        (["--layout.dp", "3"], ["global_batch_size=8", "layout.dp=3", "multiple of 3"]),
        (["--layout.tp", "2", "--layout.row", "2"], ["tp=2", "row=2", "not both"]),
        (["--layout.dp", "0"], ["layout.dp=0", "1 or more"]),
        (["--layout.schedule", "1f2b"], ["layout.schedule=1f2b", "1f1b, gpipe, ", ".csv"]),
        (["--train.steps", "0"], ["train.steps=0", "above 0"]),
        (["--optimizer.learning_rate", "nan"], ["optimizer.learning_rate", "nan"]),
        (["--model.num_layers"], ["--model.num_layers", "one argument"]),
        (["--config"], ["--config", "one argument"]),
    ],
)
def test_impossible_values(argv, words):
    message = complaint(*argv)
    assert all(word in message for word in words), message


# --- Errors in files


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["expected `name: value` lines", "--print_config"]),
        ("# only a comment\n", ["expected `name: value` lines"]),
        ("{}", ["expected `name: value` lines"]),
        ("just words", ["expected `name: value` lines", "str"]),
        ("[1, 2]", ["expected `name: value` lines", "seq"]),
        ("model: 3", ["section model", "expected `name: value` lines", "int"]),
        ("model:", ["section model", "expected `name: value` lines", "null"]),
        ("model: [1", ["not YAML", "line 1"]),
        ("a: 1\n---\nb: 2\n", ["not YAML", "single document"]),
        ("[" * 700, ["not a YAML config"]),
        ("model: {dropout: \x07}", ["not YAML"]),
        (b"\xff\xfe\x00\x01", ["not text"]),
        (
            "model: {num_layer: 2}",
            ["unknown key model.num_layer", "did you mean model.num_layers?"],
        ),
        ("model: {zz: 2}", ["unknown key model.zz", "--help"]),
        ("modle: {num_layers: 2}", ["unknown section modle", "model, layout"]),
        ("num_layers: 2", ["unknown section num_layers"]),
        ("model: {num_layers: 2, num_layers: 3}", ["num_layers appears twice"]),
        ("train: {steps: 1}\ntrain: {steps: 2}", ["train appears twice"]),
    ],
)
def test_a_bad_file_is_named(write, content, words):
    path = write(content)
    message = complaint("--config", path)
    assert message.startswith(path)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: {num_layers: x}", "model.num_layers: expected int, got x"),
        ("train: {steps: 1e3}", "train.steps: expected int, got 1000.0"),
        (
            "optimizer: {learning_rate: .inf}",
            "optimizer.learning_rate=inf must be a number above 0",
        ),
        ("model: {num_heads: 7}", "model.hidden_size=256 does not split over model.num_heads=7"),
    ],
)
def test_a_bad_value_in_a_file_names_its_field(write, content, words):
    assert complaint("--config", write(content)).startswith(words)


def test_a_file_that_cannot_be_read(tmp_path):
    assert complaint("--config", "./nowhere.yaml").startswith("./nowhere.yaml: No such file")
    assert "directory" in complaint("--config", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_one_line_on_stderr_and_exit_code_2(capsys, write):
    argv = ["--config", write("model: [1,\n  2")]
    with pytest.raises(SystemExit) as stop:
        run_command(lambda: read(*argv))
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)


def test_arguments_of_the_process_are_the_default():
    imports = "from jaxptd.commands.command_line import make_parser, parse"
    program = f"{imports}; print(parse(make_parser('p', 'd'), None)[0].train)"
    command = [sys.executable, "-c", program, "--train.steps", "3"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert shown.strip() == repr(dataclasses.replace(Config().train, steps=3))
