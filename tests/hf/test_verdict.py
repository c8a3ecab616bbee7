"""`jaxptd convert --check`: what a directory contains, and whether it can be trained."""

import json
from pathlib import Path

import pytest
from command_lines import refused
from hugging import bert, gpt2_tensors, swin, write_directory
from hugging.tokenizer import GENERATION, WORDS, write_tokenizer

from jaxptd.hf.convert import main
from jaxptd.hf.verdict import check, lines


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GPT-2 with a larger tokenizer."""
    folder = write_directory(tmp_path / "model", gpt2_tensors())
    write_tokenizer(folder, WORDS)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def facts(folder: Path) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in lines(check(folder)))


def test_a_line_for_each_fact_and_a_verdict(model: Path, capsys) -> None:
    expected = {
        "weights": "readable, 9792 parameters",
        "dtype": "F32 in the files; runs compute in model.dtype=float32",
        "context length": "16 positions; runs use model.seq_length=16",
        "tokenizer": "WordLevel, 40 ids; the model has 13, and texts with larger ids are refused",
        "begin": "<s> (1)",
        "ends": "</s> (2), <|eot|> (3)",
        "chat template": "none",
        "verdict": "can be trained and generated from",
    }
    assert facts(model) == expected
    main(["--check", str(model)])
    out = capsys.readouterr().out
    assert out.splitlines()[-len(expected) :] == [f"{k}: {fact}" for k, fact in expected.items()]
    main(["--check", str(model), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == expected["verdict"]
    assert (found["begin"], found["ends"]) == ({"1": "<s>"}, {"2": "</s>", "3": "<|eot|>"})
    assert (found["positions"], found["seq_length"], found["chat_template"]) == (16, 16, False)
    assert found["tokenizer"] == {"kind": "WordLevel", "ids": 40}
    assert (found["problems"], len(found["mapping"])) == ({}, 16)


@pytest.mark.parametrize(
    ("name", "content", "there"),
    [
        ("chat_template.jinja", "{{ messages }}", "yes"),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', "yes"),
        ("tokenizer_config.json", '{"chat_template": null}', "none"),
    ],
)
def test_a_chat_template(model: Path, name: str, content: str, there: str) -> None:
    (model / name).write_text(content)
    assert facts(model)["chat template"] == there


def test_a_directory_without_a_tokenizer(gpt2: Path) -> None:
    found = facts(gpt2)
    assert found["tokenizer"] == "none: there is no tokenizer.json; give --data.tokenizer"
    own = "with a tokenizer of your own, --data.tokenizer"
    assert found["verdict"] == f"can be trained and generated from, {own}"
    assert {"begin", "ends"}.isdisjoint(found)


def test_families_that_write_no_text(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "bert", bert.bert_tensors(), base=bert.CONFIG)
    write_tokenizer(folder, WORDS)
    found = facts(folder)
    assert found["verdict"] == "can be trained"
    assert "begin" not in found  # its objective decides how sequences begin
    found = facts(write_directory(tmp_path / "swin", swin.swin_tensors(), base=swin.CONFIG))
    assert list(found) == ["weights", "dtype", "verdict"]


def test_each_problem_has_a_line(model: Path, capsys) -> None:
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (model / "tokenizer.json").write_text("{")
    found = facts(model)
    assert list(found) == ["chat template", "weights", "tokenizer", "verdict"]
    assert found["weights"].startswith(f"cannot be read: {model}/model.safetensors is damaged")
    assert found["tokenizer"].startswith(f"cannot be read: data.tokenizer='{model}/tokenizer.json'")
    assert found["verdict"] == found["weights"]
    error = refused(capsys, main, ["--check", str(model), "--quiet"])
    assert error == f"error: {found['weights'].removeprefix('cannot be read: ')}\n"
    with pytest.raises(ValueError, match="is damaged"):
        main(["--check", str(model), "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == found["verdict"]
    assert set(said["problems"]) == {"weights", "tokenizer"}


def test_remarks_stand_before_the_verdict(tmp_path: Path) -> None:
    """The remark here: an output layer exists although the config says that it is tied."""
    folder = write_directory(tmp_path / "model", gpt2_tensors(tied=False))
    *_, remark, verdict = lines(check(folder))
    assert remark.startswith(f"remark: {folder}: tie_word_embeddings is true, but lm_head.weight")
    assert verdict.startswith("verdict: can be trained")


@pytest.mark.parametrize("kind", ['"mamba"', "null", "[]"])
def test_a_model_that_is_not_read(model: Path, kind: str) -> None:
    (model / "config.json").write_text(f'{{"model_type": {kind}}}')
    found = facts(model)
    assert "use a model of gpt2, llama" in found["verdict"]
    assert found["begin"] == "<s> (1)"


def test_a_config_that_is_no_json(model: Path) -> None:
    (model / "config.json").write_text("{")
    assert facts(model)["verdict"].startswith(f"cannot be read: {model}/config.json is damaged")
