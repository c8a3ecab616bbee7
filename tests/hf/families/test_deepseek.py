"""DeepSeek-V2 and V3 in Hugging Face files: latent attention, the scale of scores, further layers.

`test_experts.py` compares their numbers with transformers.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging import check_there_and_back, experts, write_directory

import jaxptd
from jaxptd import ModelConfig, UserError
from jaxptd.config import nested, option
from jaxptd.hf.convert import main as convert
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import load_model
from jaxptd.hf.read import remarks_of
from jaxptd.hf.sizes import config_json, read_sizes
from jaxptd.mesh import Layout
from jaxptd.run.generator import Generator, Sampling
from jaxptd.run.speculative import Drafts

KINDS = ("deepseek_v2", "deepseek_v3")
# Of DeepSeek-V3's `config.json`, where `mscale` and `mscale_all_dim` leave rotated vectors as they
# are and stretch scores.
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
USUAL = (experts.H + experts.TURNED) ** -0.5


def sizes(kind: str, **keys: Any) -> dict[str, Any]:
    return read_sizes(experts.CONFIGS[kind] | keys, tied=False, where="DIR")


@pytest.mark.parametrize(
    ("kind", "keys", "fields"),
    [
        ("deepseek_v2", {}, {"latent.q_rank": 0, "moe.num_groups": 4, "moe.group_score": "best"}),
        ("deepseek_v2", {"topk_method": "greedy"}, {"moe.num_groups": 1, "moe.top_groups": 1}),
        ("deepseek_v2", {"q_lora_rank": 7}, {"latent.q_rank": 7, "moe.normalize": False}),
        ("deepseek_v3", {}, {"latent.q_rank": experts.Q_RANK, "latent.value_size": experts.VALUE}),
        ("deepseek_v3", {"q_lora_rank": None}, {"latent.q_rank": 0, "attention_scale": None}),
        ("deepseek_v3", {"n_shared_experts": 3}, {"moe.shared_ffn_hidden_size": 3 * experts.F}),
        (
            "deepseek_v3",
            {"rope_scaling": YARN},
            {
                "attention_scale": USUAL * (0.1 * math.log(40) + 1) ** 2,
                "rope.attention_factor": 1.0,
            },
        ),
        (
            "deepseek_v2",
            {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
            {"attention_scale": USUAL * (0.0707 * math.log(40) + 1) ** 2},
        ),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 0}}, {"attention_scale": None}),
    ],
    ids=str,
)
def test_fields_that_keys_decide(kind: str, keys: dict, fields: dict) -> None:
    found = sizes(kind, **keys)
    for name, value in fields.items():
        near = pytest.approx(value, rel=1e-15) if isinstance(value, float) else value
        assert found[name] == near, name


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"mscale_all_dim": 0.707}},
        {"rope_scaling": {k: x for k, x in YARN.items() if not k.startswith("mscale")}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_of_scores_is_written_and_read_again(kind: str, keys: dict) -> None:
    """To the last bit, although the file has a factor from which it follows."""
    found = sizes(kind, **keys)
    model = ModelConfig(**nested(found))
    written = json.loads(json.dumps(config_json(model, dtype="float32", tokenizer=None)))
    again = ModelConfig(**nested(read_sizes(written, tied=False, where="DIR")))
    assert {name: option(again, name) for name in found} == {
        name: option(model, name) for name in found
    }


@pytest.mark.parametrize(
    ("kind", "keys", "line"),
    [
        (
            "deepseek_v3",
            {"rope_interleave": False},
            "rope_interleave=False; use a model with rope_",
        ),
        (
            "deepseek_v3",
            {"attention_bias": True},
            "attention_bias=True; use a model with attention",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax; use a model with scor"),
        ("deepseek_v3", {"n_shared_experts": None}, "n_shared_experts=None; it must be a whole nu"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "model.num_kv_heads=2 with model.latent: late"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "the weights are quanti"),
        (
            "deepseek_v3",
            {"v_head_dim": 99},
            "model.latent.value_size=99: attention takes values no",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True; use a model with norm_top"),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method=noaux_tc; use a model with greed",
        ),
        ("deepseek_v2", {"n_group": None}, "n_group=None; it must be a whole number above 0"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim=1.0 with rope_type=linear; use a model with yarn",
        ),
    ],
    ids=str,
)
def test_what_jaxptd_lacks_is_refused_in_a_line(kind: str, keys: dict, line: str) -> None:
    with pytest.raises(UserError) as error:
        sizes(kind, **keys)
    assert str(error.value).startswith(f"DIR: {line}")


def test_a_scale_that_no_key_gives_is_not_written() -> None:
    model = ModelConfig(family="deepseek_v3", vocab_size=13, attention_scale=0.3)
    with pytest.raises(UserError, match=r"model.attention_scale=0.3: Hugging Face's deepseek_v3"):
        config_json(model, dtype="float32", tokenizer=None)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    tensors = experts.expert_tensors(kind)
    there = write_directory(tmp_path / "there", tensors, base=experts.CONFIGS[kind])
    check_there_and_back(there, tensors, tmp_path)


def with_modules(count: int = 2) -> tuple[dict[str, np.ndarray], dict]:
    """The tensors of a DeepSeek-V3 with modules that predict further tokens, and its config."""
    rng = np.random.default_rng(7)
    tensors, config = experts.expert_tensors("deepseek_v3"), experts.CONFIGS["deepseek_v3"]
    size, layers = config["hidden_size"], config["num_hidden_layers"]
    shapes = {"enorm": (size,), "hnorm": (size,), "shared_head.norm": (size,)}
    shapes["eh_proj"] = (size, 2 * size)
    last, further = f"model.layers.{layers - 1}.", {}
    for number in range(layers, layers + count):
        own = f"model.layers.{number}."
        for name in [each for each in tensors if each.startswith(last)]:
            further[name.replace(last, own)] = rng.normal(size=tensors[name].shape)
        for name, shape in shapes.items():
            further[f"{own}{name}.weight"] = rng.normal(size=shape)
        further[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        further[f"{own}shared_head.head.weight"] = head
    further = {name: np.asarray(x, np.float32) for name, x in further.items()}
    return tensors | further, config | {"num_nextn_predict_layers": count}


def test_modules_that_predict_further_tokens_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, config = with_modules()
    there = write_directory(tmp_path / "there", tensors, base=config)
    run = jaxptd.from_hf(there, platform="cpu", mtp={"layers": 2})
    params, size = run.program.canonical(run.state["params"]), config["hidden_size"]
    w, eh_proj = np.asarray(params["mtp_1.join.w"]), tensors["model.layers.3.eh_proj.weight"]
    assert (w[0] == eh_proj[:, :size].T).all()  # of the embedding, which comes first
    assert (w[1] == eh_proj[:, size:].T).all()
    monkeypatch.chdir(tmp_path)
    run.save()
    convert(["--to-hf", str(run.run_dir.path), "--out", "back", "--quiet"])
    back = Directory(tmp_path / "back")
    assert set(back.shapes) == set(tensors)
    for name, x in tensors.items():
        assert back.tensor(name)[(slice(None),) * x.ndim].tobytes() == x.tobytes(), name
    assert back.config["num_nextn_predict_layers"] == 2


def test_modules_of_a_directory_draft_its_text(tmp_path: Path) -> None:
    tensors, config = with_modules(1)
    there = write_directory(tmp_path / "there", tensors, base=config)
    alone, params = load_model(there, layout=Layout(), platform="cpu")
    assert not alone.config.model.ahead
    program, own = load_model(there, layout=Layout(), platform="cpu", modules=True)
    assert program.config.model.ahead == 1
    greedy, vocab = Sampling(temperature=0), program.config.model.vocab_size or 0
    expected = Generator(alone, vocab, greedy)(params, [1, 2], 5)
    assert Generator(program, vocab, greedy, drafts=Drafts())(own, [1, 2], 5) == expected


def test_a_module_with_tables_of_its_own_is_refused(tmp_path: Path) -> None:
    tensors, config = with_modules(1)
    name = "model.layers.3.embed_tokens.weight"
    there = write_directory(tmp_path / "there", tensors | {name: tensors[name] + 1}, base=config)
    with pytest.raises(UserError, match=rf"{name} and model.embed_tokens.weight differ"):
        jaxptd.from_hf(there, platform="cpu", mtp={"layers": 1})
    jaxptd.from_hf(there, platform="cpu")  # which reads no module


def test_files_without_modules_are_named(tmp_path: Path) -> None:
    tensors, config = with_modules(1)
    there = write_directory(tmp_path / "there", tensors, base=config)
    with pytest.raises(UserError, match=r"has no tensor .*model.layers.4"):
        jaxptd.from_hf(there, platform="cpu", mtp={"layers": 2})


def test_layers_behind_the_last_are_named_and_not_read(tmp_path: Path) -> None:
    """A layer that predicts further tokens has tensors of a usual one as well."""
    kind = "deepseek_v3"
    tensors, config = experts.expert_tensors(kind), experts.CONFIGS[kind]
    last = f"model.layers.{config['num_hidden_layers']}."
    usual = {n: x for n, x in tensors.items() if n.startswith("model.layers.2.")}
    further = {n.replace("model.layers.2.", last): x for n, x in usual.items()}
    further |= {f"{last}{n}.weight": np.ones(2, np.float32) for n in ("eh_proj", "enorm", "hnorm")}
    base = config | {"num_nextn_predict_layers": 1}
    there = write_directory(tmp_path / "there", tensors | further, base=base)
    (line,) = remarks_of(Directory(there))
    assert "num_nextn_predict_layers=1: layers behind the last" in line
    run = tmp_path / "run"
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    convert(["--to-hf", str(run), "--out", str(tmp_path / "back"), "--quiet"])
    back = Directory(tmp_path / "back")
    assert set(back.shapes) == set(tensors)
    assert back.config["num_nextn_predict_layers"] == 0
    del further[f"{last}eh_proj.weight"]
    other = write_directory(tmp_path / "other", tensors | further, base=config)
    with pytest.raises(UserError, match=r"has .*layers.3.*, unknown to the model of its config"):
        jaxptd.from_hf(other, platform="cpu")
