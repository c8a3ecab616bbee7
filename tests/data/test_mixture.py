"""Mixtures: the source of each sample, proportions, and configs that are refused."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, Mixture, ShuffledWindows, WindowsInOrder, open_data
from jaxptd.data.mixture import PERIOD, counts_of, make_period, seed_of
from jaxptd.data.token_files import write_bin
from jaxptd.errors import UserError

EVENNESS = 8  # most samples by which a source may miss its share, over any run of samples


SIZES = (90, 60, 31)  # tokens in each source


@functools.cache
def make(weights=(0.7, 0.2, 0.1), *, sizes=SIZES, seq_length=4, seed=0, kind=ShuffledWindows):
    """Mixture of corpora whose ids are 1000 * source + position."""
    parts = [
        kind(
            1000 * source + np.arange(size),
            seq_length,
            10_000,
            **({"seed": seed_of(seed, source)} if kind is ShuffledWindows else {}),
        )
        for source, size in enumerate(sizes)
    ]
    return Mixture(tuple(parts), tuple(weights), seq_length=seq_length, seed=seed)


# ---- sources and proportions --------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 0.013, 2.5, 1e-4)])
def test_every_run_of_samples_has_the_shares(weights, seed=5):
    period, ramp = make_period(weights, seed), np.arange(PERIOD + 1)
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        assert abs(period.counts[source] - share * PERIOD) <= 1
        counted = np.concatenate([[0], np.cumsum(period.sources == source)])
        off = counted - ramp * (period.counts[source] / PERIOD)
        assert off.max() - off.min() < EVENNESS  # over any interval


def test_the_sequence_goes_on_seamlessly_after_a_period():
    mixture = make()
    sources, _ = mixture.locate(np.arange(PERIOD - 5000, PERIOD + 5000))
    for source, share in enumerate((0.7, 0.2, 0.1)):
        off = np.cumsum(sources == source) - np.arange(1, 10_001) * share
        assert off.max() - off.min() < EVENNESS


@pytest.mark.parametrize("first", [0, PERIOD - 300, 5 * PERIOD - 300])
def test_a_number_in_a_source_counts_its_earlier_samples(first):
    mixture = make()
    sources, numbers = mixture.locate(first + np.arange(600))
    for source in range(3):
        own = numbers[sources == source]
        assert (np.diff(own) == 1).all()
        assert own[0] == 0 or first
    (source,), (number,) = mixture.locate([first])
    assert mixture._period.number_of(source, int(number)) == first


def test_the_sequence_is_the_same_on_every_machine_and_numpy():
    """Expected values that must never change, since a resumed run needs the same data."""
    sources, numbers = make(seed=7).locate(np.arange(20))
    assert sources.tolist() == EXPECTED_SOURCES
    assert numbers.tolist() == EXPECTED_NUMBERS
    assert make(seed=7).rows(np.arange(6))[:, 0].tolist() == EXPECTED_STARTS


EXPECTED_SOURCES = [1, 0, 0, 1, 0, 2, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 2, 0]
EXPECTED_NUMBERS = [0, 0, 1, 1, 2, 0, 3, 4, 2, 5, 6, 7, 8, 3, 9, 10, 4, 11, 1, 12]
EXPECTED_STARTS = [1048, 68, 72, 1032, 56, 2003]


def test_weights_need_not_sum_to_one_and_seeds_differ():
    sources = [make(w, seed=s).locate(np.arange(100))[0] for w, s in (
        ((7, 2, 1), 0), ((0.7, 0.2, 0.1), 0), ((0.7, 0.2, 0.1), 1))]  # fmt: skip
    assert (sources[0] == sources[1]).all()
    assert (sources[1] != sources[2]).any()


def test_a_millionth_is_not_lost():
    assert counts_of([1, 1e-6]).tolist() == [PERIOD - 1, 1]
    assert counts_of([1e-6, 1, 1e-6]).min() == 1


# ---- samples ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10 * PERIOD), max_size=8))
def test_rows_do_not_depend_on_what_else_is_asked(indices):
    together = make().rows(indices)
    assert together.shape == (len(indices), 5)
    assert together.dtype == make().targets(indices).dtype == np.int32
    assert (make().targets(indices) == together[:, 1:]).all()
    for index, row in zip(indices, together, strict=True):
        assert make().rows([index]).tolist() == [row.tolist()]


def test_each_source_is_read_in_epochs_of_its_own():
    mixture = make()
    rows = mixture.rows(np.arange(2000))
    for source, part in enumerate(mixture.parts):
        own = rows[rows[:, 0] // 1000 == source]
        epochs = len(own) // part.windows_per_epoch
        assert epochs > 3
        starts = own[: epochs * part.windows_per_epoch, 0].reshape(epochs, -1)
        assert all(len(np.unique(epoch)) == part.windows_per_epoch for epoch in starts)
        assert (own == part.rows(np.arange(len(own)))).all()


def test_equal_sources_have_orders_of_their_own():
    mixture = make((1, 1), sizes=(200, 200))
    starts = [part.rows(np.arange(30))[:, 0] % 1000 for part in mixture.parts]
    assert (starts[0] != starts[1]).any()


def test_validation_ends_before_a_source_is_read_again():
    mixture = make(kind=WindowsInOrder)
    rows = mixture.rows(np.arange(mixture.windows_per_epoch + 1))
    starts = rows[:, 0].tolist()
    assert len({*starts[:-1]}) == len(starts) - 1
    assert starts[-1] in starts[:-1]
    assert mixture.num_tokens == 90 + 60 + 31
    assert mixture.first_tokens(3).tolist() == [0, 1, 2]


# ---- configs ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text, records and tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.txt").write_text("w" * 400)
    records = [{"text": "a" * 9, "question": "q" * 9}] * 30
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "short.txt").write_text("short")
    write_bin("code.bin", np.full(500, ord("c")))
    return tmp_path


def opened(source, *, fraction=0.1, **fields):
    config = DataConfig(source=source, validation_fraction=fraction, **fields)
    return open_data(config, ByteTokenizer(), seq_length=8, vocab_size=257, seed=0)


def test_a_mixture_of_text_and_tokens(folder):
    data = opened({"web.txt": 3, "code.bin": 1})
    for samples in (data.train, data.validation):
        letters = samples.rows(np.arange(40))[:, 0]
        assert (letters == ord("w")).sum() == pytest.approx(30, abs=2)
        assert (letters == ord("c")).sum() == pytest.approx(10, abs=2)
    assert data.train.num_tokens == 361 + 450
    assert opened({"web.txt": 3, "code.bin": 1}, fraction=0.0).validation is None


def test_equal_files_are_read_in_different_orders(folder):
    for name in ("a.bin", "b.bin"):
        write_bin(name, np.arange(250))
    first, second = opened({"a.bin": 1, "b.bin": 1}).train.parts
    assert (first.starts(np.arange(20)) != second.starts(np.arange(20))).any()


def test_the_order_in_a_file_is_no_matter(folder):
    first = opened({"web.txt": 3, "code.bin": 1}).train.rows(np.arange(40))
    assert (opened({"code.bin": 1, "web.txt": 3}).train.rows(np.arange(40)) == first).all()
    assert list(DataConfig(source={"b": 1, "a": 2}).source) == ["a", "b"]


def test_a_mixture_of_prompts(folder):
    (folder / "more.jsonl").write_text(json.dumps({"text": "m" * 300, "question": ""}))
    data = opened({"pairs.jsonl": 1, "more.jsonl": 1}, prompt_field="question", documents="apart")
    rows, targets = data.train.rows(np.arange(50)), data.train.targets(np.arange(50))
    assert (targets == np.where(rows[:, 1:] == ord("q"), -1, rows[:, 1:])).all()
    assert 0 < (targets == -1).sum() < 200


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"web.txt": 0.5, "none.txt": 0.5}, r"data\.source='none\.txt' matches no file"),
        ({"web.txt": 0.5, "empty.jsonl": 0.5}, r"empty\.jsonl holds no text; leave it out"),
        ({"web.txt": 0.5, "short.txt": 0.5}, r"data\.source, 'short\.txt': data\.validation_fra"),
        ({"web.txt": 0.5, "*.txt": 0.5}, r"short\.txt|named twice, by '\*\.txt' and 'web\.txt'"),
        ({"web.txt": 1, "./web.txt": 1}, r"named twice, by '\./web\.txt' and 'web\.txt'"),
        ({"web.txt": 1, "[cw]*": 1}, "named twice"),
        ({"[cw][oe]*": 1, "pairs.jsonl": 1}, r"data\.source mixes tokens \(code\.bin\) with text"),
    ],
)
def test_a_source_that_is_wrong_is_named(folder, source, message):
    with pytest.raises(UserError, match=message):
        opened(source)


def test_a_source_that_is_too_short_is_named_without_validation_too(folder):
    with pytest.raises(UserError, match=r"data\.source, 'short\.txt': the corpus has 6 tokens, on"):
        opened({"web.txt": 0.5, "short.txt": 0.5}, fraction=0.0)
