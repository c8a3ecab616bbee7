"""The sets of `data.validation`: read whole and in order, named in errors, part of the identity."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxptd import DataConfig, UserError
from jaxptd.config import from_dict
from jaxptd.data import NOT_COUNTED, ByteTokenizer, Data, open_data
from jaxptd.data.batches import change
from jaxptd.models.families import family_of

SIZES: Any = {"seq_length": 8, "vocab_size": 257, "seed": 3}
TRAINED = "to be or not to be, that is the question"
LAW, POEM = "no one may be a judge in his own cause", "the woods are lovely, dark and deep"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in (("train", TRAINED), ("law", LAW), ("poem", POEM)):
        Path(f"{name}.txt").write_text(text)


def opened(**sets: Any) -> Data:
    config = DataConfig(source="train.txt", validation_fraction=0.0, validation=sets)
    return open_data(config, ByteTokenizer(), **SIZES)


def test_a_set_is_read_whole_and_in_order() -> None:
    data = opened(poem="poem.txt", both=["poem.txt", "law.txt"])
    assert list(data.evaluated) == ["both", "poem"]
    ids = [*POEM.encode(), 256, *LAW.encode(), 256]
    for name, tokens in (("poem", ids[: len(POEM) + 1]), ("both", ids)):
        windows = data.sets[name]
        assert windows.windows_per_epoch == (len(tokens) - 1) // 8
        expected = [tokens[8 * i : 8 * i + 9] for i in range(windows.windows_per_epoch)]
        assert windows.rows(np.arange(len(expected))).tolist() == expected


def test_the_held_out_part_stays_as_it_is_beside_sets() -> None:
    config = DataConfig(source=["train.txt", "poem.txt"], validation_fraction=0.2)
    alone = open_data(config, ByteTokenizer(), **SIZES)
    config = DataConfig(**{**vars(config), "validation": {"law": "law.txt"}})
    found = open_data(config, ByteTokenizer(), **SIZES)
    assert list(found.evaluated) == ["", "law"]
    assert found.evaluated[""] is found.validation
    for name in ("train", "validation"):
        rows = [getattr(each, name).rows(np.arange(3)) for each in (alone, found)]
        np.testing.assert_array_equal(*rows)
    assert found.identity[""] == alone.identity[""]
    assert list(alone.evaluated) == [""]


def test_prompts_of_a_set_are_left_out_of_its_loss() -> None:
    for name in ("a", "b"):
        records = [{"question": f"{name} 1 + 1?", "text": "it is 2"}] * 4
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    fields: Any = {"source": "a.jsonl", "prompt_field": "question", "validation_fraction": 0.0}
    config = DataConfig(**fields, validation={"b": "b.jsonl"})
    targets = open_data(config, ByteTokenizer(), **SIZES).sets["b"].targets(np.arange(3))
    assert (targets == NOT_COUNTED).any()
    assert bytes(targets[targets < 256].clip(0).astype(np.uint8)).count(b"?") == 0


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({}, "data.validation={}; name a set"),
        ({"a/b": "law.txt"}, "data.validation: 'a/b' names a set; use letters, digits"),
        ({"law": []}, "data.validation.law is empty; name paths or globs of files"),
        ({"law": "none.txt"}, "data.validation.law='none.txt' matches no file; use stdlib, or"),
        ({"law": ["law.txt", "train.txt"]}, "data.validation.law: train.txt is named twice, by"),
        ({"law": "short.txt"}, "data.validation.law: the corpus has 3 tokens, one sequence takes"),
        ({"law": 3}, "data.validation={'law': 3}: use a dict from a text to a text or a list"),
    ],
)
def test_a_bad_set_is_named_in_one_line(sets, words) -> None:
    Path("short.txt").write_text("ab")
    with pytest.raises(UserError) as found:
        opened(**sets)
    assert str(found.value).startswith(words)


def test_a_set_with_other_text_is_other_data() -> None:
    before = opened(law="law.txt").identity
    assert change(opened(law="law.txt").identity, before) is None
    Path("law.txt").write_text(LAW.upper())
    words = "data.validation.law has other tokens now (the text, tokenizer or chat template has "
    assert change(opened(law="law.txt").identity, before) == f"{words}changed) than"


def test_images_have_no_sets() -> None:
    fields = {"data": {"validation": {"law": "law.txt"}}}
    config = from_dict({"model": {"family": "swin", "num_heads": 4}, **fields})
    with pytest.raises(UserError, match="data.validation=.* applies to text, not to images"):
        family_of(config.model).check(config)
