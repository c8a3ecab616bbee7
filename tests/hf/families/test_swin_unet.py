"""Swin-Unet in safetensors: the names of its original code, its arguments, and its loss."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hugging import check_there_and_back, write_directory
from hugging.swin import linear, norm
from reference.draws import Masks
from reference.families import PRESETS
from reference.images import Model, Sizes, swin_unet
from reference.layers import Options
from reference.tape import Value

from jaxptd import Config, Layout, ModelConfig, Program, UserError, from_hf, hf, make_mesh
from jaxptd.config import nested
from jaxptd.hf.mapping import map_tensors
from jaxptd.hf.sizes import read_sizes

# The levels have 16, 8, 4 and 2 rows of patches: the last one is a single window.
SIZE, WINDOW, DEPTHS = 6, 2, [2, 4, 2, 2]
CONFIG = {
    "model_type": "swin-unet",
    "architectures": ["SwinTransformerSys"],
    "img_size": 64,
    "patch_size": 4,
    "in_chans": 3,
    "num_classes": 4,
    "embed_dim": SIZE,
    "depths": DEPTHS,
    "num_heads": [3, 6, 12, 24],
    "window_size": WINDOW,
    "mlp_ratio": 2.0,
}
Shapes = dict[str, tuple[int, ...]]


def blocks(layer: str, level: int) -> Shapes:
    D, found = SIZE * 2**level, Shapes()
    for number in range(DEPTHS[level]):
        name = f"{layer}.blocks.{number}"
        found |= norm(f"{name}.norm1", D) | norm(f"{name}.norm2", D)
        found |= linear(f"{name}.attn.qkv", 3 * D, D) | linear(f"{name}.attn.proj", D, D)
        found |= linear(f"{name}.mlp.fc1", 2 * D, D) | linear(f"{name}.mlp.fc2", D, 2 * D)
        places, heads = (2 * WINDOW - 1) ** 2, CONFIG["num_heads"][level]
        found[f"{name}.attn.relative_position_bias_table"] = (places, heads)
    return found


def shapes() -> Shapes:
    """Parameters of a SwinUnet, as the constructors in Swin-Unet's code declare them."""
    found: Shapes = {
        "patch_embed.proj.weight": (SIZE, 3, 4, 4),
        "patch_embed.proj.bias": (SIZE,),
        **norm("patch_embed.norm", SIZE),
    }
    for level in range(4):
        D, layer = SIZE * 2**level, f"layers.{level}"
        found |= blocks(layer, level)
        if level < 3:
            found[f"{layer}.downsample.reduction.weight"] = (2 * D, 4 * D)
            found |= norm(f"{layer}.downsample.norm", 4 * D)
    for place in range(4):
        level = 3 - place
        D, layer = SIZE * 2**level, f"layers_up.{place}"
        expands = layer if place == 0 else f"{layer}.upsample"
        if place:
            found |= blocks(layer, level) | linear(f"concat_back_dim.{place}", D, 2 * D)
        if level:
            found[f"{expands}.expand.weight"] = (2 * D, D)
            found |= norm(f"{expands}.norm", D // 2)
    found |= norm("norm", 8 * SIZE) | norm("norm_up", SIZE) | norm("up.norm", SIZE)
    found |= {"up.expand.weight": (16 * SIZE, SIZE), "output.weight": (4, SIZE, 1, 1)}
    return {f"swin_unet.{name}": shape for name, shape in found.items()}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.normal(0, 0.3, shape).astype(np.float32) for n, shape in shapes().items()}


@pytest.fixture(scope="module")
def program() -> Program:
    sizes = read_sizes(CONFIG, tied=True, where="there")
    return Program(Config(ModelConfig(**nested(sizes))), make_mesh(Layout()))


def test_names_are_those_of_swin_unets_code(program: Program) -> None:
    ours = {name: info.shape for name, info in program.infos.items()}
    whole = shapes()
    short = {name.removeprefix("swin_unet."): shape for name, shape in whole.items()}
    buffers = {
        "layers.0.blocks.1.attn_mask": (64, 4, 4),
        "layers_up.3.blocks.0.attn.relative_position_index": (4, 4),
    }
    assert map_tensors("swin-unet", ours, whole, where="DIR").names == {n: n for n in whole}
    mapped = map_tensors("swin-unet", ours, short | buffers, where="DIR")
    assert mapped.names == {name: name.removeprefix("swin_unet.") for name in whole}
    assert mapped.ignored == [*buffers]
    del short["layers_up.0.norm.bias"]
    with pytest.raises(UserError, match="DIR has no tensor swin_unet.layers_up.0.norm.bias; use a"):
        map_tensors("swin-unet", ours, short, where="DIR")


def test_what_is_read_has_its_names_and_numbers_again(tmp_path: Path) -> None:
    there = tensors()
    run = from_hf(write_directory(tmp_path, there, base=CONFIG, shards=2))
    found = hf.names(run.program, run.arrays["params"])
    assert found.keys() == there.keys()
    for name, x in there.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.slow
def test_a_directory_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "there", tensors(), base=CONFIG)
    out = check_there_and_back(folder, tensors(), tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert {name: config[name] for name in CONFIG} == CONFIG


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(row=2, col=2), Layout(), Layout(cp=2, tp=2)], ids=str)
def test_a_directory_is_read_onto_a_layout(tmp_path: Path, layout: Layout) -> None:
    """The loss with the parameters that were read equals that of the numpy reference.

    Gradients from torch show that elements are in the order of Swin-Unet's code:
    `tests/vision/test_swin_unet_of_torch.py`.
    """
    run = from_hf(write_directory(tmp_path, tensors(), base=CONFIG, shards=2), layout=layout)
    rng = np.random.default_rng(1)
    image = rng.normal(size=(2, 64, 64, 1)).repeat(3, -1).astype(np.float32)
    batch = {"image": image, "label": rng.integers(0, 4, (2, 64, 64)).astype(np.int32)}
    loss, gradients = run.loss_and_gradients(batch)
    params = {
        n: Value(np.asarray(p, np.float64))
        for n, p in run.program.canonical(run.state["params"]).items()
    }
    depths = tuple(DEPTHS)
    sizes = Sizes(patch=4, window=WINDOW, depths=depths, decoder_depths=depths[:-1], classes=4)
    options = Options(2, 0, 2, **PRESETS["gpt"] | {"activation": "gelu"})
    pixels, dice = swin_unet(Model(params, sizes, options, Masks(0, 0, 0.0)), batch)
    assert loss == pytest.approx(float((pixels * 0.4 + dice * 0.6).x), rel=1e-5)
    named = hf.names(run.program, dict(gradients))
    assert {name: x.shape for name, x in named.items()} == shapes()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"depths": [2, 2, 2], "num_heads": [3, 6, 12]}, "Swin-Unet's code has 4 levels; use f"),
        ({"patch_size": 2}, "patch_size=2; use a model with patch_size=4"),
        ({"ape": True}, "ape=True; use a model with ape=false"),
        ({"final_upsample": "none"}, "use a model with final_upsample=expand_first"),
        ({"num_heads": [3, 3, 3, 3]}, "use a model in which each level has twice the"),
    ],
)
def test_configs_that_are_not_ours_are_refused(changes: dict, line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        read_sizes(CONFIG | changes, tied=True, where="there")


def test_models_that_swin_unets_code_does_not_have_are_not_named() -> None:
    sizes = {"hidden_size": 6, "num_heads": 3, "images.window": 2, "images.depths": (2, 2)}
    small = ModelConfig(family="swin-unet", **nested({"images.size": 16, **sizes}))
    program = Program(Config(small), make_mesh(Layout()))
    shape = program.infos["norm.w"].shape
    with pytest.raises(
        UserError, match="model.family=swin-unet without up1.* has no Hugging Face n"
    ):
        hf.names(program, {"norm.w": np.zeros(shape)})
