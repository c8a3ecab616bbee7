"""`open_data`: the two splits of a corpus, and configs that are refused."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, Data, WindowsInOrder, corpus, open_data
from jaxptd.data import batches as ids_module
from jaxptd.data.token_files import write_bin
from jaxptd.errors import UserError


def open_bytes(source, *, fraction=0.25, seq_length=4, vocab_size=257) -> Data:
    config = DataConfig(source=source, validation_fraction=fraction)
    sizes = {"seq_length": seq_length, "vocab_size": vocab_size, "seed": 0}
    return open_data(config, ByteTokenizer(), **sizes)


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "a.txt"
    path.write_text("0123456789abcdefghi")  # 20 tokens including the end
    return str(path)


def test_both_splits_are_of_one_array(text):
    data = open_bytes(text)
    assert bytes(data.train.tokens.tolist()) == b"0123456789abcde"
    assert data.validation.tokens.tolist() == [*b"fghi", 256]
    assert isinstance(data.validation, WindowsInOrder)
    assert data.validation.rows(np.arange(2)).tolist() == [[*b"fghi", 256]] * 2
    assert data.train.rows(np.arange(9)).shape == (9, 5)


def test_no_validation(text):
    data = open_bytes(text, fraction=0.0)
    assert data.validation is None
    assert len(data.train.tokens) == 20


def test_token_files_stay_mapped(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(40))
    write_bin(tmp_path / "b.bin", np.arange(40))
    alone = open_bytes(str(tmp_path / "a.bin"))
    both = open_bytes([str(tmp_path / "a.bin"), str(tmp_path / "b.bin")])
    assert isinstance(alone.train.tokens, np.memmap)
    assert isinstance(alone.validation.tokens, np.memmap)
    assert alone.validation.tokens.tolist() == list(range(30, 40))
    assert np.asarray(both.validation.tokens).tolist() == list(range(20, 40))
    assert all(isinstance(array, np.memmap) for array in both.train.tokens.arrays)


@pytest.mark.parametrize("place", [0, 17, 39])
def test_an_id_outside_the_vocabulary_is_found_at_once(tmp_path, place):
    ids = np.arange(40)
    ids[place] = 300
    write_bin(tmp_path / "a.bin", np.arange(40))
    write_bin(tmp_path / "b.bin", ids)
    source = [str(tmp_path / "a.bin"), str(tmp_path / "b.bin")]
    with pytest.raises(UserError, match=rf"token {place} of .*b\.bin has id 300, outside the"):
        open_bytes(source)
    assert len(open_bytes(source, vocab_size=301).train.tokens) == 60


@pytest.mark.parametrize(("place", "found"), [(0, True), (99, True), (39, False)])
def test_of_very_many_ids_a_part_is_looked_at_at_once(tmp_path, monkeypatch, place, found):
    monkeypatch.setattr(ids_module, "BLOCK", 10)
    monkeypatch.setattr(ids_module, "SCANNED", 30)  # scans 10 ids at each end and [45, 55)
    ids = np.zeros(100, np.int64)
    ids[place] = 300
    write_bin(tmp_path / "a.bin", ids)
    with pytest.raises(UserError, match="has id 300") if found else contextlib.nullcontext():
        open_bytes(str(tmp_path / "a.bin"))


def test_stdlib():
    data = open_bytes("stdlib", fraction=0.05, seq_length=256)
    total = len(data.train.tokens) + len(data.validation.tokens)
    again = open_bytes("stdlib", fraction=0.05, seq_length=256)
    assert total > 5_000_000
    assert len(data.validation.tokens) == round(0.05 * total)
    assert (again.train.rows(np.arange(4)) == data.train.rows(np.arange(4))).all()


def test_mixing_tokens_and_text_is_an_error(text, tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(40))
    with pytest.raises(
        UserError, match=r"data\.source mixes tokens \(.*a\.bin\) with text \(.*a\.txt"
    ):
        open_bytes([text, str(tmp_path / "a.bin")])


def test_a_token_that_the_model_does_not_know_is_an_error(text):
    with pytest.raises(UserError, match=r"model\.vocab_size=256 is below the tokenizer's 257"):
        open_bytes(text, vocab_size=256)
    assert open_bytes(text, vocab_size=300).train.vocab_size == 300


def test_a_corpus_shorter_than_a_sequence_is_an_error(text):
    with pytest.raises(UserError, match=r"has 20 tokens, one sequence takes 21; use more data"):
        open_bytes(text, fraction=0.0, seq_length=20)


@pytest.mark.parametrize(
    ("fraction", "seq_length", "message"),
    [
        (0.1, 4, r"leaves validation 2, .* takes 5; use 0\.25 to 0\.75, 0 for no validation"),
        (0.9, 4, r"leaves training 2, .* takes 5; use 0\.25 to 0\.75, 0 for no validation"),
        (
            0.1,
            12,
            r"leaves validation 2, .* takes 13; use more data .* or data\.validation_fraction=0",
        ),
    ],
)
def test_a_split_shorter_than_a_sequence_is_an_error(text, fraction, seq_length, message):
    with pytest.raises(UserError, match=rf"data\.validation_fraction={fraction} of 20 .*{message}"):
        open_bytes(text, fraction=fraction, seq_length=seq_length)


@given(st.integers(2, 300), st.integers(2, 10_000))
def test_the_fractions_an_error_suggests_work(shortest, num_tokens):
    remedy = corpus._remedy(num_tokens, shortest)
    if not remedy.startswith("use 0"):
        assert num_tokens < 2 * shortest + 20
        return
    for fraction in (float(remedy.split()[1]), float(remedy.split()[3].rstrip(","))):
        assert shortest - 1 <= num_tokens - corpus._validation_start(
            num_tokens, fraction, shortest - 1
        )


def test_data_does_not_import_jax():
    code = "import sys, jaxptd.data, jaxptd.commands.data; print('jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_documents_of_token_files_are_told_apart_by_their_own_tokenizer_only(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(200))
    config = DataConfig(source=str(tmp_path / "a.bin"), documents="apart")
    sizes = {"seq_length": 4, "seed": 0}
    with pytest.raises(UserError, match=r"documents=apart .*tokenizer=bytes may not have made"):
        open_data(config, ByteTokenizer(), vocab_size=50257, **sizes)
    assert len(open_data(config, ByteTokenizer(), vocab_size=257, **sizes).train.tokens) == 190
