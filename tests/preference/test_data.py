"""Pairs of answers as training data: text and chats, packing, bad input."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, Data, Pairs, open_data
from jaxptd.errors import UserError

TEMPLATE = """\
{%- for message in messages %}
{{- message.role[0] ~ ':' ~ message.content ~ ';' }}
{%- endfor %}
{{- 'a:' if add_generation_prompt }}"""
END = 256
CHATS = {"text_field": ..., "prompt_field": ...}  # fields that are not set
TEXTS = [("ab", "c", "de"), ("f", "ghi", "j"), ("klm", "no", "p")]
PLACES = [len(2 * prompt + chosen + rejected) + 1 for prompt, chosen, rejected in TEXTS]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").write_text(TEMPLATE)


def written(records: list[dict], name: str = "p.jsonl") -> str:
    Path(name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return name


def texts() -> str:
    return written([dict(zip(("q", "good", "bad"), each, strict=True)) for each in TEXTS])


def opened(source: Any, seq_length: int = 24, seed: int = 0, **fields: Any) -> Data:
    given: dict[str, Any] = {"validation_fraction": 0.0, "documents": "whole"}
    given |= {"text_field": "good", "rejected_field": "bad", "prompt_field": "q"} | fields
    config = DataConfig(source=source, **{k: x for k, x in given.items() if x is not ...})
    sizes = {"seq_length": seq_length, "vocab_size": 257, "seed": seed}
    return open_data(config, ByteTokenizer(), **sizes)


def of_chats(source: str, **fields: Any) -> Data:
    chats = {"messages_field": "chosen", "rejected_field": "rejected", "chat_template": "t.jinja"}
    return opened(source, seq_length=60, **CHATS | chats | fields)


def ids(text: str) -> list[int]:
    return [*text.encode()]


# ---- pairs of texts ------------------------------------------------------------------------------


def test_a_pair_is_both_answers_with_the_prompt_and_the_answers_count() -> None:
    data = opened(texts())
    samples = data.train
    assert isinstance(samples, Pairs)
    parts = [[*ids(prompt + answer), END] for prompt, *answers in TEXTS for answer in answers]
    assert samples.tokens.tolist() == [*itertools.chain(*parts)]
    counted = [[False] * len(p) + [True] * (len(a) + 1) for p, *both in TEXTS for a in both]
    assert samples.counted.tolist() == [*itertools.chain(*counted)]
    assert samples.ends.tolist() == np.cumsum([n + 1 for n in PLACES]).tolist()
    assert "3 pairs with 28 tokens, of which 16 (57%) count in the loss" in data.remarks


@pytest.mark.parametrize("seed", range(3))
def test_documents_of_a_sequence_are_the_texts_of_its_pairs_in_turn(seed: int) -> None:
    samples = opened(texts(), seed=seed).train
    numbers = np.arange(samples.windows_per_epoch)
    tokens, targets = samples.rows(numbers)[:, :-1], samples.targets(numbers)
    segments, found = samples.documents(numbers, END), []
    for row in numbers:
        for document in range(segments[row].max() + 1):
            inside = segments[row] == document
            text = tokens[row][inside].tolist()
            counted = targets[row][inside]
            found.append((text, counted[counted >= 0].tolist()))
    pairs = [
        (ids(prompt + answer) + [END] * end, [*ids(answer), END])
        for prompt, *answers in TEXTS
        for answer, end in zip(answers, (1, 0), strict=True)  # the last token is only a target
    ]
    assert sorted(found) == sorted(pairs)
    both = list(zip(found[::2], found[1::2], strict=True))
    assert sorted(both) == sorted(zip(pairs[::2], pairs[1::2], strict=True))


def test_the_reference_of_a_text_stands_at_its_first_token() -> None:
    samples = opened(texts()).train
    numbers = np.arange(samples.windows_per_epoch)
    with pytest.raises(UserError, match="log-probabilities of these pairs are not known"):
        samples.reference(numbers)
    for number in numbers:
        records = samples.records(number)
        scores = np.stack([-1.0 - records, -10.0 - records], 1).ravel()
        samples.put_scores(number, np.append(scores, 99.0))
    assert samples.scores.tolist() == [[-1, -10], [-2, -11], [-3, -12]]
    reference, segments = samples.reference(numbers), samples.documents(numbers, END)
    for row, number in enumerate(numbers):
        for document in range(segments[row].max() + 1):
            record, worse = samples.records(number)[document // 2], document % 2
            first = int(np.argmax(segments[row] == document))
            assert reference[row, first] == samples.scores[record, worse]
    assert np.count_nonzero(reference) == 6


def test_without_prompts_all_but_the_first_token_counts() -> None:
    samples = opened(texts(), prompt_field=...).train
    firsts = np.append(samples.ends[:-1], [0, *samples.middles])
    assert np.flatnonzero(~samples.counted).tolist() == sorted(firsts)[: len(firsts)]


def test_validation_holds_whole_pairs() -> None:
    data = opened(written([{"q": "a", "good": "b", "bad": "cd"}] * 10), validation_fraction=0.3)
    assert isinstance(data.validation, Pairs)
    assert (len(data.train.ends), len(data.validation.ends)) == (7, 3)
    assert data.validation.middles.tolist() == [3, 10, 17]
    assert (data.train.middles - data.train.ends).tolist() == [-4] * 7


# ---- pairs of chats ------------------------------------------------------------------------------


ASKED = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("yes", "no"))
WRITTEN = "u:hi;a:yes;u:hi;a:no;"


def test_what_follows_the_messages_that_both_chats_have_counts() -> None:
    data = of_chats(written([{"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}]))
    samples = data.train
    assert bytes(samples.tokens.tolist()).decode() == WRITTEN
    assert bytes(samples.tokens[samples.counted].tolist()).decode() == "yes;no;"
    assert samples.middles.tolist() == [11]
    assert "1 pair with 21 tokens, of which 7 (33%) count in the loss" in data.remarks


def test_a_prompt_of_messages_comes_before_both() -> None:
    records = [{"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}]
    samples = of_chats(written(records), prompt_field="prompt").train
    assert bytes(samples.tokens.tolist()).decode() == WRITTEN
    assert bytes(samples.tokens[samples.counted].tolist()).decode() == "yes;no;"
    again = [{"prompt": [ASKED], "chosen": [GOOD, ASKED, GOOD], "rejected": [GOOD, ASKED, BAD]}]
    samples = of_chats(written(again), prompt_field="prompt").train
    learned = bytes(samples.tokens[samples.counted].tolist()).decode()
    assert learned == "yes;u:hi;a:yes;yes;u:hi;a:no;"  # all that the prompt does not have


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": [ASKED, GOOD], "rejected": "no"}, "a chat of the pair is a text"),
        ({"chosen": [], "rejected": [ASKED, BAD]}, "a chat of the pair is an empty list"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "begin with different messages"),
        ({"chosen": [ASKED, GOOD]}, 'has no field "rejected"'),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, 1]}, "message 2 is a number"),
    ],
)
def test_bad_chats_are_refused(record: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_chats(written([record]))


def test_a_prompt_that_is_no_chat_is_refused() -> None:
    record = {"prompt": "hi", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
    with pytest.raises(UserError, match="its prompt is a text; beside chats it must be a list"):
        of_chats(written([record]), prompt_field="prompt")


def test_a_template_that_writes_the_prompt_in_two_ways_is_refused() -> None:
    Path("t.jinja").write_text("{{ messages | length }}" + TEMPLATE)
    with pytest.raises(UserError, match="writes the prompt differently once an answer follows"):
        of_chats(written([{"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}]))


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rejected_field": ""}, "data.rejected_field is empty"),
        ({"rejected_field": "good"}, "data.rejected_field is another field already"),
        ({"rejected_field": "q"}, "data.rejected_field is another field already"),
        ({"too_long": "cut"}, "data.too_long=cut with data.rejected_field"),
        (
            {"train_on": "all", "messages_field": "c", "text_field": ..., "prompt_field": ...},
            "train_on=all",
        ),
        ({"format": "alpaca", "text_field": ..., "prompt_field": ...}, "data.format=alpaca with"),
    ],
)
def test_options_that_pairs_do_not_have_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(texts(), **fields)


def test_a_mixture_has_no_pairs() -> None:
    with pytest.raises(UserError, match="with a mixture of sources, which has no pairs yet"):
        opened({texts(): 1.0})


def test_pairs_that_are_too_long_are_refused_or_left_out() -> None:
    long = {"q": "a", "good": "b" * 40, "bad": "c"}
    source = written([long, {"q": "a", "good": "b", "bad": "c"}])
    with pytest.raises(UserError, match="has 45 tokens.*=44 or more, or data.too_long=drop"):
        opened(source)
    data = opened(source, too_long="drop")
    assert len(data.train.ends) == 1
    assert any("1 of 2 pairs have more tokens than a sequence" in line for line in data.remarks)


def test_files_without_fields_hold_no_pairs() -> None:
    Path("p.txt").write_text("text")
    with pytest.raises(UserError, match="data.rejected_field='bad': p.txt has no fields"):
        opened("p.txt")
    np.arange(40, dtype=np.uint16).tofile("p.bin")
    with pytest.raises(UserError, match="holds tokens, which hold no pairs"):
        opened("p.bin", prompt_field=...)


def test_a_pair_without_any_token_to_predict_is_named() -> None:
    source = written([{"good": "a", "bad": "b"}, {"good": "", "bad": "b"}])
    with pytest.raises(UserError, match="data.source: p.jsonl pair 2: its chosen answer has no"):
        opened(source, prompt_field=...)


def test_pairs_change_the_identity_of_data() -> None:
    """Where answers begin is part of it, even if the tokens are the same."""
    one, other = (
        opened(written([{"q": "abc"[:n], "good": "abc"[n:], "bad": "abc"[n:]}])) for n in (1, 2)
    )
    assert one.train.tokens.tolist() == other.train.tokens.tolist()
    assert one.identity != other.identity
