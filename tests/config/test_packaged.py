"""Configs found by name: files in the current directory come before packaged ones."""

import dataclasses
import math
from pathlib import Path

import pytest
from published import table_1

import jaxptd
from jaxptd import Layout, Program, make_mesh
from jaxptd.commands.command_line import load_config, make_parser, parse
from jaxptd.config import files as packaged
from jaxptd.config.files import find_config, packaged_configs
from jaxptd.errors import UserError

CONFIGS = Path(jaxptd.__file__).parents[1] / "configs"
NAMES = sorted(
    path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")
)
OFFERED = [name for name in NAMES if not name.startswith("test-")]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Moves to an empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_checkout_has_the_configs_at_its_top():
    assert packaged_configs() == {name: CONFIGS / f"{name}.yaml" for name in NAMES}
    assert {"quickstart", "gpt-1.3b-131k", "megatron/gpt-1.7b"} < set(packaged_configs())


@pytest.mark.parametrize("name", NAMES)
def test_every_packaged_config_is_found_by_name_and_valid(name):
    path = str(CONFIGS / f"{name}.yaml")
    assert find_config(name) == find_config(f"{name}.yaml") == path
    assert load_config(name) == load_config(path)


def parameters_of(name):
    config = dataclasses.replace(load_config(name, ["--model.attention=auto"]), layout=Layout())
    infos = Program(config, make_mesh(Layout())).infos
    # Published counts leave out the biases that only choose experts.
    return sum(math.prod(info.shape) for info in infos.values() if not info.counts)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-131k", 235_093_634_560),
    ],
)
def test_a_published_model_has_as_many_parameters_as_published(name, parameters):
    assert parameters_of(name) == parameters


@pytest.mark.parametrize("row", table_1(), ids=lambda row: row.name)
def test_megatrons_models_are_the_rows_of_its_table_1(row):
    config = load_config(f"megatron/{row.name}")
    for field in ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_length", "remat"):
        place = row.parallelism if field == "remat" else row.shape
        assert getattr(config.model, field) == getattr(place, field)
    parallelism, layout, train = row.parallelism, config.layout, config.train
    assert layout.num_devices == parallelism.gpus
    assert (layout.tp, layout.pp, layout.dp) == (parallelism.tp, parallelism.pp, parallelism.dp)
    assert (layout.virtual_stages or 1) == parallelism.virtual_stages
    assert layout.sequence_parallel == parallelism.sequence_parallel
    assert train.global_batch_size == parallelism.global_batch
    assert train.micro_batches * layout.dp * parallelism.micro_batch == parallelism.global_batch
    published = float(row.name.removeprefix("gpt-").removesuffix("b"))
    assert round(parameters_of(f"megatron/{row.name}") / 1e9, 1) == published


def test_gpt3_has_175_billion_parameters_and_spreads_over_4096_devices():
    assert round(parameters_of("gpt3-175b") / 1e9) == 175
    wide = load_config("gpt3-175b", ["--layout.dp=128", "--train.micro_batches=64"])
    assert wide.layout.num_devices == 4096
    narrow = load_config("gpt3-175b")
    assert narrow.layout.num_devices == 1024
    for config in (narrow, wide):
        assert config.train.global_batch_size == config.layout.dp * config.train.micro_batches


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


def test_a_file_in_a_folder_comes_before_a_packaged_config_in_one(elsewhere):
    (elsewhere / "megatron").mkdir()
    (elsewhere / "megatron" / "gpt-1.7b").write_text("train: {steps: 5}")
    assert load_config("megatron/gpt-1.7b").train.steps == 5
    assert load_config("megatron/gpt-1.7b.yaml").train.steps == 70000


def test_a_folder_of_the_same_name_is_no_config(elsewhere):
    (elsewhere / "quickstart").mkdir()
    assert find_config("quickstart") == str(CONFIGS / "quickstart.yaml")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("quikstart", "did you mean quickstart?"),
        ("quickstart.yml", "did you mean quickstart?"),
        ("llama3_8b", "did you mean llama3-8b?"),
        ("mine", f"use a path, or one of {', '.join(OFFERED)}"),
    ],
)
def test_an_unknown_name_has_its_remedy(name, remedy):
    with pytest.raises(UserError) as caught:
        load_config(name)
    said = f"{name}: no such file or packaged config; {remedy}"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "path", ["no/quickstart", "configs/quickstart", "no/such.yaml", "megatron/gpt-2b"]
)
def test_a_path_is_no_name(path):
    with pytest.raises(UserError, match=rf"^{path}: No such file"):
        load_config(path)


def test_an_installed_package_has_its_own_folder(elsewhere, monkeypatch):
    configs = elsewhere / "jaxptd" / "configs"
    configs.mkdir(parents=True)
    (configs / "mine.yaml").write_text("train: {steps: 7}")
    monkeypatch.setattr(packaged, "__file__", str(configs.parent / "config" / "packaged.py"))
    (configs / "ours").mkdir()
    (configs / "ours" / "theirs.yaml").write_text("train: {steps: 8}")
    expected = {"mine": configs / "mine.yaml", "ours/theirs": configs / "ours" / "theirs.yaml"}
    assert packaged_configs() == expected
    assert load_config("mine").train.steps == 7
    assert load_config("ours/theirs").train.steps == 8
