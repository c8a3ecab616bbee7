"""Conversion of text to ids and back, by both kinds of tokenizer; tokenizers that are refused."""

import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from jaxptd.data.tokenizers import (
    UNKNOWN,
    ByteTokenizer,
    JsonTokenizer,
    continuation,
    id_dtype,
    load_tokenizer,
    until_stop,
    with_begin,
)
from jaxptd.errors import UserError

ENDS = ["<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>"]


def train_bpe(path, *, special_tokens, change=lambda tokenizer: None):
    """Saves a byte-level BPE tokenizer with a few merges as JSON."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world hello"], trainer)
    change(tokenizer)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> JsonTokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return load_tokenizer(train_bpe(path, special_tokens=["<pad>", "<|endoftext|>"]))


def test_bytes_are_the_utf8_of_the_text():
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode("aé\n")
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert ids.dtype == np.uint16
    assert ids.tolist() == [97, 0xC3, 0xA9, 10]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_round_trip(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


@given(st.lists(st.integers(-5, 400)))
def test_bytes_decode_anything(ids):
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_bytes_decode_ends_unknown_ids_and_invalid_text():
    assert ByteTokenizer().decode([97, 256, 98]) == "a\nb"
    assert ByteTokenizer().decode([97, 300, 98]) == f"a{UNKNOWN}b"
    assert ByteTokenizer().decode([0xC3, 98]) == f"{UNKNOWN}b"
    assert ByteTokenizer().decode([]) == ""


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_json_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


def sentencepiece(path, *, single="<s> $A"):
    """SentencePiece-style tokenizer like Llama 2's: a mark replaces the space before a word."""
    words = ["<unk>", "<s>", "</s>", "\u2581Hello", "\u2581world", "a"]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    strip = decoders.Strip(content=" ", left=1, right=0)
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), strip])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    if single:
        template = tokenizers.processors.TemplateProcessing
        made.post_processor = template(
            single=single, pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made.save(str(path))
    return str(path)


def test_a_continuation_keeps_the_space_that_a_decoder_strips(tmp_path):
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "t.json"))
    assert tokenizer.decode([4, 4]) == "world world"
    assert continuation(tokenizer, [1, 3], [4, 4]) == " world world"
    assert continuation(tokenizer, [], [4]) == "world"


def test_a_continuation_completes_the_last_letter_of_its_prompt():
    assert continuation(ByteTokenizer(), [97, 0xC3], [0xA9, 98]) == "éb"
    assert continuation(ByteTokenizer(), [97], [0xC3]) == UNKNOWN


def test_a_text_ends_before_any_stop():
    assert until_stop("one two", ["", "x", "wo", " t"]) == "one"
    assert until_stop("one two", ["x"]) == "one two"


@pytest.mark.parametrize(
    ("single", "begin"), [("<s> $A", (1,)), ("<s> $A </s>", (1,)), ("$A </s>", ()), ("", ())]
)
def test_a_document_begins_as_the_post_processor_says(tmp_path, single, begin):
    path = sentencepiece(tmp_path / "t.json", single=single)
    assert load_tokenizer(path).begin == begin
    assert load_tokenizer(path, begin_token="none").begin == ()


def test_the_begin_of_other_post_processors(tmp_path):
    processors = tokenizers.processors
    template = processors.TemplateProcessing(
        single="<s> </s> $A", pair="$A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for made, begin in (
        (processors.Sequence([processors.ByteLevel(), template]), (1, 2)),
        (processors.BertProcessing(("</s>", 2), ("<s>", 1)), (1,)),
        (processors.RobertaProcessing(("</s>", 2), ("<s>", 1)), (1,)),
        (processors.ByteLevel(), ()),
    ):
        path = sentencepiece(tmp_path / "t.json")
        tokenizer = tokenizers.Tokenizer.from_file(path)
        tokenizer.post_processor = made
        tokenizer.save(path)
        assert load_tokenizer(path).begin == begin


def test_a_text_that_begins_by_itself_gets_no_second_begin(tmp_path):
    tokenizer = load_tokenizer(sentencepiece(tmp_path / "t.json"))
    assert with_begin(tokenizer, []) == [1]
    assert with_begin(tokenizer, [3]) == [1, 3]
    assert with_begin(tokenizer, tokenizer.encode("<s>Hello").tolist()) == [1, 3]


def test_json_merges_and_knows_its_end(bpe):
    ids = bpe.encode("hello world")
    assert len(ids) < len("hello world")
    assert ids.dtype == np.uint16
    assert bpe.end_of_document == 1
    assert bpe.vocab_size > max(ids)


def test_the_spelling_of_a_special_token_is_the_token_or_text(bpe, tmp_path):
    assert bpe.special == {"<pad>": 0, "<|endoftext|>": 1}
    a, b = bpe.encode("a"), bpe.encode("b")
    assert bpe.encode("a<|endoftext|>b").tolist() == [*a, 1, *b]
    path = train_bpe(tmp_path / "t.json", special_tokens=["<pad>", "<|endoftext|>"])
    plain = load_tokenizer(path, special_tokens="text")
    ids = plain.encode("a<|endoftext|>b")
    assert plain.end_of_document not in ids
    assert plain.decode(ids) == "a<|endoftext|>b"


def test_json_decodes_ends_and_unknown_ids(bpe):
    a, b = bpe.encode("a"), bpe.encode("b")
    assert bpe.decode([*a, bpe.end_of_document, *b]) == "a\nb"
    assert bpe.decode([*a, bpe.vocab_size + 5, -1, *b]) == f"a{UNKNOWN}{UNKNOWN}b"
    assert isinstance(bpe.decode(range(bpe.vocab_size)), str)


def test_json_ignores_saved_padding_and_truncation(tmp_path):
    def change(tokenizer):
        tokenizer.enable_padding(length=50)
        tokenizer.enable_truncation(3)

    path = train_bpe(tmp_path / "t.json", special_tokens=["</s>"], change=change)
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("one two three four")) == "one two three four"


def test_json_vocabulary_with_gaps_covers_its_largest_id(tmp_path):
    model = tokenizers.models.WordLevel({"<eos>": 3, "a": 70_000}, unk_token="<eos>")
    tokenizers.Tokenizer(model).save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.vocab_size == 70_001
    assert tokenizer.encode("a").dtype == np.uint32
    assert tokenizer.decode([70_000, 5]) == f"a{UNKNOWN}"


@pytest.mark.parametrize("first", range(len(ENDS)))
def test_json_end_of_document_is_the_first_known(tmp_path, first):
    path = train_bpe(tmp_path / "t.json", special_tokens=list(reversed(ENDS[first:])))
    assert load_tokenizer(path).end_of_document == len(ENDS) - 1 - first


def test_json_without_an_end_of_document_is_an_error(tmp_path):
    path = train_bpe(tmp_path / "t.json", special_tokens=["<pad>"])
    with pytest.raises(UserError, match=r"no end-of-document token.*<\|endoftext\|>"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b"\xff\x00"])
def test_file_that_is_no_tokenizer_is_an_error(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data\.tokenizer=.*t\.json.* is not a tokenizer.json"):
        load_tokenizer(str(path))


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"data\.tokenizer='gpt2': no such file; use bytes"):
        load_tokenizer("gpt2")
    with pytest.raises(UserError, match="it has a null byte"):
        load_tokenizer("a\0b")
    with pytest.raises(UserError, match=r"data\.tokenizer=.*not a file on disk; use bytes"):
        load_tokenizer("/dev/zero")


def test_missing_extra_is_an_error(tmp_path, monkeypatch):
    path = train_bpe(tmp_path / "t.json", special_tokens=["</s>"])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[hf\]'"):
        load_tokenizer(path)


def without_unknown(kind):
    """Tokenizer that knows the letters of "hello" and has no unknown token."""
    vocabulary = {"<eos>": 0, "h": 1, "e": 2, "l": 3, "o": 4}
    models = tokenizers.models
    return {
        "WordLevel": lambda: models.WordLevel(vocabulary),
        "WordPiece": lambda: models.WordPiece(vocabulary),
        "Unigram": lambda: models.Unigram([(letter, -1.0) for letter in vocabulary]),
        "BPE": lambda: models.BPE(vocabulary, []),
        "BPE whose unknown token is not there": lambda: models.BPE(vocabulary, [], unk_token="?"),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["WordLevel", "WordPiece", "Unigram", "BPE", "BPE whose unknown token is not there"]
)
def test_text_that_a_tokenizer_without_an_unknown_token_does_not_know_is_an_error(tmp_path, kind):
    path = str(tmp_path / "t.json")
    tokenizers.Tokenizer(without_unknown(kind)).save(path)
    tokenizer = load_tokenizer(path)
    with pytest.raises(
        UserError, match=rf"data\.tokenizer='{path}' .*; use a byte-level tokenizer"
    ):
        tokenizer.encode("hellö")


def test_a_tokenizer_that_drops_characters_names_the_first_it_would_drop(tmp_path):
    path = str(tmp_path / "t.json")
    tokenizers.Tokenizer(without_unknown("BPE")).save(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello\n").tolist() == [1, 2, 3, 3, 4]
    with pytest.raises(UserError, match=r"has no token for '\\xf6' \(character 4 of a text\)"):
        tokenizer.encode("hellö")


def test_half_a_surrogate_pair_is_an_error(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(UserError, match=r"half a surrogate pair \('\\ud800' at character 2\)"):
            tokenizer.encode("ab\ud800")


def test_id_dtype_is_the_smallest():
    assert id_dtype(2**16) is np.uint16
    assert id_dtype(2**16 + 1) is np.uint32
