"""`jaxptd data` writes the tokens that training would read."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers

from jaxptd.commands import data as command
from jaxptd.commands.data import main
from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, open_data
from jaxptd.data.token_files import open_token_file, write_bin
from jaxptd.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with two corpora in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one document")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": "three"}\n')
    return tmp_path


def test_tokenized_once_or_every_time_is_the_same(folder, capsys, monkeypatch):
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: 0.0))
    main(["--source", "a.txt", "--source", "*.jsonl", "--tokenizer", "bytes", "--out", "t.bin"])
    printed = capsys.readouterr()
    sizes = {"seq_length": 4, "vocab_size": 257, "seed": 0}
    text = DataConfig(source=["a.txt", "b.jsonl"], validation_fraction=0.0)
    file = DataConfig(source="t.bin", validation_fraction=0.0)
    expected = open_data(text, ByteTokenizer(), **sizes).train
    read = open_data(file, ByteTokenizer(), **sizes).train
    assert (
        read.tokens.tolist()
        == expected.tokens.tolist()
        == [*b"one document", 256, *b"two", 256, *b"three", 256]
    )
    assert printed.out == "t.bin: 23 tokens from 2 files; vocabulary 257, end of document 256\n"
    assert printed.err == ""  # progress appears after ten seconds; the clock stands still


def test_the_corpus_of_a_config(folder, capsys):
    (folder / "run.yaml").write_text("data: {source: [a.txt, b.jsonl]}\n")
    main(["--config", "run.yaml", "--out", "t.bin", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "out": "t.bin",
        "tokens": 23,
        "files": 2,
        "vocabulary": 257,
        "end_of_document": 256,
    }
    main(["--config", "run.yaml", "--data.source", "a.txt", "--out", "u.bin", "--json"])
    assert json.loads(capsys.readouterr().out)["tokens"] == 13


def test_padding_is_said_for_whole_records(folder, capsys):
    """With --config alone, as only a config has the length of a sequence."""
    (folder / "run.yaml").write_text(
        "model: {seq_length: 12}\ndata: {source: [a.txt, b.jsonl], documents: whole}\n"
    )
    main(["--config", "run.yaml", "--out", "t.bin"])
    said = capsys.readouterr().err
    assert said.startswith(
        "3 whole records in 2 sequences of 12: 16.67% padding (one record per sequ"
    )
    (folder / "b.jsonl").write_text('{"text": "a long record of words"}\n')
    main(["--config", "run.yaml", "--out", "u.bin"])
    said = capsys.readouterr().err
    assert said.startswith("warning: data.documents=whole: record 2 has 23 tokens, and a sequence ")
    main(["--config", "run.yaml", "--source", "b.jsonl", "--out", "v.bin", "--quiet"])
    assert capsys.readouterr().err == ""


def test_records_that_are_too_long_are_left_out_and_counted(folder, capsys):
    (folder / "run.yaml").write_text(
        "data: {source: [a.txt, b.jsonl], too_long: drop}\nmodel: {seq_length: 5}\n"
    )
    main(["--config", "run.yaml", "--out", "t.bin"])
    assert open_token_file(folder / "t.bin").tolist() == [*b"two", 256, *b"three", 256]
    assert "1 of 3 records have more tokens than a sequence, 6; they were left out" in (
        capsys.readouterr().err
    )


def test_without_out_it_counts_what_a_run_reads(folder, capsys):
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "more"}]
    (folder / "c.jsonl").write_text("\n".join([json.dumps({"chat": chat})] * 3))
    (folder / "run.yaml").write_text(
        "data: {source: c.jsonl, messages_field: chat, chat_template: t.jinja, train_on: last,"
        " validation_fraction: 0.5, chat_date: 2026-12-31}\nmodel: {seq_length: 20}\n"
    )
    (folder / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
        "{{ 'assistant' if add_generation_prompt }}"
    )
    before = sorted(os.listdir(folder))
    main(["--config", "run.yaml", "--json", "--data.source", "c.jsonl"])
    found = json.loads(capsys.readouterr().out)
    assert found["training_tokens"] + found["validation_tokens"] == 3 * len("userxassistantmore")
    assert "3 chats with 54 tokens, of which 12 (22%) count in the loss" in found["remarks"]
    main(["--config", "run.yaml"])
    out, err = capsys.readouterr()
    assert "3 chats with 54 tokens" in out and "tokens for validation" in out and not err
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_prints_nothing(folder, capsys, monkeypatch, terminal):
    monkeypatch.setattr(command.sys.stderr, "isatty", lambda: terminal, raising=False)
    main(["--source", "a.txt", "--out", "t.bin", "--quiet"])
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_is_one_line_rewritten(folder, capsys, monkeypatch):
    monkeypatch.setattr(command.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(command.time, "monotonic", iter(range(100)).__next__)
    main(["--source", "a.txt", "b.jsonl", "--out", "t.bin"])
    lines = capsys.readouterr().err.split("\r")
    found = [line.split(",")[0] for line in lines]
    assert found == ["file 1 of 2", "file 2 of 2", "file 2 of 2", "\n"]


def test_nothing_is_printed_before_an_error(folder, capsys):
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{')
    with pytest.raises(UserError, match=r"broken\.jsonl line 2"):
        main(["--source", "broken.jsonl", "--out", "t.bin"])
    assert capsys.readouterr() == ("", "")


def test_a_large_vocabulary_has_ids_of_32_bits(folder, capsys):
    words = tokenizers.models.WordLevel({"</s>": 0, "a": 70_000, "<s>": 7}, unk_token="</s>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>", "<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="$A $B", special_tokens=[("<s>", 7)]
    )
    made.save("big.json")
    (folder / "big.txt").write_text("a a</s>")
    main(["--source", "big.txt", "--out", "t.bin", "--tokenizer", "big.json"])
    out, err = capsys.readouterr()
    assert out.startswith("t.bin: 4 tokens from 1 files; vocabulary 70001, end of document 0")
    assert "each document begins with <s>" in err and "spells out special tokens once (</s>)" in err
    assert open_token_file(folder / "t.bin").tolist() == [7, 70_000, 70_000, 0]
    options = ["--begin-token", "none", "--special-tokens", "text", "--quiet"]
    main(["--source", "big.txt", "--out", "u.bin", "--tokenizer", "big.json", *options])
    assert open_token_file(folder / "u.bin").tolist()[:2] == [70_000, 70_000]
    assert capsys.readouterr() == ("", "")


def test_it_is_a_command_that_overwrites_nothing(folder):
    command = [sys.executable, "-m", "jaxptd", "data", "--source", "a.txt", "--out", "t.bin"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0
    assert len(open_token_file(folder / "t.bin")) == 13
    assert again.returncode == 2
    assert again.stderr == "error: --out t.bin: t.bin exists; choose another name, or remove it\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "a.txt"], "required: --out F, the .bin file to write, or --config F, to"),
        (["--source", "a.txt", "--out", "tokens"], r"--out tokens: .*end it in \.bin"),
        (["--source", "a.txt", "--out", "no/t.bin"], "there is no folder no; make it first"),
        (["--source", "a.txt", "--out", "taken.bin"], r"taken\.idx exists; choose another"),
        (["--source", "a.txt", "--out", "t.bin", "--tokenizer", "gpt2"], "no such file"),
        (
            ["--source", "a.txt", "tokens.bin", "--out", "t.bin"],
            r"tokens\.bin already holds tokens",
        ),
        (["--source", "missing", "--out", "t.bin"], "matches no file"),
        (
            ["--config", "prompts.yaml", "--source", "a.txt", "--out", "t.bin"],
            r"prompt_field='question' in the config: a \.bin cannot tell prompts from answers",
        ),
        (
            ["--config", "mix.yaml", "--out", "t.bin"],
            "is a mixture, but a .bin holds one source; convert them",
        ),
        (["--source", "a.txt", "broken.jsonl", "--out", "t.bin"], r"broken\.jsonl line 1"),
        (["--config", "chats.yaml", "--out", "t.bin"], "the config reads chats, and a .bin does n"),
        (["--config", "cut.yaml", "--out", "t.bin"], "data.too_long=cut in the config: a .bin sh"),
        (
            ["--config", "refuse.yaml", "--out", "t.bin"],
            "record 1 of data.source has 13 tokens, and a sequence 9",
        ),
    ],
)
def test_bad_input_is_an_error_that_writes_nothing(folder, options, message):
    write_bin("tokens.bin", np.arange(9))
    (folder / "taken.idx").touch()
    (folder / "broken.jsonl").write_text("{")
    (folder / "mix.yaml").write_text("data: {source: {a.txt: 1, b.jsonl: 2}}\n")
    (folder / "chats.yaml").write_text("data: {source: a.txt, messages_field: chat}\n")
    for rule in ("cut", "refuse"):
        data = f"data: {{source: a.txt, too_long: {rule}}}\nmodel: {{seq_length: 8}}\n"
        (folder / f"{rule}.yaml").write_text(data)
    (folder / "prompts.yaml").write_text("data: {prompt_field: question}\n")
    before = sorted(os.listdir(folder))
    with pytest.raises(UserError, match=message):
        main(options)
    assert sorted(os.listdir(folder)) == before
