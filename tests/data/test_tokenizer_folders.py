"""Hugging Face tokenizer folders: which id ends a document, and folders that are refused."""

import json
import os

import pytest
import tokenizers

from jaxptd.data.tokenizers import load_tokenizer
from jaxptd.errors import UserError

VOCABULARY = {"?": 0, "a": 1, "<eos>": 2, "<turn>": 3, "</s>": 4}


@pytest.fixture
def folder(tmp_path):
    """Folder of a model whose tokenizer knows five words."""
    model = tokenizers.models.WordLevel(VOCABULARY, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, own=None, generation=None):
    for name, end in (("config.json", own), ("generation_config.json", generation)):
        if end is not None:
            (folder / name).write_text(json.dumps({"model_type": "llama", "eos_token_id": end}))


@pytest.mark.parametrize(
    ("own", "generation", "end"),
    [
        (None, None, 4),  # the first known name: </s>
        (2, None, 2),
        (None, 3, 3),
        (2, 2, 2),
        ([3, 2], None, 3),
        (None, [3, 2], 3),
        (2, 3, 2),  # files that disagree, like Yi's
        (2, [3, 2], 2),  # a chat model: turns and documents have different ends
        ([1, 2, 3], [3, 2], 2),
        ([], 3, 3),
    ],
)
def test_the_end_of_document_is_that_of_the_configs(folder, own, generation, end):
    write(folder, own, generation)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.end_of_document, tokenizer.vocab_size) == (end, 5)
    assert tokenizer.encode("a").tolist() == [1]


def test_configs_without_the_field_name_no_end(folder):
    (folder / "config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert load_tokenizer(folder).end_of_document == 4


def test_a_file_does_not_read_the_configs_beside_it(folder):
    write(folder, 2, "broken")
    assert load_tokenizer(folder / "tokenizer.json").end_of_document == 4


@pytest.mark.parametrize(
    ("own", "generation", "message"),
    [
        (5, None, r"tokenizer\.json' has no token 5, the eos_token_id of the config next to it"),
        ("</s>", None, r"/config\.json has eos_token_id=</s>; use a token id"),
        (None, [2, "3"], r"generation_config\.json has eos_token_id=\[2, '3'\]; use a token id"),
        (True, None, "has eos_token_id=True; use a token id"),
        (-1, None, "has eos_token_id=-1; use a token id"),
        (2.0, None, "has eos_token_id=2.0; use a token id"),
    ],
)
def test_configs_that_contradict_are_an_error(folder, own, generation, message):
    write(folder, own, generation)
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(folder)
    assert str(error.value).startswith("data.tokenizer")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"config\.json is not JSON \(.*\); repair it"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[1]", "is not a JSON object; replace it with the model's"),
        (b'"eos"', "is not a JSON object"),
    ],
)
def test_a_broken_config_is_an_error(folder, content, message):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


def test_a_config_that_is_no_file_is_an_error(folder):
    os.mkfifo(folder / "config.json")
    with pytest.raises(UserError, match=r"config\.json is not a regular file; remove it"):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"folder without tokenizer\.json; use bytes, or the path"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UserError, match=r"write one next to tokenizer\.model with transformers'"):
        load_tokenizer(tmp_path)
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a regular file"):
        load_tokenizer(tmp_path)


def test_no_end_of_document_is_an_error_that_names_both_remedies(tmp_path):
    model = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"add one of <\|endoftext\|>.*config\.json has eos_token"):
        load_tokenizer(tmp_path)


def test_all_ends_of_both_configs_end_a_generation(folder):
    assert load_tokenizer(folder).ends == (4,)
    write(folder, 2, [3, 4])
    assert load_tokenizer(folder).ends == (3, 4, 2)
    assert load_tokenizer(folder / "tokenizer.json").ends == (4,)


def test_the_end_of_a_tokenizers_own_settings(folder):
    settings = {"eos_token": {"content": "<turn>"}, "pad_token": "[PAD]", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.end_of_document, tokenizer.begin) == (3, ())
    assert tokenizer.special == {"<turn>": 3, "[PAD]": 5}  # the ids that transformers gives them
    assert tokenizer.vocab_size == 6
    write(folder, 2)
    assert load_tokenizer(folder).end_of_document == 2


@pytest.mark.parametrize("content", ["[1]", '{"eos_token": 5}', '{"added_tokens_decoder": [1]}'])
def test_odd_settings_are_a_line_or_no_matter(folder, content):
    (folder / "tokenizer_config.json").write_text(content)
    if content == "[1]":
        with pytest.raises(UserError, match=r"tokenizer_config\.json is not a JSON object"):
            load_tokenizer(folder)
    else:
        assert load_tokenizer(folder).end_of_document == 4


def test_a_folder_of_an_older_kind_has_its_remedy(tmp_path):
    (tmp_path / "vocab.json").touch()
    with pytest.raises(UserError, match=r"write one next to vocab.json with transformers' save_"):
        load_tokenizer(tmp_path)
