"""YAML is read as plain values only; tests/front_door has the table of bad files."""

import pytest

from jaxptd.commands.command_line import load_config, make_parser, parse
from jaxptd.config import files
from jaxptd.config.files import find_config, read_yaml
from jaxptd.errors import UserError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        ("model: {num_layers: &n 3}\ntrain: {steps: *n}", "steps", 3),
        ("train: {run_dir: !!str 3}", "run_dir", "3"),
        ("train: {run_dir: 2024-01-01}", "run_dir", "2024-01-01"),
        ("train: {run_dir: 2024-13-45}", "run_dir", "2024-13-45"),
        ("train: {run_dir: '!!int'}", "run_dir", "!!int"),
        ("train: {run_dir: '[x, y]'}", "run_dir", "[x, y]"),
        ("train: {run_dir: '\"x\"'}", "run_dir", '"x"'),
        ("\ufefftrain: {run_dir: größe}", "run_dir", "größe"),
        ("train:\n  run_dir: &a |\n    x", "run_dir", "x"),
    ],
)
def test_plain_values_are_read(path, content, field, value) -> None:
    path.write_text(content, encoding="utf-8")
    assert getattr(load_config(path).train, field) == value


def test_the_largest_file_is_read_and_a_larger_one_is_not(path, monkeypatch) -> None:
    content = "train: {steps: 3}"
    path.write_text(content)
    monkeypatch.setattr(files, "LARGEST", len(content))
    assert load_config(path).train.steps == 3
    path.write_text(content + " ")
    monkeypatch.setattr(files, "open", None, raising=False)  # the file is not even opened
    with pytest.raises(UserError, match=r"run.yaml has 18 bytes, but a config at most 17"):
        read_yaml(str(path))


def test_as_many_values_as_are_allowed(path, monkeypatch) -> None:
    path.write_text("data: {source: [a, b]}")  # seven values, counting sections and keys
    monkeypatch.setattr(files, "MOST_VALUES", 7)
    assert load_config(path).data.source == ["a", "b"]
    monkeypatch.setattr(files, "MOST_VALUES", 6)
    with pytest.raises(UserError, match="more than 6 values"):
        load_config(path)


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("train: {steps: 3, run_dir: ~/runs/x}")
    config, _ = parse(make_parser("prog", "what it does"), ["--config", "~/run.yaml"])
    assert (config.train.steps, config.train.run_dir) == (3, f"{tmp_path}/runs/x")
    assert find_config("~/run.yaml") == f"{tmp_path}/run.yaml"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("train.seed", "1_000", 1000),
        ("train.seed", "0x10", 16),
        ("train.seed", "0b11", 3),
        ("train.seed", "0", 0),
        ("train.seed", "+5", 5),
        ("optimizer.learning_rate", "1e-3", 0.001),
        ("optimizer.learning_rate", "00.5", 0.5),
        ("data.augment", "yes", True),
        ("data.augment", "off", False),
    ],
)
def test_words_that_mean_here_what_they_mean_to_most_people(path, name, written, value) -> None:
    section, _, field = name.partition(".")
    path.write_text(f"{section}: {{{field}: {written}}}")
    for config in (load_config(path), load_config("quickstart", [f"--{name}={written}"])):
        assert getattr(getattr(config, section), field) == value


def test_a_texts_words_are_texts_in_an_option(path) -> None:
    for text in ("0123", "1:30", "yes", "2024", "1e3"):
        assert load_config("quickstart", [f"--train.run_dir={text}"]).train.run_dir == text
        path.write_text(f"train: {{run_dir: '{text}'}}")
        assert load_config(path).train.run_dir == text
