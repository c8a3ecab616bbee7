"""Adapters in PEFT's files, without PEFT: what they add to a model's tensors, and bad files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
from hugging import random_directory
from turns import slow

import jaxptd
from jaxptd.config.lora import LoRA
from jaxptd.errors import UserError
from jaxptd.hf.adapters import CONFIG, WEIGHTS, AdapterFiles, write_adapter
from jaxptd.hf.convert import main as convert
from jaxptd.mesh import Layout
from jaxptd.run.adapters import MergedParams, merged
from jaxptd.run.saved import SavedParams

BASE = "base_model.model."
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "vocab_size": 40,
}


def test_the_scale_is_alpha_over_the_rank_or_its_root() -> None:
    assert LoRA(rank=4).scale == 2
    assert LoRA(rank=4, alpha=8).scale == 2
    assert LoRA(rank=4, alpha=8, rslora=True).scale == 4


@pytest.mark.parametrize(
    "choice",
    [
        {"family": "llama", "num_kv_heads": 2},
        {"lora.targets": ("mlp.*", "attention.out")},
        *(slow(each) for each in ({"family": "qwen3"}, tiny.T5, tiny.LATENT)),
    ],
    ids=str,
)
def test_a_tensor_of_a_merged_model_is_the_base_s_and_b_times_a(choice: dict) -> None:
    program = tiny.program(Layout(), **{"lora.rank": 3, "lora.alpha": 5.0, **choice})
    params = tiny.random_params(program)
    adapters = {name: x for name, x in params.items() if ".lora." in name}
    base = {name: x for name, x in params.items() if name not in adapters}
    whole = dict(base)
    for name in (name for name in adapters if name.endswith(".a")):
        w, b = name.replace(".lora.a", ".w"), f"{name[:-1]}b"
        letters = program.infos[name].matrix
        whole[w] = merged(base[w], params[name], params[b], matrix=letters, scale=5 / 3)
    before, after, files = (
        jaxptd.hf.names(program, each, is_canonical=True) for each in (base, whole, adapters)
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    modules = {name.removeprefix(BASE).rpartition(".lora_")[0] for name in files}
    assert changed == {f"{module}.weight" for module in modules}
    for module in modules:
        a, b = (files[f"{BASE}{module}.lora_{each}.weight"] for each in "AB")
        difference = after[f"{module}.weight"] - before[f"{module}.weight"]
        added = 5 / 3 * b @ a
        added = added if choice.get("family") else added.T  # GPT-2 has [in, out]
        np.testing.assert_allclose(difference, added, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and an adapter of queries and values in PEFT's files."""
    folder = tmp_path_factory.mktemp("adapters")
    random_directory(folder / "base", LLAMA)
    draw, tensors = np.random.default_rng(0), {}
    for layer in range(2):
        for name, rows in {"q_proj": 16, "v_proj": 8}.items():
            module = f"{BASE}model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = draw.normal(size=(3, 16)).astype(np.float32)
            tensors[f"{module}.lora_B.weight"] = draw.normal(size=(rows, 3)).astype(np.float32)
    write(folder / "adapter", tensors)
    return folder


def write(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> None:
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "lora_dropout": 0.1} | config
    (folder / CONFIG).write_text(json.dumps(settings))
    save_file(tensors, folder / WEIGHTS)


def test_files_become_a_run_and_come_back(folder: Path, capsys) -> None:
    words = ["--from-hf", str(folder / "base"), "--adapter", str(folder / "adapter")]
    convert([*words, "--out", str(folder / "run"), "--quiet"])
    assert "lora_dropout=0.1 has no effect here" in capsys.readouterr().err
    saved = SavedParams(folder / "run")
    lora = saved.config.model.lora
    assert lora == LoRA(3, 6.0, ("attention.kv", "attention.q"))
    keys, values = np.split(saved.read("blocks.attention.kv.lora.b"), 2, axis=2)
    assert not keys.any()  # zeros have no gradient, and stay
    assert values.all()
    convert(["--to-hf", str(folder / "run"), "--unmerged", "--out", str(folder / "back")])
    first, second = (AdapterFiles(folder / each) for each in ("adapter", "back"))
    assert first.tensors.keys() == second.tensors.keys()
    for name, x in first.tensors.items():
        np.testing.assert_array_equal(x, second.tensors[name])
    assert second.config["target_modules"] == ["q_proj", "v_proj"]
    whole = MergedParams(folder / "run")
    assert not any(".lora." in name for name in whole.shapes)
    assert whole.config.model.lora is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported; merge the adapter"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens="),
        ({"a_later_variant": {"x": 1}}, "a_later_variant="),
        ({"r": 4}, r"lora_\w.weight is .* but the model needs"),
    ],
)
def test_adapters_of_other_kinds_are_refused(folder, tmp_path, config, message) -> None:
    write(tmp_path / "adapter", AdapterFiles(folder / "adapter").tensors, **config)
    with pytest.raises(UserError, match=message):
        convert_with(folder, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.v_proj.lora_A.weight", "elements that are NaN or infinite"),
        ("model.layers.0.mlp.gate.lora_A.weight", "no matrix of the model can have"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "has one of the two matrices"),
    ],
)
def test_tensors_that_make_no_adapter_are_refused(folder, tmp_path, name, message) -> None:
    tensors = dict(AdapterFiles(folder / "adapter").tensors)
    full = f"{BASE}{name}"
    if "NaN" in message:
        tensors[full] = np.full((3, 16), np.nan, np.float32)
    elif full in tensors:
        del tensors[full]
    else:
        tensors |= {full: np.zeros((3, 16)), full.replace("_A", "_B"): np.zeros((4, 3))}
    write(tmp_path / "adapter", tensors)
    with pytest.raises(UserError, match=message):
        convert_with(folder, tmp_path)


def convert_with(folder: Path, tmp_path: Path) -> None:
    words = ["--from-hf", str(folder / "base"), "--adapter", str(tmp_path / "adapter")]
    convert([*words, "--out", str(tmp_path / "run"), "--quiet"])
    assert not (tmp_path / "run").exists()


def test_a_run_that_trained_more_is_not_written_without_the_rest(folder, tmp_path) -> None:
    words = ["--from-hf", str(folder / "base"), "--adapter", str(folder / "adapter")]
    convert([*words, "--out", str(tmp_path / "run"), "--quiet"])
    saved = SavedParams(tmp_path / "run")
    rule = dataclasses.replace(saved.config.optimizer, frozen=("*.w",))
    saved.config = dataclasses.replace(saved.config, optimizer=rule)
    with pytest.raises(UserError, match=r"trained more than its adapters \(optimizer.frozen\)"):
        write_adapter(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_adapters_has_none_to_write(folder: Path, tmp_path: Path) -> None:
    convert(["--from-hf", str(folder / "base"), "--out", str(tmp_path / "run"), "--quiet"])
    with pytest.raises(UserError, match="has no adapters"):
        convert(["--to-hf", str(tmp_path / "run"), "--unmerged", "--out", str(tmp_path / "x")])
