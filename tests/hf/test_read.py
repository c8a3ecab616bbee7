"""Parameters from safetensors files are the same on every layout; devices read only slices."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hugging import gpt2_tensors, write_directory
from turns import slow

from jaxptd import Config, Layout, ModelConfig, Program, TrainConfig, UserError, make_mesh
from jaxptd.config import nested
from jaxptd.hf import dims
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import read_params, sizes_of

ONE = Layout()
TP = Layout(dp=2, tp=3, sequence_parallel=False)  # 13 ids need padding
GRID = Layout(row=2, col=2, attention2d="blocks")
PIPELINE = Layout(pp=2, dp=2, schedule="interleaved", virtual_stages=2)
ZERO = Layout(dp=2, cp=2, tp=1, zero=3)
LAYOUTS = [slow(ONE), slow(TP), slow(GRID), PIPELINE, slow(ZERO)]


def program(directory: Path, layout: Layout, **model: object) -> Program:
    sizes = ModelConfig(**(sizes_of(Directory(directory)) | model))
    train = TrainConfig(global_batch_size=4, micro_batches=2 if layout.pp > 1 else 1)
    return Program(Config(sizes, layout, train=train), make_mesh(layout))


def canonical(program: Program, directory: Path) -> dict[str, np.ndarray]:
    params = read_params(program, Directory(directory))
    shapes = {name: each.stored_shape for name, each in program.states.stored.items()}
    assert {name: x.shape for name, x in params.items()} == shapes
    return {name: np.asarray(x) for name, x in jax.jit(program.canonical)(params).items()}


def test_sizes_are_those_of_the_config(gpt2: Path) -> None:
    model = ModelConfig(**nested(sizes_of(Directory(gpt2))))
    sizes = {"num_layers": 5, "hidden_size": 12, "num_heads": 3, "seq_length": 16}
    want = ModelConfig(**sizes, vocab_size=13)
    assert {name: getattr(model, name) for name in sizes} == sizes
    assert (model.vocab_size, model.block, model.mlp_size) == (13, want.block, want.mlp_size)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_has_the_tensors(gpt2: Path, tensors, layout: Layout) -> None:
    found = canonical(program(gpt2, layout), gpt2)
    h = "transformer.h.{}"
    np.testing.assert_array_equal(found["tokens.table"], tensors["transformer.wte.weight"])
    for i in range(5):
        name = h.format(i)
        qkv_D3NH = tensors[f"{name}.attn.c_attn.weight"].reshape(12, 3, 3, 4)
        np.testing.assert_array_equal(found["blocks.attention.qkv.w"][i], qkv_D3NH)
        down_FD = tensors[f"{name}.mlp.c_proj.weight"]
        np.testing.assert_array_equal(found["blocks.mlp.down.w"][i], down_FD)
        np.testing.assert_array_equal(found["blocks.mlp_norm.b"][i], tensors[f"{name}.ln_2.bias"])


def test_devices_read_their_own_slices(gpt2: Path, tensors, monkeypatch) -> None:
    """Each element of the file is read once, even if several devices hold copies of it."""
    read = []
    whole = dims.Rule.read

    def counted(self, tensor, ours, ranges):
        x = whole(self, tensor, ours, ranges)
        read.append(x.size)
        return x

    monkeypatch.setattr(dims.Rule, "read", counted)
    read_params(program(gpt2, TP), Directory(gpt2))
    assert sum(read) == sum(x.size for x in tensors.values())
    assert max(read) == 16 * 12  # a table of positions, as large as a third of a layer's MLP


def test_stages_read_their_own_layers(tmp_path: Path, tensors) -> None:
    four = {name: x for name, x in tensors.items() if ".h.4." not in name}
    folder = write_directory(tmp_path / "m", four, n_layer=4)
    found = canonical(program(folder, Layout(pp=2)), folder)
    for i in range(4):
        up_DF = tensors[f"transformer.h.{i}.mlp.c_fc.weight"]
        np.testing.assert_array_equal(found["blocks.mlp.up.w"][i], up_DF)


def test_bfloat16_and_a_head_of_its_own(tmp_path: Path) -> None:
    tensors = gpt2_tensors(dtype=ml_dtypes.bfloat16, tied=False, prefix="")
    folder = write_directory(tmp_path / "m", tensors, tie_word_embeddings=True)
    found = canonical(program(folder, ONE), folder)
    np.testing.assert_array_equal(found["head.table"], tensors["lm_head.weight"])
    assert found["head.table"].dtype == np.float32


def test_a_shorter_sequence_has_the_first_positions(gpt2: Path, tensors) -> None:
    found = canonical(program(gpt2, ONE, seq_length=9, max_positions=12), gpt2)
    np.testing.assert_array_equal(found["positions.table"], tensors["transformer.wpe.weight"][:12])


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ({"num_layers": 4}, "model.num_layers=4, but DIR has 5; use --model.num_layers=5, or "),
        ({"hidden_size": 24}, "model.hidden_size=24, but DIR has 12; use "),
        ({"ffn_hidden_size": 40}, "model.ffn_hidden_size=40, but DIR has 48; use "),
        ({"tie_embeddings": False}, "but DIR has True; use --model.tie_embeddings=true, or "),
        ({"vocab_size": 14}, "model.vocab_size=14, but DIR has 13; use --model.vocab_size=13, "),
        ({"max_positions": 17}, "model.max_positions=17, but DIR has 16 positions; use --model."),
        (
            {"seq_length": 17, "max_positions": None},
            "model.seq_length=17, but DIR has 16 positions; use --model.seq_length=16 or less",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_another_model_is_refused_by_its_field(gpt2: Path, model: dict, line: str) -> None:
    with pytest.raises(UserError) as error:
        read_params(program(gpt2, ONE, **model), Directory(gpt2))
    assert line in str(error.value).replace(str(gpt2), "DIR")
