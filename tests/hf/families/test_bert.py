"""BERT in Hugging Face files: names that differ from file to file, its heads, its config."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_lines import refused
from hugging import check_there_and_back, write_directory
from hugging.bert import CONFIG, LENGTH, VOCAB, bert_tensors

from jaxptd import Config, Layout, ModelConfig, Program, UserError, make_mesh
from jaxptd.config import nested
from jaxptd.data.objectives import MASK_TOKENS
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.generate import main as generate
from jaxptd.hf import directory as directories
from jaxptd.hf.convert import main as convert
from jaxptd.hf.directory import Directory
from jaxptd.hf.mapping import Mapped, map_tensors
from jaxptd.hf.read import read_params
from jaxptd.hf.sizes import config_json, read_sizes

TABLE, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
COPIES = {"cls.predictions.decoder.weight": TABLE, "cls.predictions.decoder.bias": BIAS}

Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def program() -> Program:
    """The model of the tiny directory."""
    sizes = read_sizes(CONFIG, tied=True, where="there")
    return Program(Config(ModelConfig(**nested(sizes))), make_mesh(Layout()))


def written(folder: Path, tensors: Tensors, **config: object) -> Directory:
    return Directory(write_directory(folder, tensors, base=CONFIG, **config))


def mapped(program: Program, tensors: Tensors) -> Mapped:
    ours = {name: info.shape for name, info in program.infos.items()}
    found = {name: list(x.shape) for name, x in tensors.items()}
    return map_tensors("bert", ours, found, where="DIR")


# ---- names -------------------------------------------------------------------------------------


def old(name: str) -> str:
    """The name in TensorFlow files, without the prefix."""
    for ours, theirs in ((".weight", ".gamma"), (".bias", ".beta")):
        name = name.replace(f"LayerNorm{ours}", f"LayerNorm{theirs}")
    return name.removeprefix("bert.")


def test_names_of_older_files_are_known(program: Program) -> None:
    tensors = bert_tensors()
    assert mapped(program, {old(name): x for name, x in tensors.items()}).names == {
        name: old(name) for name in tensors
    }
    positions = {"bert.embeddings.position_ids": np.arange(LENGTH)[None]}
    assert mapped(program, tensors | positions).ignored == list(positions)


def test_a_tensor_may_have_its_other_name_only(program: Program) -> None:
    others = {real: other for other, real in COPIES.items()}
    found = mapped(program, {others.get(name, name): x for name, x in bert_tensors().items()})
    assert {name: found.names[name] for name in others} == others
    assert found.copies == {}


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        ("cls.", "DIR has no tensor cls.predictions.bias, cls.seq_relationship.weight, "),
        ("bert.pooler", "DIR has no tensor bert.pooler.dense.bias, bert.pooler.dense.weight; use "),
        ("cls.seq", "BertForPreTraining with its config.json"),
    ],
    ids=str,
)
def test_missing_heads_are_named(program: Program, left_out: str, line: str) -> None:
    kept = {name: x for name, x in bert_tensors().items() if not name.startswith(left_out)}
    with pytest.raises(UserError) as error:
        mapped(program, kept)
    assert line in str(error.value)


@pytest.mark.parametrize("name", ["classifier.weight", "lm_head.weight", "gamma", "x.gamma"])
def test_heads_of_other_models_are_refused_by_name(program: Program, name: str) -> None:
    with pytest.raises(UserError, match=f"DIR has {name}, unknown to the model of its config"):
        mapped(program, bert_tensors() | {name: np.zeros(2)})


# ---- copies ------------------------------------------------------------------------------------


def test_copies_are_compared_when_they_are_read(program, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(directories, "AT_A_TIME", 5 * 12)  # rows
    tensors = bert_tensors()
    tensors |= {copy: tensors[name].copy() for copy, name in COPIES.items()}
    same = written(tmp_path / "same", tensors)
    convert(["--check", str(same)])
    title = capsys.readouterr().out.splitlines()[0]
    assert title.endswith("; compared on reading: " + ", ".join(sorted(COPIES)))
    params = read_params(program, same)
    np.testing.assert_array_equal(params["tokens.table"], tensors[TABLE])
    for number, (copy, name) in enumerate(COPIES.items()):
        changed = tensors[copy].copy()
        changed[VOCAB - 1] += 1  # the last row alone
        other = written(tmp_path / str(number), tensors | {copy: changed})
        with pytest.raises(UserError) as error:
            read_params(program, other)
        assert f"{other}: {copy} and {name} differ, but the model has one " in str(error.value)


def test_a_copy_of_another_shape_is_refused_by_name(program: Program) -> None:
    (copy, _), *_ = COPIES.items()
    with pytest.raises(UserError, match=rf"DIR: {copy} is \[3\], but the model needs \[37, 12\]; "):
        mapped(program, bert_tensors() | {copy: np.zeros(3)})


# ---- config.json -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"is_decoder": True}, "is_decoder=True; use a model with is_decoder=false"),
        ({"add_cross_attention": True}, "add_cross_attention=True; use a model with add_cross"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type=relative_key; use "),
        ({"type_vocab_size": 1}, "type_vocab_size=1; use a model with type_vocab_size=2"),
        ({"hidden_act": "mish"}, "hidden_act=mish; use a model with one of gelu_new, "),
        (
            {"max_position_embeddings": 0},
            "max_position_embeddings=0; it must be a whole number above 0",
        ),
        ({"layer_norm_eps": "small"}, 'layer_norm_eps="small"; it must be a number above 0'),
    ],
    ids=str,
)
def test_configs_of_no_such_model(config: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        read_sizes(CONFIG | config, tied=True, where="there")


def test_what_is_written_is_read() -> None:
    changes = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-9}
    fields = read_sizes(CONFIG | changes, tied=True, where="there")
    assert (fields["activation"], fields["norm_eps"]) == ("gelu-tanh", 1e-9)
    tokenizer = ByteTokenizer(MASK_TOKENS)
    found = config_json(ModelConfig(**nested(fields)), dtype="float32", tokenizer=tokenizer)
    assert read_sizes(found, tied=True, where="there") == fields
    assert found["pad_token_id"] is None  # not a row of the model's table
    model = ModelConfig(**nested(fields | {"vocab_size": tokenizer.vocab_size}))
    found = config_json(model, dtype="float32", tokenizer=tokenizer)
    assert found["pad_token_id"] == tokenizer.token_id("[PAD]")


@pytest.mark.parametrize("options", [{"norm": "rmsnorm"}, {"attention_scale": 0.5}, {"window": 4}])
def test_what_a_bert_does_not_have_is_not_written(options: dict) -> None:
    name = next(iter(options))
    causal = {"causal": True} if name == "window" else {}  # otherwise it alone is refused
    model = ModelConfig(family="bert", vocab_size=13, **options, **causal)
    with pytest.raises(UserError, match=f"model.{name}="):
        config_json(model, dtype="float32", tokenizer=ByteTokenizer())


# ---- commands ----------------------------------------------------------------------------------


def test_there_and_back_keeps_every_bit(tmp_path: Path, capsys) -> None:
    tensors = bert_tensors()
    there = written(tmp_path / "there", tensors)
    out = check_there_and_back(there.path, tensors, tmp_path)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    line = refused(capsys, generate, ["--run-dir", str(there), "--platform=cpu"])
    assert "model.family=bert does not write text; use a decoder" in line


@pytest.mark.slow
def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load: Callable = pytest.importorskip("transformers").BertForPreTraining.from_pretrained
    there = written(tmp_path / "there", bert_tensors())
    run, out = tmp_path / "run", tmp_path / "out"
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    convert(["--to-hf", str(run), "--out", str(out), "--quiet"])
    model, info = load(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = dict(load(there.path).named_parameters())
    for name, x in model.named_parameters():
        assert torch.equal(x, expected[name]), name
