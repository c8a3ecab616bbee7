"""Sequences of a step: pure in (seed, sample number), each window once per epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.data.batches import (
    Concatenated,
    ShuffledWindows,
    WindowsInOrder,
    document_starts,
    number_documents,
)
from jaxptd.data.token_files import open_tokens, write_bin
from jaxptd.errors import UserError


def make(num_tokens, seq_length, *, seed=0, kind=ShuffledWindows):
    """Windows over tokens that equal their indices."""
    seeds = {"seed": seed} if kind is ShuffledWindows else {}
    return kind(np.arange(num_tokens), seq_length, vocab_size=num_tokens, **seeds)


@st.composite
def windows(draw):
    seq_length = draw(st.integers(1, 7))
    num_tokens = seq_length + draw(st.integers(1, 60))
    return make(num_tokens, seq_length, seed=draw(st.integers(0, 2**32 - 1)))


def epoch_rows(data, epoch):
    return data.rows(np.arange(data.windows_per_epoch) + epoch * data.windows_per_epoch)


@given(windows(), st.integers(0, 1000))
def test_an_epoch_has_each_window_once(data, epoch):
    rows = epoch_rows(data, epoch)
    starts = np.sort(rows[:, 0])
    assert rows.dtype == np.int32
    assert (rows == rows[:, :1] + np.arange(data.seq_length + 1)).all()
    assert (np.diff(starts) == data.seq_length).all()


@given(windows(), st.integers(0, 1000))
def test_an_epoch_leaves_out_only_ends(data, epoch):
    seen = np.unique(epoch_rows(data, epoch)[:, :-1])
    assert len(seen) == data.windows_per_epoch * data.seq_length
    assert len(data.tokens) - len(seen) < 2 * data.seq_length


@given(windows(), st.lists(st.integers(0, 10_000), max_size=8))
def test_rows_do_not_depend_on_what_else_is_asked(data, indices):
    together = data.rows(np.array(indices, dtype=np.int64))
    assert together.shape == (len(indices), data.seq_length + 1)
    for index, row in zip(indices, together, strict=True):
        assert data.rows(np.array([index])).tolist() == [row.tolist()]


def test_processes_that_share_a_batch_see_the_rows_of_one():
    batch = np.arange(16) + 3 * 16
    whole = make(100, 4, seed=5).rows(batch)
    shares = [make(100, 4, seed=5).rows(batch[rank::4]) for rank in range(4)]
    assert all((share == whole[rank::4]).all() for rank, share in enumerate(shares))


def test_every_token_is_seen_within_some_epochs():
    for num_tokens in (4, 7, 8, 9, 50):
        data = make(num_tokens, 3)
        seen = np.unique(data.rows(np.arange(100 * data.windows_per_epoch)))
        assert seen.tolist() == list(range(num_tokens))


def test_order_and_boundaries_change_with_epoch_and_seed():
    data = make(1000, 10)
    orders = {tuple(epoch_rows(data, epoch)[:, 0].tolist()) for epoch in range(10)}
    shifts = {min(order) for order in orders}
    other = epoch_rows(make(1000, 10, seed=1), 0)
    assert len(orders) == 10
    assert len(shifts) > 5
    assert (other != epoch_rows(data, 0)).any()


def test_order_is_the_same_on_every_machine_and_numpy():
    """Expected rows that must never change, since a resumed run needs the same data."""
    starts = make(50, 4, seed=7).rows(np.arange(14))[:, 0].tolist()
    assert starts == [28, 12, 0, 20, 8, 4, 40, 24, 16, 32, 36, 45, 13, 37]


@given(st.integers(1, 7), st.integers(1, 60))
def test_in_order_is_in_order_and_wraps_around(seq_length, more):
    data = make(seq_length + more, seq_length, kind=WindowsInOrder)
    rows = data.rows(np.arange(2 * data.windows_per_epoch))
    count = data.windows_per_epoch
    assert rows[:count, 0].tolist() == [i * seq_length for i in range(count)]
    assert (rows[count:] == rows[:count]).all()
    assert len(data.tokens) - (rows.max() + 1) < seq_length


def test_rows_of_mapped_and_concatenated_files_are_those_of_one_array(tmp_path):
    tokens = np.arange(100, dtype=np.uint16)
    for name, part in (("a.bin", tokens[:33]), ("b.bin", tokens[33:])):
        write_bin(tmp_path / name, part)
    write_bin(tmp_path / "whole.bin", tokens)
    mapped = open_tokens([tmp_path / "whole.bin"])
    joined = open_tokens([tmp_path / "a.bin", tmp_path / "b.bin"])
    expected = ShuffledWindows(tokens, 5, 100, seed=3).rows(np.arange(40))
    assert isinstance(joined, Concatenated)
    assert (ShuffledWindows(mapped, 5, 100, seed=3).rows(np.arange(40)) == expected).all()
    assert (ShuffledWindows(joined, 5, 100, seed=3).rows(np.arange(40)) == expected).all()


def test_no_rows():
    assert make(10, 3).rows(np.array([])).shape == (0, 4)


@pytest.mark.parametrize("kind", [ShuffledWindows, WindowsInOrder])
def test_the_shortest_corpus_has_one_window_and_less_is_an_error(kind):
    assert make(5, 4, kind=kind).rows(np.arange(3)).tolist() == [[0, 1, 2, 3, 4]] * 3
    with pytest.raises(UserError, match=r"has 4 tokens, .* takes 5; use more data or a smaller"):
        make(4, 4, kind=kind)


@pytest.mark.parametrize(
    ("wrong", "dtype"), [(100, np.uint16), (-1, np.int32), (2**33 + 1, np.int64)]
)
def test_an_id_outside_the_vocabulary_is_an_error(wrong, dtype):
    tokens = np.arange(20, dtype=dtype)
    tokens[13] = wrong
    data = WindowsInOrder(tokens, 4, 100)
    assert data.rows(np.arange(3)).max() == 12
    with pytest.raises(
        UserError, match=rf"token 13 of the data has id {wrong}, outside .* 100 \(0 to 99\)"
    ):
        data.rows(np.array([3]))


def test_an_id_outside_the_vocabulary_is_located_in_its_file(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(20))
    tokens = open_tokens([tmp_path / "a.bin"])[10:]
    with pytest.raises(
        UserError, match=r"token 15 of .*a\.bin has id 15, .*larger model\.vocab_size"
    ):
        WindowsInOrder(tokens, 9, 15).rows(np.array([0]))


def test_documents_start_where_their_numbers_change():
    segments = np.array([[0, 0, 1, 1, 2, -1], [3, 3, 3, 3, 3, 3]])
    assert document_starts(segments).tolist() == [[0, 0, 2, 2, 4, 5], [0] * 6]


def test_documents_are_numbered_through_a_row_and_end_with_their_end():
    rows = np.array([[5, 9, 6, 7, 9, 9, 8], [9, 1, 1, 1, 1, 1, 9], [1, 2, 3, 4, 5, 6, 7]])
    found = number_documents(rows, 9)
    assert found.dtype == np.int32
    assert found.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1], [0] * 7]
