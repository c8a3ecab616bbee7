"""Samples of an objective: opened from files and mixtures, read field by field."""

import numpy as np
import pytest
import tokenizers

from jaxptd.config import DataConfig, ModelConfig
from jaxptd.config.run import Config
from jaxptd.data import (
    ByteTokenizer,
    MaskedPairs,
    Mixture,
    Prepared,
    SpanCorruption,
    WindowsInOrder,
    load_tokenizer,
    open_data,
)
from jaxptd.data.objectives import MASK_TOKENS, SPAN_TOKENS, MaskIds, SpanIds
from jaxptd.data.objectives.prepared import draw, shuffle
from jaxptd.data.token_files import write_bin
from jaxptd.data.tokenizers import UNKNOWN, with_vocabulary
from jaxptd.errors import UserError

BYTES = {MaskedPairs: ByteTokenizer(MASK_TOKENS), SpanCorruption: ByteTokenizer(SPAN_TOKENS)}
PAIRS = MaskedPairs(MaskIds.of(BYTES[MaskedPairs]), 16)
SPANS = SpanCorruption(SpanIds.of(BYTES[SpanCorruption]), 16, 8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text and tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web.txt").write_text("w" * 400)
    (tmp_path / "short.txt").write_text("s" * 40)
    write_bin("code.bin", np.full(500, ord("c")))
    return tmp_path


def opened(objective, source, *, seed=0, fraction=0.2, **fields):
    tokenizer = BYTES[type(objective)]
    config = DataConfig(source=source, validation_fraction=fraction, **fields)
    sizes = {"seq_length": objective.seq_length, "vocab_size": tokenizer.vocab_size, "seed": seed}
    return open_data(config, tokenizer, **sizes, objective=objective)


# ---- opened -------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [PAIRS, SPANS])
@pytest.mark.parametrize("source", ["web.txt", "code.bin", {"web.txt": 1, "code.bin": 3}])
def test_both_splits_of_any_source_have_the_fields(folder, objective, source):
    data = opened(objective, source, seed=5)
    numbers = np.arange(30, 50)
    for split, seed in ((data.train, 5), (data.validation, 0)):
        assert isinstance(split, Prepared)
        assert split.rows(numbers).shape == (20, objective.window + 1)
        expected = objective.fields(split.samples, numbers, seed=seed)
        for name, array in expected.items():
            assert (split.field(name, numbers) == array).all()
    assert isinstance(data.train.samples, Mixture) == isinstance(source, dict)


def test_prepared_samples_count_as_the_windows_do(folder):
    train = opened(SPANS, "web.txt").train
    windows = train.samples
    assert train.num_tokens == windows.num_tokens == 321
    assert train.windows_per_epoch == windows.windows_per_epoch
    assert train.seq_length == windows.seq_length == SPANS.window
    assert train.first_tokens(3).tolist() == [ord("w")] * 3
    assert (train.targets([1, 2]) == windows.targets([1, 2])).all()


def test_no_validation(folder):
    assert opened(PAIRS, "web.txt", fraction=0.0).validation is None


def test_b_of_a_mixture_is_of_any_source(folder):
    train = opened(PAIRS, {"web.txt": 1, "code.bin": 1}).train
    tokens = train.field("tokens", np.arange(200))
    is_text = np.isin(tokens, [ord("w"), ord("c")])
    both = (tokens == ord("w")).any(1) & (tokens == ord("c")).any(1)
    assert is_text.any(1).all()
    assert (train.field("next_sentence", np.arange(200))[both] == 1).mean() > 0.8
    assert both.sum() > 20


@pytest.mark.parametrize(
    ("objective", "source", "fields", "message"),
    [
        (PAIRS, "web.txt", {"prompt_field": "q"}, r"data\.prompt_field='q': .*_field=null"),
        (SPANS, "web.txt", {"documents": "apart"}, r"data\.documents='apart': .*s=joined"),
        (SPANS, "short.txt", {}, r"leaves validation 8, one sequence takes 18; use 0\.44 to"),
        (PAIRS, "short.txt", {"fraction": 0.4}, r"25 tokens are one window of 13, but half"),
        (
            SPANS,
            {"web.txt": 1, "short.txt": 1},
            {"fraction": 0.0, "seq_length": 64},
            r"data\.source, 'short\.txt': the corpus has 41 tokens, one sequence takes",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(folder, objective, source, fields, message):
    if fields.pop("seq_length", None):
        objective = SpanCorruption(objective.ids, 64, 20)
    with pytest.raises(UserError, match=message) as error:
        opened(objective, source, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["web.txt", "code.bin"])
@pytest.mark.parametrize("objective", [PAIRS, SPANS])
def test_a_model_without_the_special_ids_is_one_line(folder, source, objective):
    config, size = DataConfig(source=source), BYTES[type(objective)].vocab_size
    sizes = {"seq_length": 8, "vocab_size": size - 1, "seed": 0}
    message = rf"model\.vocab_size={size - 1} is below the tokenizer's {size}; use {size} or more"
    with pytest.raises(UserError, match=message):
        open_data(config, ByteTokenizer(), **sizes, objective=objective)


# ---- read ---------------------------------------------------------------------------------------


class Counting(WindowsInOrder):
    reads = 0

    def rows(self, indices):
        type(self).reads += 1
        return super().rows(indices)


def test_the_fields_of_a_batch_are_made_once_and_cannot_be_changed():
    train = Prepared(Counting(np.arange(250), SPANS.window, 261), SPANS, seed=0)
    for numbers in (np.arange(4), [0, 1, 2, 3], np.arange(4, 8)):
        for name in ("source", "source_mask", "targets"):
            with pytest.raises(ValueError, match="read-only"):
                train.field(name, numbers)[0] = 0
    assert Counting.reads == 2


# ---- draws --------------------------------------------------------------------------------------


def test_draws_are_the_same_on_every_machine_and_numpy():
    """Expected values that must never change, since a resumed run needs the same data."""
    assert draw(7, np.array([2, 10**12]), 3).tolist() == EXPECTED


EXPECTED = [
    [10361223572152332647, 18197813462266471273, 16243957370914038008],
    [7974396031443285723, 5318193337324076735, 14295329527879228502],
]


def test_draws_of_samples_in_a_row_are_those_of_each():
    numbers = np.array([5, 6, 7, 7, 3, 4, 10**12])
    alone = [draw(3, numbers[place : place + 1], 6)[0] for place in range(len(numbers))]
    assert (draw(3, numbers, 6) == alone).all()


def test_no_draw_is_of_two_samples():
    drawn = draw(0, np.arange(1000), 5)
    assert len(np.unique(drawn)) == drawn.size
    assert draw(0, np.arange(0), 5).shape == (0, 5)


def test_places_are_shuffled_and_the_last_are_last():
    drawn = draw(0, np.arange(3000), 6)
    orders = shuffle(drawn[:, :4])
    assert (np.sort(orders) == np.arange(4)).all()
    found, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(found) == 24
    assert counts == pytest.approx([125] * 24, rel=0.3)
    last = np.arange(6) % 2 == 0
    assert (shuffle(drawn, np.tile(last, (3000, 1)))[:, 3:] == [0, 2, 4]).all()
    assert (shuffle(np.zeros((1, 5), np.uint64)) == np.arange(5)).all()


# ---- tokenizers ---------------------------------------------------------------------------------


def test_bytes_have_special_tokens_behind_their_own():
    tokenizer = load_tokenizer("bytes", MASK_TOKENS)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (261, 256)
    assert [tokenizer.token_id(name) for name in MASK_TOKENS] == [257, 258, 259, 260]
    assert tokenizer.token_id("[UNK]") is None
    assert tokenizer.encode("[MASK]").tolist() == list(b"[MASK]")
    assert tokenizer.decode([97, 260, 0xC3, 259, 98, 261]) == f"a[MASK]{UNKNOWN}[SEP]b{UNKNOWN}"


def test_bytes_without_them_are_as_they_were():
    assert (ByteTokenizer.vocab_size, load_tokenizer("bytes").vocab_size) == (257, 257)
    assert load_tokenizer("bytes").token_id("[MASK]") is None
    assert load_tokenizer("bytes").decode([97, 257]) == f"a{UNKNOWN}"


def test_the_vocabulary_of_a_config_has_them():
    config = Config(model=ModelConfig(num_layers=1, hidden_size=8, num_heads=1, seq_length=8))
    assert with_vocabulary(config).model.vocab_size == 257
    assert with_vocabulary(config, SPAN_TOKENS).model.vocab_size == 358


def word_level(path, *names):
    """Tokenizer with these tokens, at ids 10, 11 and so on, and end of document at 3."""
    vocabulary = {"<eos>": 3, "a": 4} | {name: 10 + place for place, name in enumerate(names)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<eos>")
    tokenizers.Tokenizer(model).save(str(path))
    return load_tokenizer(path, ("ignored",))


def test_files_have_special_tokens_of_their_own(tmp_path):
    tokenizer = word_level(tmp_path / "t.json", "[MASK]", "[SEP]", "[CLS]", "[PAD]")
    assert MaskIds.of(tokenizer) == MaskIds(13, 12, 11, 10, end_of_document=3, vocab_size=14)
    tokenizer = word_level(tmp_path / "t.json", "<extra_id_1>", "<extra_id_0>", "<pad>")
    assert SpanIds.of(tokenizer) == SpanIds(12, 3, sentinels=(11, 10), vocab_size=13)


def test_a_file_without_them_is_one_line(tmp_path):
    tokenizer = word_level(tmp_path / "t.json", "[MASK]", "<pad>")
    with pytest.raises(UserError, match=r"no token \[PAD\] and no \[CLS\] and no \[SEP\], which"):
        MaskIds.of(tokenizer)
    with pytest.raises(UserError, match=r"no token <extra_id_0>, which span corruption needs; ad"):
        SpanIds.of(tokenizer)
