"""Whole records in sequences: each once per epoch, none cut, best fit, pure in the seed."""

import json
from bisect import insort

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, Mixture, WholeRecords, open_data
from jaxptd.data.batches import identity_of
from jaxptd.data.corpus import document_ends
from jaxptd.data.packing import Packing, best_fit
from jaxptd.data.token_files import write_bin_arrays
from jaxptd.errors import UserError

END = ByteTokenizer.end_of_document
T = 12


def make(lengths, *, seed=0, seq_length=T, **fields):
    """Records of some lengths; the tokens of record r are r * 100, r * 100 + 1, ..."""
    tokens = np.concatenate([np.arange(n) + 100 * r for r, n in enumerate(lengths)])
    ends = np.cumsum(lengths)
    return WholeRecords(tokens, ends, seq_length, 10**6, seed, **fields)


lengths = st.lists(st.integers(1, T + 1), min_size=1, max_size=40).filter(lambda x: max(x) > 1)
seeds = st.integers(0, 2**32 - 1)


def epoch_of(data, epoch):
    return data.windows_per_epoch * epoch + np.arange(data.windows_per_epoch)


def pieces(data, numbers):
    """The (tokens, targets) of each document of some samples, as a user of a batch sees them."""
    rows, targets = data.rows(numbers), data.targets(numbers)
    documents = data.documents(numbers, END)
    assert rows.shape == (len(numbers), T + 1)
    assert {x.dtype for x in (rows, targets, documents)} == {np.dtype(np.int32)}
    for row, target, document in zip(rows, targets, documents, strict=True):
        assert (target[document < 0] == -1).all()
        assert (row[:-1][document < 0] == 0).all()
        used = document[document >= 0]
        assert (np.diff(used) >= 0).all() and (document[len(used) :] < 0).all()
        for number in range(used.max() + 1):
            places = document == number
            yield row[:-1][places].tolist(), target[places].tolist()


@given(lengths, seeds, st.integers(0, 1000))
def test_an_epoch_has_each_record_once_and_whole(lengths, seed, epoch):
    data = make(lengths, seed=seed)
    found = list(pieces(data, epoch_of(data, epoch)))
    whole = [(tokens, [*tokens[1:], tokens[-1] + 1]) for tokens, _ in found]
    assert found == whole
    expected = [(100 * r, n - 1) for r, n in enumerate(lengths) if n > 1]
    assert sorted((tokens[0], len(tokens)) for tokens, _ in found) == expected


@given(lengths, seeds, st.lists(st.integers(0, 1000), max_size=8))
def test_a_sample_does_not_depend_on_what_else_is_asked(lengths, seed, numbers):
    """So any number of processes read the same batch, and a run resumes with the next sample."""
    data, again = make(lengths, seed=seed), make(lengths, seed=seed)
    numbers = np.array(numbers, np.int64)
    for read in ("rows", "targets"):
        together = getattr(data, read)(numbers)
        alone = [getattr(again, read)(numbers[i : i + 1]) for i in reversed(range(len(numbers)))]
        assert together.tolist() == [row.tolist() for (row,) in reversed(alone)]


@given(lengths, seeds)
def test_epochs_have_as_many_sequences_of_other_records(lengths, seed):
    data = make(lengths, seed=seed)
    first, second = (data.rows(epoch_of(data, epoch)) for epoch in (0, 1))
    assert first.shape == second.shape
    other = make(lengths, seed=seed + 1)
    assert other.windows_per_epoch == data.windows_per_epoch


def test_an_epoch_draws_order_and_company():
    """Records of a length change places, so the company of a record changes."""
    data = make([9, 5] * 20)
    together = [
        [frozenset(data.records(number).tolist()) for number in epoch_of(data, epoch)]
        for epoch in (0, 0, 1)
    ]
    assert together[0] == together[1] != together[2]
    assert len(set(together[0]) & set(together[2])) < 10  # of 20
    assert {len(each) for each in together[2]} == {2}
    assert make([9, 5] * 20, seed=1).records(0).tolist() != data.records(0).tolist()


def test_evaluations_read_the_same_each_time():
    data = make([9, 5, 3, 7] * 5, seed=None)
    first, second = (data.rows(epoch_of(data, epoch)).tolist() for epoch in (0, 7))
    assert first == second


def test_prompts_and_other_records_are_no_targets():
    data = make([5, 4], counted=np.array([0, 0, 1, 1, 1, 0, 1, 0, 1], bool))
    assert data.rows([0]).tolist() == [[0, 1, 2, 3, 100, 101, 102, *[0] * 6]]
    assert data.targets([0]).tolist() == [[-1, 2, 3, 4, 101, -1, 103, *[-1] * 5]]
    assert data.documents([0], END).tolist() == [[0, 0, 0, 0, 1, 1, 1, *[-1] * 5]]


# ---- quality -------------------------------------------------------------------------------------


def one_by_one(items, room):
    """Best fit decreasing, item by item: the loads of the bins, and which lengths each has."""
    free, held = [], []  # (room, bin), sorted
    for item in sorted(items, reverse=True):
        fits = [each for each in free if each[0] >= item]
        if fits:
            left, which = min(fits)
            free.remove((left, which))
        else:
            left, which = room, len(held)
            held.append([])
        held[which].append(item)
        insort(free, (left - item, which))
    return held


@given(st.lists(st.integers(1, T), max_size=60))
def test_items_are_packed_by_best_fit(items):
    """In groups as one by one: as many bins, as full; which of two as full is no matter."""
    bins = best_fit(np.bincount(items, minlength=1), T)
    ordered, loads = sorted(items, reverse=True), {}
    for item, which in zip(ordered, bins.tolist(), strict=True):
        loads.setdefault(which, []).append(item)
    assert sorted(loads) == list(range(len(loads)))
    found = sorted(sum(each) for each in loads.values())
    assert found == sorted(sum(each) for each in one_by_one(items, T))
    assert not found or found[-1] <= T
    assert len(found) < 2 or found[0] + found[1] > T  # no two could be one


@pytest.mark.parametrize("seed", range(3))
def test_little_is_padding_with_many_lengths(seed):
    """Log-normal: median 200, sigma 1, at most 2,048.

    No packing takes fewer sequences than the tokens fill. Where short records are many, best fit
    takes a few more at most, however many records there are (Bentley et al., STOC 1984, for lengths
    up to half a sequence); one more is allowed here. So less than two sequences' worth is padding.
    """
    draw = np.random.default_rng(seed)
    tokens = np.clip(np.exp(draw.normal(np.log(200), 1, 5000)), 2, 2049).astype(np.int64)
    packing = Packing(tokens, 2048)
    least = int(np.ceil((tokens - 1).sum() / 2048))
    assert packing.sequences <= least + 1
    assert packing.padding(packing.sequences) < 2 / least < 0.003
    assert packing.padding(len(tokens)) > 0.8  # one record a sequence


def test_lengths_that_do_not_share_pad():
    packing = Packing(np.full(10, 9), T)  # 8 of 12 places each
    assert packing.sequences == 10
    assert packing.padding(10) == pytest.approx(1 / 3)
    assert packing.summary == (
        "10 whole records in 10 sequences of 12: 33.33% padding (one record per sequence: 33.33%; "
        "documents=apart: none, but it cuts 50.00% of the records)"
    )


# ---- sources -------------------------------------------------------------------------------------

TEXTS = ["one", "two three", "four", "", "five six", "seven", "eight"] * 3


def opened(source, *, seq_length=T, fraction=0.0, **fields):
    config = DataConfig(
        source=source if isinstance(source, dict) else str(source),
        validation_fraction=fraction,
        documents="whole",
        **fields,
    )
    return open_data(config, ByteTokenizer(), seq_length=seq_length, vocab_size=257, seed=3)


def write(path, texts=TEXTS, **more):
    path.write_text("\n".join(json.dumps({"text": text} | more) for text in texts))
    return path


def texts_of(data, numbers=None):
    """What the documents of an epoch's batches say, their ends included."""
    numbers = epoch_of(data, 0) if numbers is None else numbers
    found = [tokens + targets[-1:] for tokens, targets in pieces(data, numbers)]
    assert {tokens[-1] for tokens in found} == {END}
    return sorted(ByteTokenizer().decode(tokens[:-1]) for tokens in found)


def test_every_format_has_the_same_sequences(tmp_path):
    data = opened(write(tmp_path / "a.jsonl"))
    expected = sorted(filter(None, TEXTS))
    assert texts_of(data.train) == expected
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    ids = [[*text.encode(), END] for text in TEXTS if text]
    write_bin_arrays(tmp_path / "a.bin", map(np.array, ids), vocab_size=257, end_of_document=END)
    for name in ("a.parquet", "a.bin"):
        other = opened(tmp_path / name)
        assert other.train.rows(range(20)).tolist() == data.train.rows(range(20)).tolist()
        assert other.identity == data.identity


def test_both_splits_hold_whole_records(tmp_path):
    data = opened(write(tmp_path / "a.jsonl"), fraction=0.3)
    held_out = texts_of(data.validation)
    assert 4 <= len(held_out) <= 7  # of 18
    assert sorted(texts_of(data.train) + held_out) == sorted(filter(None, TEXTS))
    one = write(tmp_path / "one.jsonl", ["alone"])
    with pytest.raises(UserError, match="there is only one; use more data, or data.validation_fra"):
        opened(one, fraction=0.3)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_each_split_has_a_record(tmp_path, fraction):
    data = opened(write(tmp_path / "a.jsonl"), fraction=fraction)
    sizes = [len(texts_of(part)) for part in (data.train, data.validation)]
    assert min(sizes) == 1 and sum(sizes) == 18


def test_a_mixture_has_the_sequences_of_its_sources(tmp_path):
    first, second = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", ["b"] * 30)
    data = opened({str(first): 0.5, str(second): 0.5}, fraction=0.2)
    assert isinstance(data.train, Mixture)
    numbers = np.arange(20)
    sources, _ = data.train.locate(numbers)
    for source in (0, 1):
        texts = texts_of(data.train, numbers[sources == source])
        assert (set(texts) == {"b"}) == (source == 1)
    assert len([line for line in data.remarks if "padding" in line]) == 2
    assert f"{second}: 24 whole records in 2 sequences of 12: 0.00% padding" in "\n".join(
        data.remarks
    )


def test_prompts_stay_with_their_answers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"q": f"{n}?", "text": f"{n}!"}) for n in range(10)))
    data = opened(path, prompt_field="q").train
    for tokens, targets in pieces(data, epoch_of(data, 0)):
        assert ByteTokenizer().decode(tokens) == f"{chr(tokens[0])}?{chr(tokens[0])}!"
        assert targets == [-1, *tokens[2:], END]


def test_ends_inside_a_record_do_not_cut_it():
    """A chat has an end after each turn."""
    data = WholeRecords(np.array([1, END, 2, END, 3, END]), np.array([4, 6]), 4, 257)
    assert data.documents([0], END).tolist() == [[0, 0, 0, 1]]
    assert data.targets([0]).tolist() == [[END, 2, END, END]]


def test_ends_of_documents_in_token_files():
    assert document_ends(np.array([1, END, 2, 3, END]), END).tolist() == [2, 5]
    assert document_ends(np.array([1, END, 2]), END).tolist() == [2, 3]


def test_other_records_of_the_same_tokens_are_other_data():
    """A resumed run would pack them differently."""
    tokens = np.arange(10)
    found = [identity_of(tokens, ends) for ends in (np.array([4, 10]), np.array([5, 10]), None)]
    assert len({each["digest"] for each in found}) == 3


# ---- refused -------------------------------------------------------------------------------------


def test_records_longer_than_a_sequence_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ["a" * 12, "b" * 20, "c" * 13])  # and an end each
    with pytest.raises(
        UserError, match="record 2 has 21 tokens, and a sequence holds 13; 2 of 3 "
    ) as e:
        opened(path)
    assert "use model.seq_length=20 or more" in str(e.value)
    assert opened(path, seq_length=20).train.windows_per_epoch == 3


def test_ids_beyond_the_vocabulary_are_found():
    with pytest.raises(UserError, match="token 2 of the data has id 300, outside the model's 257"):
        WholeRecords(np.array([1, 2, 300, END]), np.array([2, 4]), 2, 257).rows(np.arange(2))


def test_records_without_a_prediction_are_left_out_and_said():
    data = make([1, 3, 1])
    assert data.windows_per_epoch == 1
    assert "; 2 of one token are left out" in data.packing.summary
    with pytest.raises(UserError, match="no record has two tokens"):
        make([1, 1])


@pytest.mark.parametrize(("too_long", "records"), [("cut", 3), ("drop", 2)])
def test_records_that_are_too_long_are_cut_or_left_out(tmp_path, too_long, records) -> None:
    texts = ["short", "much longer than that", "other"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in texts))
    config = DataConfig(
        source=str(tmp_path / "a.jsonl"),
        documents="whole",
        too_long=too_long,
        validation_fraction=0.0,
    )
    data = open_data(config, ByteTokenizer(), seq_length=8, vocab_size=257, seed=0)
    assert isinstance(data.train, WholeRecords)
    assert len(data.train.ends) == records
    assert any("1 of 3 records" in remark for remark in data.remarks)


def test_chats_stay_whole_and_only_answers_are_targets(tmp_path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] ~ m.content ~ '.' }}{% endfor %}"
        "{{ 'a' if add_generation_prompt }}"
    )
    chats = [
        [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "z" * n}]
        for n in (1, 2, 3)
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    config = DataConfig(
        source=str(tmp_path / "c.jsonl"),
        messages_field="messages",
        chat_template=str(tmp_path / "t.jinja"),
        documents="whole",
        validation_fraction=0.0,
    )
    data = open_data(config, ByteTokenizer(), seq_length=20, vocab_size=257, seed=0)
    numbers = np.arange(data.train.windows_per_epoch)
    targets = data.train.targets(numbers)
    assert bytes(sorted(targets[targets >= 0].tolist())) == b"...zzzzzz"
    assert sorted(n for each in numbers for n in data.train.records(each)) == [0, 1, 2]


def test_the_record_that_is_too_long_is_numbered_in_its_whole_source(tmp_path) -> None:
    """It is in the part for validation."""
    texts = ["a", "b", "c", "d" * 40]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in texts))
    source = str(tmp_path / "a.jsonl")
    config = DataConfig(source=source, documents="whole", validation_fraction=0.5)
    with pytest.raises(UserError, match="record 4 has 41 tokens"):
        open_data(config, ByteTokenizer(), seq_length=20, vocab_size=257, seed=0)
