"""What an export keeps from the run's base model: configs, tokenizer, chat template."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hugging import bert, gpt2_tensors, random_directory, swin, t5, write_directory
from hugging.tokenizer import GENERATION, WORDS, write_tokenizer
from runs import TEXT

import jaxptd
from jaxptd.config import CheckpointConfig, Config, DataConfig, ModelConfig, nested, option
from jaxptd.data.tokenizers import load_tokenizer
from jaxptd.errors import UserError
from jaxptd.hf import base
from jaxptd.hf.base import base_of, keep_base
from jaxptd.hf.convert import main as convert
from jaxptd.hf.sizes import config_json, config_over_base, read_sizes
from jaxptd.run.folder import RunDir
from jaxptd.run.saved import with_kept_files
from jaxptd.train import main as train

SIZES = ("hidden_size", "num_kv_heads", "head_size", "rope.theta", "vocab_size", "max_positions")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
    "initializer_range": 0.01,
    "pretraining_tp": 1,
    "use_cache": True,
    "transformers_version": "4.46.0",
}
SETTINGS = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "pad_token": "<pad>",
    "model_max_length": 32,
}
OTHERS = {
    "special_tokens_map.json": '{"bos_token": "<s>"}',
    "added_tokens.json": '{"<|eot|>": 3}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "tokenizer.model": "a model of sentencepiece",
    "merges.txt": "#version: 0.2",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory like those on the Hub."""
    folder = random_directory(tmp_path_factory.mktemp("hub") / "llama", LLAMA)
    write_tokenizer(folder, WORDS)
    for name, content in {"generation_config": GENERATION, "tokenizer_config": SETTINGS}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name, text in OTHERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "modeling_llama.py").write_text("raise SystemExit")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def there_and_back(directory: Path, folder: Path) -> Path:
    """Converts a temporary copy of a directory, and returns the run's export."""
    there, run, back = folder / "there", folder / "run", folder / "back"
    shutil.copytree(directory, there)
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    shutil.rmtree(there)
    convert(["--to-hf", str(run), "--out", str(back), "--quiet"])
    return back


def test_a_directory_comes_back_as_it_was_when_it_has_gone(llama: Path, tmp_path: Path) -> None:
    back = there_and_back(llama, tmp_path)
    assert read(back) == LLAMA | {"torch_dtype": "float32"}
    before, after = contents(llama), contents(back)
    assert set(before) - set(after) == {"modeling_llama.py"}  # code is never copied
    for name in set(after) - {"config.json", "model.safetensors"}:
        assert after[name] == before[name], name


def options(llama: Path, folder: Path, **others: object) -> list[str]:
    (folder / "text.txt").write_text(TEXT)
    values = {
        "from": llama,
        "data.source": folder / "text.txt",
        "train.run_dir": folder / "run",
        "train.platform": "cpu",
        "train.steps": 1,
        "train.eval_every": 0,
        "train.sample_tokens": 0,
        "optimizer.warmup_steps": 0,
    }
    return [f"--{name}={value}" for name, value in {**values, **others}.items()]


def test_a_fine_tuned_run_has_its_base_and_a_run_from_it_too(llama, tmp_path, capsys) -> None:
    there, run, back = tmp_path / "there", tmp_path / "run", tmp_path / "back"
    shutil.copytree(llama, there)
    assert train(options(there, tmp_path)) == 0
    out = capsys.readouterr().out
    assert f"starting from the weights of {there}" in out
    assert "training tokens in sequences of 32" in out
    text = (run / "config.yaml").read_text()
    assert f"start: {there}" in text
    assert f"tokenizer: {there}" in text
    assert "vocab_size: 40" in text
    assert "from" not in text
    for start in (run, run / "checkpoints" / "00000001"):
        later = config_with(start, there)
        assert base_of(tmp_path / "none", later) == contents(run / "base")
    shutil.rmtree(there)
    convert(["--to-hf", str(run), "--out", str(back), "--quiet"])
    assert read(back) == LLAMA | {"torch_dtype": "float32"}
    assert read(back, "generation_config.json") == GENERATION
    assert (back / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_run_of_python_has_its_base_when_it_is_saved(llama, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, tmp_path / "there")
    run = jaxptd.from_hf("there", seq_length=8, platform="cpu")
    assert (run.config.checkpoint.start, run.config.data.tokenizer) == ("there", "there")
    assert not (tmp_path / "runs").exists()
    run.save()
    shutil.rmtree(tmp_path / "there")
    assert set(contents(run.path / "base")) > {"config.json", "tokenizer.json", *OTHERS}
    again = jaxptd.load(run.path, platform="cpu")
    assert again.config.data.tokenizer == str(run.path / "base")  # the only remaining one
    assert again.tokenizer.ends == (2, 3)


def kept(run: Path, config: Config, lines: list[str]) -> dict[str, bytes]:
    keep_base(RunDir(run), config, say=lines.append, anew=True)
    return contents(run / "base")


def config_with(start: Path, tokenizer: object, **model: Any) -> Config:
    sizes = {"family": "llama", "vocab_size": 40} | model
    data, checkpoint = DataConfig(tokenizer=str(tokenizer)), CheckpointConfig(start=str(start))
    return Config(ModelConfig(**nested(sizes)), data=data, checkpoint=checkpoint)


def test_another_tokenizer_has_its_own_ids_and_files(llama: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", ("<unk>", "[P]", "[S]", "</s>", "[E]"), "[S]")
    settings = {"bos_token": "[S]", "eos_token": "[E]", "pad_token": "[P]"}
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "run").mkdir()
    found = kept(tmp_path / "run", config_with(llama, other), [])
    ids = {"bos_token_id": 2, "eos_token_id": 4, "pad_token_id": 1}
    assert json.loads(found["config.json"]) == LLAMA | ids
    generation = {name: x for name, x in GENERATION.items() if name != "suppress_tokens"}
    assert json.loads(found["generation_config.json"]) == generation | ids
    assert found["tokenizer.json"] == (other / "tokenizer.json").read_bytes()
    assert set(found) == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    }
    found = kept(tmp_path / "run", config_with(llama, other / "tokenizer.json"), [])
    # Taken from the tokenizer file alone: its begin token, and the first end token by name.
    ids = {"bos_token_id": 2, "eos_token_id": 3}
    expected = {name: x for name, x in LLAMA.items() if name != "pad_token_id"} | ids
    assert json.loads(found["config.json"]) == expected
    found = kept(tmp_path / "run", config_with(llama, "bytes", vocab_size=300), [])
    assert json.loads(found["config.json"])["eos_token_id"] == 256
    assert "tokenizer.json" not in found


def test_the_same_tokenizer_may_be_elsewhere_and_have_another_template(llama, tmp_path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    shutil.copy(llama / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text("mine")
    (tmp_path / "run").mkdir()
    found = kept(tmp_path / "run", config_with(llama, folder), [])
    assert json.loads(found["config.json"]) == LLAMA
    assert found["chat_template.jinja"] == b"mine"
    assert found["added_tokens.json"] == (llama / "added_tokens.json").read_bytes()
    found = kept(tmp_path / "run", config_with(llama, llama / "tokenizer.json"), [])
    assert set(found) == set(contents(llama)) - {"model.safetensors", "modeling_llama.py"}


def test_the_chat_template_of_a_run_replaces_its_tokenizer_s(llama, tmp_path) -> None:
    own, other = tmp_path / "own.jinja", tmp_path / "other"
    own.write_text("{{ messages }} mine")
    (tmp_path / "run").mkdir()
    shutil.copytree(llama, other)
    write_tokenizer(other, [*WORDS, "new"])

    def config_of(tokenizer: Path) -> Config:
        config = config_with(llama, tokenizer)
        chats = {"messages_field": "messages", "chat_template": str(own)}
        return dataclasses.replace(config, data=dataclasses.replace(config.data, **chats))

    for tokenizer in (llama, other):  # the base's, and another
        found = kept(tmp_path / "run", config_of(tokenizer), [])
        assert found["chat_template.jinja"] == b"{{ messages }} mine"
        assert "additional_chat_templates/tools.jinja" not in found
        assert found["tokenizer.json"] == (tokenizer / "tokenizer.json").read_bytes()
    own.unlink()
    with pytest.raises(UserError, match="data.chat_template .*own.jinja: No such file.*put the fi"):
        kept(tmp_path / "run", config_of(llama), [])


def test_a_run_whose_chat_template_has_gone_has_its_copy(llama, tmp_path) -> None:
    own, run = tmp_path / "own.jinja", tmp_path / "run"
    own.write_text("{{ messages }} mine")
    config = config_with(llama, llama)
    chats = {"messages_field": "messages", "chat_template": str(own)}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **chats))
    run.mkdir()
    kept(run, config, [])
    assert with_kept_files(config, run / "base") == config
    own.unlink()
    data = with_kept_files(config, run / "base").data
    assert data.chat_template == str(run / "base" / "chat_template.jinja")
    assert data.tokenizer == str(llama)


def test_a_base_is_kept_once_unless_the_run_begins_anew(llama, tmp_path, monkeypatch) -> None:
    run, lines = tmp_path / "run", list[str]()
    run.mkdir()
    first = kept(run, config_with(llama, llama), lines)
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    (other / "chat_template.jinja").write_text("other")
    keep_base(RunDir(run), config_with(other, other), say=lines.append)
    assert contents(run / "base") == first
    monkeypatch.setattr(base, "LARGEST", 200)
    again = kept(run, config_with(other, other), lines)
    assert again["chat_template.jinja"] == b"other"
    assert "tokenizer.json" not in again
    assert any(
        "tokenizer.json has " in line and "exports keep files of at most 200" in line
        for line in lines
    )
    keep_base(RunDir(run), Config(), say=lines.append, anew=True)
    assert [path.name for path in run.iterdir()] == []


@pytest.mark.parametrize("family", ["bert", "t5", "swin"])
def test_other_families_come_back_as_they_were(family: str, tmp_path: Path) -> None:
    made = {
        "bert": lambda: (bert.CONFIG, bert.bert_tensors()),
        "t5": lambda: (t5.CONFIG, t5.t5_tensors()),
        "swin": lambda: (swin.CONFIG, swin.swin_tensors()),
    }
    config, tensors = made[family]()
    labels = {"label2id": {"cat": 0}} if family == "swin" else {}
    own = {"architectures": ["x"], "dtype": "bfloat16", "my_key": [1], **labels}
    there = write_directory(tmp_path / "hub", tensors, base=config, **own)
    (there / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    back = read(there_and_back(there, tmp_path))
    expected = {**read(there), "dtype": "float32", "architectures": back["architectures"]}
    assert back["architectures"] != ["x"]
    assert back == expected
    assert (tmp_path / "back" / "preprocessor_config.json").exists()


def test_fewer_positions_are_ours(tmp_path: Path) -> None:
    there = write_directory(tmp_path / "hub", gpt2_tensors(), attn_pdrop=0.1)
    sizes = read_sizes(read(there), tied=True, where=there) | {"max_positions": 8, "seq_length": 8}
    model = ModelConfig(**nested(sizes))
    ours = config_json(model, dtype="float32", tokenizer=None)
    found = config_over_base(read(there), model, ours=ours)
    others = {"n_positions": 8, "torch_dtype": "float32"}
    assert found == read(there) | others


def test_a_base_that_does_not_say_the_model_gives_the_rest_only() -> None:
    """A base that reads back as another model, as after a change of versions."""
    model = ModelConfig(**nested(read_sizes(LLAMA, tied=False, where="x")))
    ours = config_json(model, dtype="float32", tokenizer=None)
    strange = LLAMA | {"hidden_size": 16, "rope_parameters": {"rope_type": "x"}, "auto_map": {}}
    found = config_over_base(strange, model, ours=ours)
    there = ModelConfig(**nested(read_sizes(found, tied=False, where="x")))
    assert all(option(there, name) == option(model, name) for name in SIZES)
    assert found["initializer_range"] == 0.01
    assert {"rope_parameters", "auto_map"}.isdisjoint(found)


def test_ids_of_a_run_without_a_base(llama: Path) -> None:
    """The ids come from the tokenizer: the token that begins texts, and all that end them."""
    model = ModelConfig(**nested(read_sizes(LLAMA, tied=False, where="x")))
    found = config_json(model, dtype="float32", tokenizer=load_tokenizer(llama))
    assert (found["bos_token_id"], found["eos_token_id"]) == (1, [2, 3])
