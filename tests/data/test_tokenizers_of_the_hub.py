"""Tokenizers of the kinds on the Hub give texts the same ids as transformers."""

import json
import runpy
from pathlib import Path

import pytest
from hugging.tokenizer_kinds import KINDS, write_kind

from jaxptd.data import load_tokenizer
from jaxptd.data.tokenizers import continuation

GOLDEN = Path(__file__).parents[1] / "golden"
JUDGED = json.loads((GOLDEN / "tokenizers.json").read_text())


@pytest.fixture(params=KINDS)
def kind(request, tmp_path):
    """A tokenizer, and the results of transformers with its files."""
    folder = write_kind(tmp_path / "there", request.param)
    return load_tokenizer(folder), JUDGED[request.param]


def test_ids_begins_and_ends_are_those_of_transformers(kind):
    ours, theirs = kind
    for text, ids in theirs["ids"].items():
        assert ours.encode(text).tolist() == ids, text
    assert list(ours.begin) == theirs["begin"]
    assert theirs["eos"] in ours.ends


def test_texts_are_those_of_transformers(kind):
    ours, theirs = kind
    end = ours.end_of_document  # a line feed in these tests
    pairs = zip(theirs["ids"].values(), theirs["decoded"], strict=True)
    for ids, text in ((ids, text) for ids, text in pairs if end not in ids):
        assert ours.decode(ids) == text


def test_a_prompt_and_its_continuation_are_the_text(kind):
    """Cuts texts at every token, even between the bytes of a letter."""
    ours, theirs = kind
    for ids in ([*ours.begin, *ids] for ids in theirs["ids"].values()):
        whole = ours.decode(ids)
        for place in range(len(ids)):
            known = ours.decode(ids[:place]).rstrip("\N{REPLACEMENT CHARACTER}")
            assert known + continuation(ours, ids[:place], ids[place:]) == whole


@pytest.mark.slow
def test_the_golden_ids_are_those_of_transformers():
    pytest.importorskip("transformers")
    judged = runpy.run_path(str(GOLDEN / "make_tokenizers.py"))["judged"]
    assert {name: judged(name) for name in KINDS} == JUDGED
