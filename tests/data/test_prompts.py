"""Records with prompts: their tokens, which of these are targets, sources without prompts."""

import csv
import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.config import DataConfig
from jaxptd.data import (
    ByteTokenizer,
    MaskedPairs,
    ShuffledWindows,
    WindowsInOrder,
    number_documents,
    open_data,
)
from jaxptd.data.corpora import tokenize_answers
from jaxptd.data.objectives import MASK_TOKENS, MaskIds
from jaxptd.data.token_files import write_bin
from jaxptd.errors import UserError

RECORDS = [("2+2=", "4"), ("", "all of it"), ("a longer question: ", "yes"), ("é", "û")]
END = ByteTokenizer.end_of_document


def write(path, records, field="question"):
    lines = [json.dumps({"text": answer, field: prompt}) for prompt, answer in records]
    path.write_text("\n".join(lines))
    return path


def opened(path, *, seq_length=5, fraction=0.0, **fields):
    config = DataConfig(
        source=str(path), validation_fraction=fraction, prompt_field="question", **fields
    )
    return open_data(config, ByteTokenizer(), seq_length=seq_length, vocab_size=257, seed=3)


def expected(records):
    """Ids of the corpus, and whether the loss counts each of them."""
    pairs = []
    for prompt, answer in records:
        pairs += [(token, False) for token in prompt.encode()]
        pairs += [(token, True) for token in (*answer.encode(), END)]
    return [token for token, _ in pairs], [counted for _, counted in pairs]


def test_a_record_is_its_prompt_its_answer_and_an_end(tmp_path):
    path = write(tmp_path / "a.jsonl", [*RECORDS, ("skipped", "")])
    pairs = list(tokenize_answers([path], ByteTokenizer(), ["question", "text"]))
    ids, counted = expected(RECORDS)
    assert np.concatenate([each for each, _ in pairs]).tolist() == ids
    assert np.concatenate([each for _, each in pairs]).tolist() == counted
    assert pairs[0][0].dtype == np.uint16


@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_targets_are_the_next_tokens_of_answers_and_ends(tmp_path_factory, indices):
    data = opened(write(tmp_path_factory.mktemp("prompts") / "a.jsonl", RECORDS * 3)).train
    ids, counted = expected(RECORDS * 3)
    rows, targets = data.rows(indices), data.targets(indices)
    assert targets.dtype == rows.dtype == np.int32
    assert targets.shape == (len(indices), 5)
    for start, row, found in zip(data.starts(np.array(indices, int)), rows, targets, strict=True):
        window = range(start + 1, start + 6)
        assert row.tolist() == ids[start : start + 6]
        assert found.tolist() == [ids[i] if counted[i] else -1 for i in window]


def test_both_splits_have_their_own_prompts(tmp_path):
    data = opened(write(tmp_path / "a.jsonl", RECORDS * 3), fraction=0.4)
    ids, counted = expected(RECORDS * 3)
    held_out = len(data.validation.tokens)
    assert data.train.counted.tolist() == counted[:-held_out]
    assert data.validation.counted.tolist() == counted[-held_out:]
    assert data.validation.rows([0])[0].tolist() == ids[-held_out:][:6]


def test_without_prompts_every_token_is_a_target():
    data = ShuffledWindows(np.arange(50), 4, 50, seed=7)
    assert (data.targets([3, 1]) == data.rows([3, 1])[:, 1:]).all()
    assert data.targets([]).shape == (0, 4)


def test_records_are_packed_and_kept_apart(tmp_path):
    """A window holds several ends of records; targets that cross into a prompt do not count."""
    data = opened(write(tmp_path / "a.jsonl", RECORDS * 3), seq_length=40, documents="apart").train
    (row,), (targets,) = data.rows([0]), data.targets([0])
    segments = number_documents(row[None, :-1], END)[0]
    after = np.flatnonzero(row[:-1] == END) + 1  # where records begin
    assert len(after) > 2
    assert (np.diff(segments)[after[after < 40] - 1] == 1).all()
    first = ByteTokenizer().decode(row[after[0] :]).split("\n")[0]
    prompt = next(prompt for prompt, answer in RECORDS if prompt + answer == first)
    assert set(targets[after[0] - 1 :][: len(prompt.encode())].tolist()) <= {-1}
    assert (targets[row[1:] == END] == END).all()  # the model learns where a record ends


def test_a_split_of_prompts_alone_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [("a long prompt " * 9, "x"), ("q", "y" * 200)])
    with pytest.raises(UserError, match="all of 126 tokens are of prompts, none of an answer"):
        WindowsInOrder(np.arange(126), 5, 257, counted=np.zeros(126, bool))
    with pytest.raises(UserError, match="all of 66 tokens are of prompts.*use more data, or anoth"):
        opened(path, fraction=0.8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            b"text",
            r"prompt_field='question': .*a\.txt has no fields; write its recor",
        ),
        ("a.jsonl", b'{"text": "a"}', 'line 1 has no string "question"; each line must be an obje'),
        ("a.jsonl", b'{"text": "a", "question": 3}', 'line 1 has no string "question"'),
        ("a.jsonl", b'{"text": "a", "question": null}', "no string"),
        ("a.jsonl", b'{"question": "a"}', 'no string "text"; .*object with "question" and "text"'),
        ("a.jsonl", b'{"text": "a", "question": "\\ud800"}', "half a surrogate pair; remove it"),
        ("a.jsonl", b'{"text": "", "question": "a"}', r"a\.jsonl holds no text; leave it out"),
        ("a.parquet", b"PAR1", r"a\.parquet is damaged: "),
    ],
)
def test_a_source_without_prompts_is_an_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / name)


def said(path, **fields):
    config = DataConfig(source=str(path), validation_fraction=0, **fields)
    sizes = {"seq_length": 5, "vocab_size": 257}
    return [x for x in open_data(config, ByteTokenizer(), **sizes, seed=3).remarks if "field" in x]


@pytest.mark.parametrize("field", ["prompt", "instruction", "question", "input", "Question"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz"])
def test_a_prompt_that_is_not_read_is_said(tmp_path, field, suffix):
    path = tmp_path / f"a{suffix}"
    records = [{"n": 1, field: prompt, "text": answer} for prompt, answer in RECORDS]
    write_records(path, records)
    assert said(path) == [
        f'warning: {path}: the field "{field}" is not read, only "text"; data.prompt_field={field} '
        "reads it, as a prompt"
    ]
    assert said(path, prompt_field=field) == said(path, text_field=field) == []
    write_records(path, [{"title": prompt, "text": answer} for prompt, answer in RECORDS])
    assert said(path) == []


def write_records(path, records):
    """Writes records in the format that the file's name states."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix in (".csv", ".tsv"):
        rows = [list(records[0]), *(record.values() for record in records)]
        with open(path, "w", newline="") as file:
            csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t").writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1))
    else:
        lines = "\n".join(map(json.dumps, records)).encode()
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def test_prompts_of_a_mixture_are_said_once(tmp_path):
    record = {"input": "", "instruction": "sum up", "prompt": None, "text": "an answer"}
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record))
    (tmp_path / "c.txt").write_text("no record: a prompt")
    names = [str(tmp_path / name) for name in ("c.txt", "a.jsonl", "b.jsonl")]
    config = DataConfig(source=dict.fromkeys(names, 1.0), validation_fraction=0)
    data = open_data(config, ByteTokenizer(), seq_length=5, vocab_size=257, seed=3)
    assert data.remarks == (
        f'warning: {tmp_path}/a.jsonl: the fields "instruction" and "input" are not read, only '
        '"text"; data.prompt_field=instruction reads the first, as a prompt',
    )


def test_a_model_that_reads_no_prompts_is_told_of_none(tmp_path):
    path = write(tmp_path / "a.jsonl", RECORDS * 9)
    tokenizer = ByteTokenizer(MASK_TOKENS)
    objective = MaskedPairs(MaskIds.of(tokenizer), seq_length=16)
    config = DataConfig(source=str(path), validation_fraction=0)
    sizes = {"seq_length": 16, "vocab_size": tokenizer.vocab_size}
    assert open_data(config, tokenizer, **sizes, seed=3, objective=objective).remarks == ()


def test_token_files_do_not_tell_prompts_from_answers(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(200))
    with pytest.raises(UserError, match=r"prompt_field='question': .*a\.bin holds tokens, which"):
        opened(tmp_path / "a.bin")
