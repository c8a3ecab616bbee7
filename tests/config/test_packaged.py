"""Configs found by name: packaged ones, files of the current directory before them."""

import dataclasses
import math
from pathlib import Path

import pytest

import jaxptd
from jaxptd import Layout, Program, make_mesh
from jaxptd.config import packaged
from jaxptd.config.command_line import load_config, make_parser, parse
from jaxptd.config.packaged import find_config, packaged_configs
from jaxptd.errors import UserError

CONFIGS = Path(jaxptd.__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkout_has_the_configs_at_its_top():
    assert packaged_configs() == {path.stem: path for path in CONFIGS.glob("*.yaml")}
    assert {"quickstart", "gpt-1.3b-131k"} < set(packaged_configs())


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_packaged_config_is_found_by_name_and_valid(name):
    path = str(CONFIGS / f"{name}.yaml")
    assert find_config(name) == find_config(f"{name}.yaml") == path
    assert load_config(name) == load_config(path)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
    ],
)
def test_a_published_model_has_as_many_parameters_as_published(name, parameters):
    config = dataclasses.replace(load_config(name, ["--model.attention=auto"]), layout=Layout())
    infos = Program(config, make_mesh(Layout())).infos
    assert sum(math.prod(info.shape) for info in infos.values()) == parameters


def test_a_name_as_an_option(elsewhere):
    parser = make_parser("prog", "what it does")
    for argv in (["--config", "quickstart"], ["--config=quickstart"]):
        config, _ = parse(parser, [*argv, "--train.steps", "3"])
        assert config == load_config(CONFIGS / "quickstart.yaml", ["--train.steps=3"])


def test_a_file_of_the_current_directory_comes_first(elsewhere):
    (elsewhere / "quickstart").write_text("train: {steps: 5}")
    (elsewhere / "quickstart.yaml").write_text("train: {steps: 6}")
    assert load_config("quickstart").train.steps == 5
    assert load_config("quickstart.yaml").train.steps == 6


def test_a_folder_of_the_same_name_is_no_config(elsewhere):
    (elsewhere / "quickstart").mkdir()
    assert find_config("quickstart") == str(CONFIGS / "quickstart.yaml")


@pytest.mark.parametrize("name", ["quikstart", "quickstart.yml"])
def test_an_unknown_name_lists_the_packaged_configs(name):
    with pytest.raises(UserError) as caught:
        load_config(name)
    message = str(caught.value)
    assert message.startswith(f"{name}: no such file, and no packaged config of that name;")
    assert message.endswith(f"one of {', '.join(sorted(packaged_configs()))}")


@pytest.mark.parametrize("path", ["no/quickstart", "configs/quickstart", "no/such.yaml"])
def test_a_path_is_no_name(path):
    with pytest.raises(UserError, match=rf"^{path}: No such file"):
        load_config(path)


def test_an_installed_package_has_its_own_folder(elsewhere, monkeypatch):
    configs = elsewhere / "jaxptd" / "configs"
    configs.mkdir(parents=True)
    (configs / "mine.yaml").write_text("train: {steps: 7}")
    monkeypatch.setattr(packaged, "__file__", str(configs.parent / "config" / "packaged.py"))
    assert packaged_configs() == {"mine": configs / "mine.yaml"}
    assert load_config("mine").train.steps == 7
