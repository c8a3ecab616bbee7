"""Swin in Hugging Face files: names that differ, its config, and transformers' results."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hugging import check_there_and_back, encoders, write_directory
from hugging.compared import check_golden, compare
from hugging.swin import CONFIG, images, swin_tensors

from jaxptd import Config, Layout, ModelConfig, Program, UserError, from_hf, make_mesh
from jaxptd.config import nested
from jaxptd.generate import main as generate
from jaxptd.hf.mapping import map_tensors
from jaxptd.hf.sizes import read_sizes

GOLDEN = Path(__file__).parents[2] / "golden" / "swin.json"
NEW = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.self.relative": "attention.relative_position_bias.relative",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


def new(name: str) -> str:
    """The name in transformers 5."""
    return next((name.replace(old, NEW[old]) for old in NEW if old in name), name)


@pytest.fixture(scope="module")
def program() -> Program:
    sizes = read_sizes(CONFIG, tied=True, where="there")
    return Program(Config(ModelConfig(**nested(sizes))), make_mesh(Layout()))


def test_names_of_files_and_of_transformers_are_known(program: Program) -> None:
    tensors = swin_tensors()
    ours = {name: info.shape for name, info in program.infos.items()}
    found = {name: x.shape for name, x in tensors.items()}
    index = "encoder.layers.0.blocks.0.attention.self.relative_position_index"
    old = {name.removeprefix("swin."): shape for name, shape in found.items()}
    mapped = map_tensors("swin", ours, {**old, index: (16, 16)}, where="DIR")
    assert mapped.names == {name: name.removeprefix("swin.") for name in tensors}
    assert mapped.ignored == [index]
    shown = {new(name): shape for name, shape in found.items()}
    assert map_tensors("swin", ours, shown, where="DIR").names == {n: new(n) for n in tensors}
    assert len(set(shown) - set(found)) == 6 * 13
    del found["classifier.bias"]
    with pytest.raises(UserError, match="DIR has no tensor classifier.bias; use a directory th"):
        map_tensors("swin", ours, found, where="DIR")


@pytest.mark.slow
def test_a_directory_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "there", swin_tensors(), base=CONFIG)
    out = check_there_and_back(folder, swin_tensors(), tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert {name: config[name] for name in CONFIG} == CONFIG
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"num_heads": [3, 3]}, "num_heads=[3, 3], depths=[4, 2]; use a model in which each level"),
        ({"depths": 4}, "depths=4; it must be a list with a number for each level"),
        ({"qkv_bias": False}, "qkv_bias=False; use a model with qkv_bias=true"),
        ({"use_absolute_embeddings": True}, "use a model with use_absolute_embeddings=false"),
        ({"embed_dim": "12"}, 'embed_dim="12"; it must be a whole number above 0'),
        ({"image_size": [32, 32]}, "image_size=[32, 32]; it must be a whole number above 0"),
        ({"depths": [3, 2]}, "model.images.depths=[3, 2]: every second block of a level shifts"),
    ],
)
def test_configs_that_are_not_ours_are_refused(changes: dict, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        read_sizes(CONFIG | changes, tied=True, where="there")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2, sequence_parallel=True),
        Layout(),
        Layout(cp=2, tp=2),
        Layout(row=2, col=2),
        Layout(row=2, col=2, attention2d="blocks", matmul2d="cannon"),
        Layout(dp=4, zero=3),
    ],
    ids=str,
)
def test_numbers_are_those_of_transformers(tmp_path: Path, layout: Layout) -> None:
    """Compares the loss and every gradient with what transformers computed in float64."""
    folder = write_directory(tmp_path, swin_tensors(), base=CONFIG, shards=2)
    check_golden("swin", GOLDEN, folder, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(row=2, col=2)], ids=str)
def test_transformers_itself_agrees(tmp_path: Path, layout: Layout) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    encoders.make(encoders.IMAGES["swin"], tmp_path)
    compare("swin", tmp_path, layout)


@pytest.mark.slow
def test_classes_and_gradients_of_any_number_of_images_on_a_grid(tmp_path: Path, capsys) -> None:
    """Three images are split over the devices along row."""
    folder = write_directory(tmp_path / "there", swin_tensors(), base=CONFIG)
    batch = {name: x[:3] for name, x in images(np.random.default_rng(0)).items()}
    runs = [from_hf(folder, layout=each) for each in (Layout(), Layout(row=2, col=2))]
    first, second = (run.classes(batch["image"]) for run in runs)
    np.testing.assert_array_equal(first, second)
    assert first.shape == (3,)
    losses = [run.loss_and_gradients(batch).loss for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    np.save(tmp_path / "a.npy", batch["image"][0])
    assert generate(["--run-dir", str(folder), "--images", str(tmp_path / "a.npy")]) == 0
    assert capsys.readouterr().out == f"a {first[0]}\n"
