"""Masked language modelling of pairs: exact shares, marks, labels, and the restored corpus."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.data import ByteTokenizer, MaskedPairs, ShuffledWindows, WindowsInOrder
from jaxptd.data.objectives import MASK_TOKENS, MaskIds
from jaxptd.errors import UserError

ORDINARY = 5000  # ids of the corpus are smaller and equal their positions
PAD, CLS, SEP, MASK, END = range(ORDINARY, ORDINARY + 5)
IDS = MaskIds(pad=PAD, cls=CLS, sep=SEP, mask=MASK, end_of_document=END, vocab_size=ORDINARY + 5)
LENGTH = 63
WINDOW = LENGTH - 3
TO_PREDICT = 9  # 15 % of 60


def make(seq_length=LENGTH, **shares):
    return MaskedPairs(IDS, seq_length, **shares)


def windows(tokens=None, *, seq_length=LENGTH, seed=None):
    """Windows over the given tokens; by default tokens equal their positions."""
    tokens = np.arange(ORDINARY) if tokens is None else tokens
    if seed is None:
        return WindowsInOrder(tokens, seq_length - 3, IDS.vocab_size)
    return ShuffledWindows(tokens, seq_length - 3, IDS.vocab_size, seed)


def fields(numbers=range(2000), *, seed=0, objective=None, samples=None):
    return (objective or make()).fields(samples or windows(), np.asarray(numbers), seed=seed)


def restored(batch):
    """Tokens before they were masked."""
    return np.where(batch["targets"] >= 0, batch["targets"], batch["tokens"])


def split(batch):
    """Yields A and B of each sample, restored."""
    for tokens, types in zip(restored(batch), batch["token_types"], strict=True):
        yield tokens[types == 0][1:-1], tokens[types == 1][:-1]


def test_a_sample_is_cls_a_sep_b_sep_without_padding():
    batch = fields()
    assert {x.dtype for x in batch.values()} == {np.dtype(np.int32)}
    shapes = {name: x.shape for name, x in batch.items()}
    assert shapes.pop("next_sentence") == (2000,)
    assert shapes == dict.fromkeys(["tokens", "token_types", "mask", "targets"], (2000, LENGTH))
    tokens, types = batch["tokens"], batch["token_types"]
    assert (tokens[:, 0] == CLS).all()
    assert (tokens[:, -1] == SEP).all()
    assert ((tokens == CLS).sum(1) == 1).all()
    assert ((tokens == SEP).sum(1) == 2).all()
    assert ((types == 0)[:, :-1] & (tokens == SEP)[:, :-1]).sum() == 2000
    assert (np.diff(types) >= 0).all()
    assert (types[:, 0] == 0).all()
    assert (batch["mask"] == 1).all()


def test_a_and_b_are_of_the_corpus_and_the_label_says_whether_b_follows():
    batch = fields()
    rows = windows().rows(np.arange(2000))
    for row, label, (a, b) in zip(rows, batch["next_sentence"], split(batch), strict=True):
        assert min(len(a), len(b)) >= 1
        assert (a == row[: len(a)]).all()
        assert (np.diff(b) == 1).all()
        assert (b[0] == a[-1] + 1) == (label == 0)
        assert label == 0 or (b[0] - row[0]) % WINDOW == len(a)  # B continues another window


def test_half_of_the_samples_are_swapped_and_every_split_and_other_window_is_drawn():
    batch = fields(np.arange(40_000))
    swapped = batch["next_sentence"] == 1
    assert swapped.mean() == pytest.approx(0.5, abs=0.01)
    sizes = np.array([len(a) for a, _ in split(batch)])
    assert np.unique(sizes).tolist() == list(range(1, WINDOW))
    assert np.bincount(sizes)[1:] == pytest.approx(40_000 / (WINDOW - 1), rel=0.25)
    first = np.array([a[0] // WINDOW for a, _ in split(batch)])
    second = np.array([b[0] // WINDOW for _, b in split(batch)])
    apart = (second - first)[swapped] % windows().windows_per_epoch
    assert np.unique(apart).tolist() == list(range(1, windows().windows_per_epoch))


def test_b_is_of_the_same_epoch():
    samples = windows(np.arange(300), seed=1)
    size = samples.windows_per_epoch
    for epoch in range(3):
        numbers = np.arange(epoch * size, (epoch + 1) * size)
        starts = samples.starts(numbers)
        batch = fields(numbers, samples=samples)
        for a, b in split(batch):
            assert a[0] in starts
            assert b[0] - len(a) in starts


def test_exactly_the_share_is_predicted():
    targets = fields()["targets"]
    assert ((targets >= 0).sum(1) == TO_PREDICT).all()
    assert targets.min() == -1
    places = (targets >= 0).sum(0)[2:-2]  # SEP after A is equally likely everywhere
    assert places == pytest.approx(2000 * TO_PREDICT / WINDOW, rel=0.25)


@pytest.mark.parametrize(("masked", "replaced"), [(0.8, 0.1), (0.5, 0.5), (0.0, 0.0), (0.0, 1.0)])
def test_predicted_tokens_are_masked_replaced_or_kept(masked, replaced):
    batch = fields(np.arange(20_000), objective=make(masked=masked, replaced=replaced))
    chosen = batch["targets"] >= 0
    seen, target = batch["tokens"][chosen], batch["targets"][chosen]
    is_mask, is_kept = seen == MASK, seen == target
    assert is_mask.mean() == pytest.approx(masked, abs=0.005)
    assert is_kept.mean() == pytest.approx(1 - masked - replaced, abs=0.005)
    others = seen[~is_mask & ~is_kept]
    assert others.max(initial=0) < ORDINARY
    if len(others):
        assert np.bincount(others // 500) == pytest.approx(len(others) / 10, rel=0.1)


def test_tokens_that_are_not_predicted_are_as_they_were():
    batch, plain = fields(), fields(objective=make(masked=0.0, replaced=0.0))
    unchanged = batch["targets"] < 0
    assert (batch["tokens"][unchanged] == plain["tokens"][unchanged]).all()
    assert (restored(batch) == plain["tokens"]).all()


@pytest.mark.parametrize("special", [PAD, CLS, SEP, MASK, END])
def test_special_tokens_of_the_corpus_are_never_predicted(special):
    tokens = np.arange(ORDINARY)
    tokens[np.random.default_rng(0).random(ORDINARY) < 0.5] = special
    batch = fields(objective=make(masked=0.0, replaced=0.0), samples=windows(tokens))
    targets = batch["targets"]
    assert targets.max() < ORDINARY
    ordinary = (batch["tokens"] < ORDINARY).sum(1)
    expected = np.maximum(1, np.rint(0.15 * ordinary))
    assert ((targets >= 0).sum(1) == expected).all()


def test_a_window_of_special_tokens_has_no_targets():
    batch = fields([0, 1], samples=windows(np.full(ORDINARY, END)))
    assert (batch["targets"] == -1).all()


@given(st.lists(st.integers(0, 10**12), max_size=8), st.integers(0, 2**63 - 1), st.integers(5, 30))
def test_a_row_is_a_function_of_seed_and_number(numbers, seed, seq_length):
    objective = make(seq_length)
    samples = windows(np.arange(200), seq_length=seq_length)
    together = fields(numbers, seed=seed, objective=objective, samples=samples)
    for place, number in enumerate(numbers):
        alone = fields([number], seed=seed, objective=objective, samples=samples)
        assert {name: x[place].tolist() for name, x in together.items()} == {
            name: x[0].tolist() for name, x in alone.items()
        }


def test_samples_epochs_and_seeds_differ():
    size = windows().windows_per_epoch
    patterns = {
        (fields([number], seed=seed)["targets"] >= 0).tobytes()
        for number in (0, 1, size, 5 * size)
        for seed in (0, 1)
    }
    assert len(patterns) == 8


def test_the_fields_are_the_same_on_every_machine_and_numpy():
    """Expected values that must never change, since a resumed run needs the same data."""
    samples = windows(np.arange(100, 400), seq_length=16, seed=7)
    batch = fields([6, 7, 26], seed=7, objective=make(16, share=0.3), samples=samples)
    assert {name: x.tolist() for name, x in batch.items()} == EXPECTED


EXPECTED = {
    'tokens': [
        [5001, 366, 367, 368, 4941, 370, 371, 5002, 5003, 321, 322, 5003, 324, 325, 5003, 5002],
        [5001, 132, 5003, 5003, 135, 136, 137, 5002, 138, 139, 5003, 5003, 142, 143, 144, 5002],
        [5001, 302, 5003, 5003, 305, 306, 307, 5002, 5003, 348, 349, 350, 5003, 352, 353, 5002],
    ],
    'token_types': [
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    'mask': [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    ],
    'targets': [
        [-1, -1, -1, -1, 369, -1, -1, -1, 320, -1, -1, 323, -1, -1, 326, -1],
        [-1, -1, 133, 134, -1, -1, -1, -1, -1, -1, 140, 141, -1, -1, -1, -1],
        [-1, -1, 303, 304, -1, -1, -1, -1, 347, -1, -1, -1, 351, -1, -1, -1],
    ],
    'next_sentence': [1, 0, 1],
}  # fmt: skip


def test_the_ids_are_those_of_the_tokenizer():
    ids = MaskIds.of(ByteTokenizer(MASK_TOKENS))
    assert dataclasses.astuple(ids) == (257, 258, 259, 260, 256, 261)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (
            lambda: make(4),
            r"model\.seq_length=4 is too short for a pair of sentences; use 5 or more",
        ),
        (lambda: make(2**20 + 4), r"samples of 1048577 tokens, but at most 1048576 can"),
        (lambda: make(share=0.0), r"share=0\.0 of predicted tokens; use above 0, up to 1"),
        (lambda: make(share=1.1), r"share=1\.1 of predicted tokens"),
        (lambda: make(share=float("nan")), r"share=nan of predicted tokens"),
        (lambda: make(masked=-0.1), r"masked=-0\.1 and replaced=0\.1 .*; use shares of 0"),
        (lambda: make(masked=0.8, replaced=0.3), r"masked=0\.8 and replaced=0\.3 .* at most 1"),
        (lambda: make(masked=float("nan")), r"masked=nan and"),
        (lambda: make(replaced=-0.1), r"masked=0\.8 and replaced=-0\.1 of"),
        (
            lambda: MaskIds.of(ByteTokenizer()),
            r"no token \[PAD\] and no \[CLS\] and no \[SEP\] and no \[MASK\], which masked lang",
        ),
        (
            lambda: make().check(windows(np.arange(90))),
            r"90 tokens are one window of 60, .*; use more data, another data\.validation_frac",
        ),
    ],
)
def test_what_is_wrong_is_one_line(make_it, message):
    with pytest.raises(UserError, match=message) as error:
        make_it()
    assert "\n" not in str(error.value)
