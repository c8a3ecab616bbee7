"""Span corruption: T5's lengths, the restored corpus, spans of every kind."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.data import ByteTokenizer, ShuffledWindows, SpanCorruption, WindowsInOrder
from jaxptd.data.objectives import SPAN_TOKENS, SpanIds
from jaxptd.errors import UserError

ORDINARY = 5000  # ids of the corpus are smaller and equal their positions
PAD, END = ORDINARY, ORDINARY + 1
SENTINELS = tuple(range(ORDINARY + 101, ORDINARY + 1, -1))
IDS = SpanIds(pad=PAD, end=END, sentinels=SENTINELS, vocab_size=ORDINARY + 102)


def make(seq_length=64, decoder_seq_length=20, **shares):
    return SpanCorruption(IDS, seq_length, decoder_seq_length, **shares)


def windows(objective, *, tokens=ORDINARY, seed=None):
    """Windows over tokens that equal their positions."""
    sizes = (np.arange(tokens), objective.window, ORDINARY)
    return WindowsInOrder(*sizes) if seed is None else ShuffledWindows(*sizes, seed)


def fields(objective, numbers=range(500), *, seed=0, samples=None):
    samples = samples or windows(objective)
    return objective.fields(samples, np.asarray(numbers), seed=seed)


def spans_of(ids):
    """Splits ids, without their end, at the sentinels."""
    *body, end = [token for token in ids.tolist() if token not in (PAD, -1)]
    assert end == END
    pieces = [[]]
    for token in body:
        if token in SENTINELS:
            assert token == SENTINELS[len(pieces) - 1]
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def restored(source, targets):
    """Window that was split into a source and its targets."""
    (first, *kept), (nothing, *cut) = spans_of(source), spans_of(targets)
    assert nothing == []
    pieces = itertools.zip_longest(cut, kept)
    return first + [token for pair in pieces for piece in pair for token in piece or []]


def t5_lengths(inputs, density, mean):
    """Copies T5's random_spans_helper: the lengths of the window and of the targets."""

    def lengths(tokens):
        noise = round(tokens * density)
        spans = round(noise / mean)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs
    while lengths(tokens + 1)[0] <= inputs:
        tokens += 1
    return tokens, lengths(tokens)[1]


@pytest.mark.parametrize("inputs", [64, 100, 128, 511, 512, 513, 1024, 1800])
@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.15, 5.0), (0.3, 10.0)])
def test_lengths_are_those_of_t5(inputs, density, mean):
    objective = make(inputs, 10**6, share=density, mean_span=mean)
    assert (objective.window, objective.lengths.targets) == t5_lengths(inputs, density, mean)
    assert inputs - 1 <= objective.lengths.source <= inputs


def test_the_lengths_that_t5_was_trained_with():
    lengths = make(512, 114).lengths
    assert (lengths.source, lengths.targets) == (512, 114)
    assert (lengths.kept + lengths.cut, lengths.cut, lengths.spans) == (568, 85, 28)


@given(st.integers(3, 300), st.integers(3, 300))
def test_the_window_is_the_longest_that_fits(source, targets):
    objective = make(source, targets)
    lengths = objective.lengths
    assert (lengths.source <= source, lengths.targets <= targets) == (True, True)
    longer = objective._lengths_of(objective.window + 1)
    assert longer.source > source or longer.targets > targets


@pytest.mark.parametrize(
    "objective",
    [
        make(),
        make(64, 10),  # limited by the targets; the source is padded
        make(64, 40),  # the targets are padded
        make(3, 3),
        make(50, 50, share=0.5, mean_span=1.0),
        make(20, 80, share=0.9, mean_span=1.0),  # cuts more than it keeps
    ],
)
def test_the_window_follows_from_source_and_targets(objective):
    batch, lengths = fields(objective), objective.lengths
    assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}
    assert batch["source"].shape == batch["source_mask"].shape == (500, objective.seq_length)
    assert batch["targets"].shape == (500, objective.decoder_seq_length)
    assert (batch["source_mask"].sum(1) == lengths.source).all()
    assert ((batch["source"] != PAD) == (batch["source_mask"] == 1)).all()
    assert ((batch["targets"] != -1).sum(1) == lengths.targets).all()
    assert (batch["targets"] != PAD).all()
    rows = windows(objective).rows(np.arange(500))
    for row, source, targets in zip(rows, batch["source"], batch["targets"], strict=True):
        assert restored(source, targets) == row[:-1].tolist()
        kept, cut = spans_of(source), spans_of(targets)[1:]
        assert [len(cut), kept[-1]] == [lengths.spans, []]  # the last span is at the end
        assert min(map(len, cut + kept[:-1])) >= 1
        assert sum(map(len, cut)) == lengths.cut


def test_every_way_to_cut_is_as_likely():
    objective = make(9, 7, share=0.4, mean_span=2.0)
    assert objective.lengths == (6, 4, 2)
    batch = fields(objective, np.arange(15_000))
    ways = collections.Counter(
        (len(kept[0]), len(cut[1]))
        for kept, cut in zip(
            map(spans_of, batch["source"]), map(spans_of, batch["targets"]), strict=True
        )
    )
    assert set(ways) == set(itertools.product(range(1, 6), range(1, 4)))
    assert list(ways.values()) == pytest.approx([1000] * 15, rel=0.15)


@given(
    st.lists(st.integers(0, 10**12), max_size=8),
    st.integers(0, 2**63 - 1),
    st.tuples(st.integers(3, 40), st.integers(3, 20)),
)
def test_a_row_is_a_function_of_seed_and_number(numbers, seed, lengths):
    objective = make(*lengths)
    samples = windows(objective, tokens=200)
    together = fields(objective, numbers, seed=seed, samples=samples)
    for place, number in enumerate(numbers):
        alone = fields(objective, [number], seed=seed, samples=samples)
        assert {name: x[place].tolist() for name, x in together.items()} == {
            name: x[0].tolist() for name, x in alone.items()
        }


def test_samples_epochs_and_seeds_differ():
    objective = make()
    size = windows(objective).windows_per_epoch
    places = {
        np.isin(fields(objective, [number], seed=seed)["source"], SENTINELS).tobytes()
        for number in (0, 1, size, 5 * size)
        for seed in (0, 1)
    }
    assert len(places) == 8


def test_the_fields_are_the_same_on_every_machine_and_numpy():
    """Expected values that must never change, since a resumed run needs the same data."""
    objective = make(16, 14, share=0.4, mean_span=2.0)
    samples = windows(objective, tokens=300, seed=7)
    batch = fields(objective, [3, 5, 26], seed=7, samples=samples)
    assert {name: x.tolist() for name, x in batch.items()} == EXPECTED


EXPECTED = {
    'source': [
        [117, 118, 119, 5101, 123, 124, 5100, 126, 127, 5099, 131, 132, 133, 134, 5098, 5001],
        [41, 5101, 43, 44, 45, 46, 47, 5100, 49, 50, 51, 52, 5099, 56, 5098, 5001],
        [121, 122, 123, 5101, 125, 5100, 128, 129, 130, 131, 5099, 133, 134, 135, 5098, 5001],
    ],
    'source_mask': [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    'targets': [
        [5101, 120, 121, 122, 5100, 125, 5099, 128, 129, 130, 5098, 135, 5001, -1],
        [5101, 42, 5100, 48, 5099, 53, 54, 55, 5098, 57, 58, 59, 5001, -1],
        [5101, 124, 5100, 126, 127, 5099, 132, 5098, 136, 137, 138, 139, 5001, -1],
    ],
}  # fmt: skip


def test_the_ids_are_those_of_the_tokenizer():
    ids = SpanIds.of(ByteTokenizer(SPAN_TOKENS))
    assert ids == SpanIds(257, 256, sentinels=tuple(range(357, 257, -1)), vocab_size=358)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: make(2, 20), r"model\.seq_length=2 holds no token, sentinel and end; use 3 or m"),
        (
            lambda: make(20, 2),
            r"model\.encoder_decoder\.seq_length=2 holds no token, sentinel and end",
        ),
        (
            lambda: make(4096, 4096),
            r"model\.seq_length=4096 has 227 spans, but data\.tokenizer has 100",
        ),
        (
            lambda: make(2**20, 2**20, mean_span=1e5),
            r"model\.seq_length makes samples of \d+ tokens, but at most 1048576 can be shuffled",
        ),
        (lambda: make(share=0.0), r"share=0\.0 of tokens to cut out; use one between 0 and 1"),
        (lambda: make(share=1.0), r"share=1\.0 of tokens"),
        (lambda: make(share=float("nan")), r"share=nan of tokens"),
        (lambda: make(mean_span=0.5), r"mean_span=0\.5 tokens; use 1 or more"),
        (lambda: make(mean_span=float("inf")), r"mean_span=inf tokens"),
        (lambda: make(mean_span=float("nan")), r"mean_span=nan tokens"),
        (
            lambda: SpanIds.of(ByteTokenizer()),
            r"data\.tokenizer has no token <pad> and no <extra_id_0>, which span corruption needs",
        ),
    ],
)
def test_what_is_wrong_is_one_line(make_it, message):
    with pytest.raises(UserError, match=message) as error:
        make_it()
    assert "\n" not in str(error.value)
