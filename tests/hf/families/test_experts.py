"""Models with experts in Hugging Face files: separate and fused experts, routers, dense layers."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hugging import check_there_and_back, experts, write_directory

import jaxptd
from jaxptd import Config, Layout, ModelConfig, Program, UserError, make_mesh
from jaxptd.config import nested, option
from jaxptd.hf import dims
from jaxptd.hf.convert import main as convert
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import config_of
from jaxptd.hf.mapping import Mapped, map_tensors
from jaxptd.hf.read import read_params, remarks_of
from jaxptd.hf.sizes import config_json, read_sizes
from jaxptd.hf.verdict import check, lines

GOLDEN = Path(__file__).parents[2] / "golden" / "experts.json"
KINDS = list(experts.CONFIGS)

Tensors = dict[str, np.ndarray]


@functools.cache
def program_of(kind: str, layout: Layout = Layout()) -> Program:  # noqa: B008  (frozen)
    """The tiny model of a family."""
    sizes = read_sizes(experts.CONFIGS[kind], tied=False, where="there")
    return Program(Config(ModelConfig(**nested(sizes)), layout), make_mesh(layout))


def mapped(kind: str, tensors: Mapping[str, Any]) -> tuple[Mapped, dict[str, tuple[int, ...]]]:
    ours = {name: info.shape for name, info in program_of(kind).infos.items()}
    theirs = {name: list(x.shape) for name, x in tensors.items()}
    return map_tensors(kind, ours, theirs, where="DIR"), ours


def read(kind: str, tensors: Tensors) -> Tensors:
    """Our unsharded parameters, from tensors in memory."""
    rules, ours = mapped(kind, tensors)
    found = {name: np.zeros(shape) for name, shape in ours.items()}
    for name, shape in ours.items():
        for rule in rules.rules[name]:
            for index in np.ndindex(*shape[: rule.numbered]):
                tensor = tensors[rules.names[rule.tensor_at(index)]]
                whole = rule.ranges(tuple((0, size) for size in shape))
                place = (*index, *[slice(None)] * (len(shape) - rule.numbered))
                if rule.entry:
                    dim, number = rule.entry
                    place = (*place[:dim], number, *place[dim + 1 :])
                found[name][place] = rule.read(tensor, shape, whole)
    return found


# ---- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_have_the_same_parameters(kind: str) -> None:
    tensors = experts.expert_tensors(kind)
    apart, fused = read(kind, tensors), read(kind, experts.fused(tensors))
    assert apart.keys() == fused.keys()
    for name, x in apart.items():
        np.testing.assert_array_equal(fused[name], x, err_msg=name)
    stack = next(name for name in apart if name.endswith("router.w")).partition(".")[0]
    first = experts.sparse_layers(kind)[0]
    gate, up, down = experts.expert(tensors, layer=first, number=2)
    np.testing.assert_array_equal(apart[f"{stack}.mlp.up.w"][0, 2, :, 0], gate.T)
    np.testing.assert_array_equal(apart[f"{stack}.mlp.up.w"][0, 2, :, 1], up.T)
    np.testing.assert_array_equal(apart[f"{stack}.mlp.down.w"][0, 2], down.T)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_written(kind: str) -> None:
    """Experts are separate tensors, as in files on the Hub."""
    tensors = experts.expert_tensors(kind)
    rules, _ = mapped(kind, tensors)
    params, written = read(kind, tensors), {}
    for name, x in params.items():
        for rule in rules.rules[name]:
            written |= rule.tensors(x)
    assert set(written) == set(tensors)
    for name, x in tensors.items():
        np.testing.assert_array_equal(written[name], x, err_msg=name)


def test_layers_of_two_kinds_are_found_by_their_numbers(tmp_path: Path) -> None:
    tensors, config = experts.expert_tensors("qwen3_moe"), experts.CONFIGS["qwen3_moe"]
    there = write_directory(tmp_path / "there", tensors, base=config, shards=3)
    params = read_params(program_of("qwen3_moe"), Directory(there))
    name = "model.layers.{}.mlp.{}gate_proj.weight"
    dense, sparse = (np.asarray(params[f"blocks_{i}.mlp.up.w"]) for i in (0, 1))
    np.testing.assert_array_equal(dense[0, :, 0].T, tensors[name.format(0, "")])
    np.testing.assert_array_equal(sparse[1, 3, :, 0].T, tensors[name.format(2, "experts.3.")])
    assert not np.asarray(params["blocks_1.mlp.router.load_bias"]).any()
    check_there_and_back(there, tensors, tmp_path)


def test_a_device_reads_its_own_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device reads half the hidden units of a quarter of the experts, from either form."""
    tensors = experts.expert_tensors("mixtral", ml_dtypes.bfloat16)
    layout = Layout(ep=4, tp=2)
    read, whole = [], dims.Rule.read

    def counted(rule: Any, tensor: Any, ours: Any, ranges: Any) -> np.ndarray:
        x = whole(rule, tensor, ours, ranges)
        read.append((rule.ours, x.size))
        return x

    monkeypatch.setattr(dims.Rule, "read", counted)
    found = []
    for form in (tensors, experts.fused(tensors)):
        read.clear()
        there = write_directory(tmp_path / str(len(form)), form, base=experts.CONFIGS["mixtral"])
        params = read_params(program_of("mixtral", layout), Directory(there))
        found.append({name: np.asarray(x) for name, x in params.items()})
        for name in ("blocks.mlp.up.w", "blocks.mlp.down.w"):
            sizes = [size for each, size in read if each == name]
            assert sum(sizes) == params[name].size
            held = params[name].size // 8 // 2  # of a layer
            assert max(sizes) <= held
    for name, x in found[0].items():
        np.testing.assert_array_equal(found[1][name], x, err_msg=name)
        assert x.dtype == np.float32


def test_one_form_with_a_missing_expert_is_refused() -> None:
    tensors = experts.expert_tensors("mixtral")
    gone = "model.layers.1.block_sparse_moe.experts.5.w3.weight"
    with pytest.raises(UserError, match=f"DIR has no tensor {gone}; use a directory that has all"):
        mapped("mixtral", {name: x for name, x in tensors.items() if name != gone})
    both = tensors | experts.fused(tensors)
    with pytest.raises(UserError, match=r"DIR has .*experts.0.w1.weight.* unknown to the model"):
        mapped("mixtral", both)


def test_a_bias_that_hugging_face_lacks_is_not_lost(tmp_path: Path) -> None:
    config = experts.CONFIGS["mixtral"]
    there = write_directory(tmp_path / "there", experts.expert_tensors("mixtral"), base=config)
    run = jaxptd.from_hf(there, platform="cpu")
    bias = "blocks.mlp.router.load_bias"
    state = run.state["params"] | {bias: run.state["params"][bias].at[1, 2].set(0.25)}
    experts.save(run.program, state, tmp_path / "run")
    with pytest.raises(UserError, match=f"{bias} is not zero, and models of Hugging Face's mixt"):
        convert(["--to-hf", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_chooses_keeps_its_precision(tmp_path: Path) -> None:
    """transformers keeps the router and bias of dots1 in float32 whatever precision the rest has.

    Rounded to bfloat16, they would choose other experts.
    """
    tensors, kind = experts.expert_tensors("dots1"), "dots1"
    there = write_directory(tmp_path / "there", tensors, base=experts.CONFIGS[kind])
    convert(["--from-hf", str(there), "--out", str(tmp_path / "run"), "--quiet"])
    sizes = ("--dtype=bfloat16", "--shard-size=50KB")
    convert(["--to-hf", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--quiet", *sizes])
    back = Directory(tmp_path / "out")
    exact = [name for name in tensors if name.endswith((experts.BUFFER, "mlp.gate.weight"))]
    assert len(exact) == 4
    for name, x in tensors.items():
        assert back.dtypes[name] == ("F32" if name in exact else "BF16"), name
        expected = x if name in exact else x.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(back.tensor(name)[(slice(None),) * x.ndim], expected)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    total = 2 * sum(x.size for x in [*tensors.values(), *(tensors[name] for name in exact)])
    assert index["metadata"]["total_size"] == total


# ---- config.json ---------------------------------------------------------------------------------


def sizes(kind: str, **keys: Any) -> dict[str, Any]:
    config = experts.CONFIGS[kind] | keys
    return read_sizes(config, tied=False, where="DIR")


@pytest.mark.parametrize(
    ("kind", "keys", "fields"),
    [
        ("mixtral", {}, {"moe.top_k": 2, "moe.normalize": True, "rope.theta": 1e6, "window": None}),
        ("mixtral", {"num_experts": 4}, {"moe.num_experts": 4}),
        ("mixtral", {"sliding_window": 5}, {"window": 5, "moe.ffn_hidden_size": experts.F}),
        ("qwen2_moe", {}, {"moe.normalize": False, "moe.shared_gate": True, "rope.theta": 1e4}),
        ("qwen2_moe", {"decoder_sparse_step": 2}, {"moe.every": 2, "moe.dense_layers": ()}),
        ("qwen2_moe", {"use_sliding_window": True, "layer_types": None, "num_hidden_layers": 1},
            {"window": 4096}),
        ("qwen3_moe", {}, {"moe.normalize": True, "moe.dense_layers": (0,), "qk_norm": True}),
        ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": None},
            {"moe.normalize": False, "moe.dense_layers": ()}),
        ("qwen3_moe", {"mlp_only_layers": [2, 9, 0, -1, 0]}, {"moe.dense_layers": (0, 2)}),
        ("qwen3_moe", {"num_local_experts": 6}, {"moe.num_experts": 6}),
        ("dots1", {}, {"moe.score": "sigmoid", "moe.top_groups": 2, "moe.group_score": "best_two"}),
        ("dots1", {}, {"moe.scale": 2.5, "moe.first_dense": 1, "moe.shared_ffn_hidden_size": 32}),
        ("dots1", {"norm_topk_prob": False}, {"moe.normalize": False, "qk_norm": True}),
        ("olmoe", {}, {"qk_norm": "whole", "moe.normalize": False, "moe.ffn_hidden_size": 16}),
        ("olmoe", {"num_local_experts": 4}, {"moe.num_experts": 4}),
        ("granitemoe", {}, {"attention_scale": 0.4, "embedding_scale": 1.5, "residual_scale": 0.6}),
        ("granitemoe", {}, {"logit_divisor": 3.0, "moe.normalize": True, "moe.num_experts": 8}),
        ("mixtral", {}, {"attention_scale": None, "embedding_scale": None}),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_keys_decide(kind: str, keys: dict, fields: dict) -> None:
    found = sizes(kind, **keys)
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_missing_have_the_values_of_transformers(kind: str) -> None:
    """Covers all defaults of its config classes, which must also form a valid model."""
    required = experts.REQUIRED.get(kind, {})
    found = read_sizes({"model_type": kind, **required}, tied=False, where="DIR")
    model = ModelConfig(**nested(found))
    expected = json.loads(GOLDEN.read_text())[kind]["defaults"]
    assert {name: option(model, name) for name in expected} == {
        name: tuple(x) if isinstance(x, list) else x for name, x in expected.items()
    }


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1; use a model with ro"),
        ("mixtral", {"num_experts_per_tok": 9}, "model.moe.top_k=9: a token can choose from 8 exp"),
        ("mixtral", {"hidden_act": "mish"}, "hidden_act=mish; use a model with one of gelu_new"),
        ("mixtral", {"quantization_config": {"bits": 4}}, "the weights are quantized; use those"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False; use a model with qkv_bias=true"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size="),
        ("qwen2_moe", {"norm_topk_prob": "yes"}, 'norm_topk_prob="yes"; it must be true or false'),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True; use a model with attention_"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1; it must be a list of whole numb"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, "model.moe: none of model.num_layers=3 laye"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts=0; it must be a whole number above 0"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts=None; it must be a whole number"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts=None; it must be a whole number"),
        ("dots1", {"n_group": 5}, "model.moe.num_experts=12 does not split over model.moe.num_g"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0; use a model with clip_qkv=null"),
        ("olmoe", {"sliding_window": 8}, "sliding_window=8; use a model with sliding_window=null"),
        ("granitemoe", {"logits_scaling": 0}, "logits_scaling=0; it must be a number above 0"),
        ("granitemoe", {"attention_multiplier": None}, "attention_multiplier=None; it must be a n"),
        ("dots1", {"attention_bias": True}, "attention_bias=True; use a model with attention_bias"),
        ("dots1", {"first_k_dense_replace": 3}, "model.moe: none of model.num_layers=3 layers has"),
    ],
    ids=str,
)  # fmt: skip
def test_what_jaxptd_lacks_is_refused_in_a_line(kind: str, keys: dict, line: str) -> None:
    with pytest.raises(UserError) as error:
        sizes(kind, **keys)
    assert str(error.value).startswith(f"DIR: {line}")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(kind: str) -> None:
    found = sizes(kind)
    model = ModelConfig(**nested(found))
    written = config_json(model, dtype="float32", tokenizer=None)
    again = ModelConfig(**nested(read_sizes(written, tied=False, where="DIR")))
    assert {name: option(again, name) for name in found} == {
        name: option(model, name) for name in found
    }


def test_dense_layers_are_listed_however_they_are_told() -> None:
    moe = {"top_k": 4, "every": 2, "first_dense": 2, "dense_layers": [5]}
    model = ModelConfig(family="qwen3_moe", vocab_size=13, num_layers=8, moe=moe)
    written = config_json(model, dtype="float32", tokenizer=None)
    assert (written["mlp_only_layers"], written["decoder_sparse_step"]) == ([1, 5], 2)


@pytest.mark.parametrize(
    ("kind", "moe", "line"),
    [
        ("mixtral", {"normalize": False}, "model.moe.normalize=False: Hugging Face's mixtral ha"),
        ("mixtral", {"shared_ffn_hidden_size": 8}, "model.moe.shared_ffn_hidden_size=8: Hugging"),
        ("mixtral", {"every": 2}, "model.moe.every=2: Hugging Face's mixtral has 1; export a mo"),
        ("qwen3_moe", {"score": "sigmoid"}, "model.moe.score=sigmoid: Hugging Face's qwen3_moe"),
        ("qwen3_moe", {"num_groups": 2}, "model.moe.num_groups=2: Hugging Face's qwen3_moe has"),
        ("dots1", {"group_score": "best"}, "model.moe.group_score=best: Hugging Face's dots1 has "),
        ("dots1", {"shared_ffn_hidden_size": 9}, "model.moe.shared_ffn_hidden_size=9: Hugging Fa"),
        ("dots1", {"shared_ffn_hidden_size": 0}, "model.moe.shared_ffn_hidden_size=0: Hugging Fa"),
        ("qwen2_moe", {"shared_gate": False}, "model.moe.shared_gate=False: Hugging Face's qwen"),
    ],
    ids=str,
)  # fmt: skip
def test_routers_of_other_families_are_not_written(kind: str, moe: dict, line: str) -> None:
    model = ModelConfig(family=kind, vocab_size=13, moe=moe)
    with pytest.raises(UserError) as error:
        config_json(model, dtype="float32", tokenizer=None)
    assert str(error.value).startswith(line)


def test_a_loss_of_micro_batches_is_named_and_not_taken_over(tmp_path: Path) -> None:
    tensors = experts.expert_tensors("mixtral")
    keys = {"router_aux_loss_coef": 0.02, "output_router_logits": True}
    there = write_directory(tmp_path / "m", tensors, base=experts.CONFIGS["mixtral"], **keys)
    (remark,) = (line for line in lines(check(there)) if line.startswith("remark"))
    assert "router_aux_loss_coef=0.02 has no effect: its loss is of a micro-batch" in remark
    assert config_of(Directory(there)).model.moe.balance_loss == 0
    quiet = write_directory(
        tmp_path / "q", tensors, base=experts.CONFIGS["mixtral"], router_aux_loss_coef=0.02
    )
    assert remarks_of(Directory(quiet)) == []
