"""Begin and end tokens of documents, and special tokens spelled out in texts."""

import json

import numpy as np
import pytest
import tokenizers

from jaxptd.config import Config, DataConfig, ModelConfig
from jaxptd.data import MaskedPairs, load_tokenizer, open_data
from jaxptd.data.objectives import MaskIds
from jaxptd.errors import UserError
from jaxptd.models.families import tokenizer_of

BEGIN, END, USER, PAD, UNKNOWN = 0, 1, 2, 3, 4
SPECIAL = ["<s>", "</s>", "<|user|>", "[PAD]", "<unk>"]
WORDS = {word: number for number, word in enumerate([*SPECIAL, *"abcdefgh"])}


@pytest.fixture
def path(tmp_path):
    """Tokenizer of eight letters whose files put <s> before a text, as Llama's do."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(SPECIAL)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BEGIN)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def read(path, texts, *, vocab_size=13, **options):
    """Tokens of a .jsonl file of texts or records, and the messages about it."""
    records = [text if isinstance(text, dict) else {"text": text} for text in texts]
    source = path.with_name("source.jsonl")
    source.write_text("\n".join(map(json.dumps, records)))
    config = DataConfig(str(source), str(path), validation_fraction=0, **options)
    tokenizer = tokenizer_of(Config(data=config))
    data = open_data(config, tokenizer, seq_length=2, vocab_size=vocab_size, seed=0)
    return data.train, data.remarks


def ids(train):
    return np.asarray(train.tokens).tolist()


def test_a_document_has_its_begin_and_its_end(path):
    train, remarks = read(path, ["a b", "c"])
    assert ids(train) == [BEGIN, 5, 6, END, BEGIN, 7, END]
    assert remarks == (
        "each document begins with <s>, as the tokenizer's files say; data.begin_token=none "
        "leaves that out",
    )
    train, remarks = read(path, ["a b", "c"], begin_token="none")
    assert ids(train) == [5, 6, END, 7, END]
    assert remarks == ()


def test_ends_that_a_text_spells_are_ends_and_none_is_there_twice(path):
    train, remarks = read(path, ["<s>a</s>\nb</s>", "c</s>  \n", "</s>d"])
    assert ids(train) == [BEGIN, 5, END, 6, END, BEGIN, 7, END, BEGIN, END, 8, END]
    assert remarks[1] == (
        "the text spells out special tokens 5 times (</s>, <s>): read as these tokens; "
        "data.special_tokens=text reads them as plain text"
    )


def test_spellings_can_be_read_as_text(path):
    train, remarks = read(path, ["a</s>b"], special_tokens="text")
    assert END not in ids(train)[:-1]
    assert remarks[1] == (
        "the text spells out special tokens once (</s>): read as plain text; "
        "data.special_tokens=parse reads them as these tokens"
    )


def test_what_begins_a_prompt_is_not_counted(path):
    records = [{"prompt": "<|user|> a", "text": "b</s>"}, {"prompt": "", "text": "c"}]
    train, _ = read(path, records, prompt_field="prompt")
    assert ids(train) == [BEGIN, USER, 5, 6, END, BEGIN, 7, END]
    assert train.counted.tolist() == [False, False, False, True, True, False, True, True]


def test_a_tokenizer_may_be_larger_than_the_model_where_no_text_has_the_token(path):
    words = {"<unk>": 0, "</s>": 1, "a": 2, "[PAD]": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.add_special_tokens(["</s>", "[PAD]"])
    made.save(str(path))
    train, _ = read(path, ["a", "a"], vocab_size=3)
    assert ids(train) == [2, 1, 2, 1]
    message = r"vocab_size=3, but the text has the token '\[PAD\]' with id 3; leave it out of the"
    with pytest.raises(UserError, match=message):
        read(path, ["a[PAD]"], vocab_size=3)


def test_families_with_an_objective_begin_documents_by_themselves(path):
    data = DataConfig(tokenizer=str(path))
    assert tokenizer_of(Config(ModelConfig(family="llama"), data=data)).begin == (BEGIN,)
    own = tokenizer_of(Config(ModelConfig(family="bert"), data=data))
    assert (own.begin, own.special_tokens) == ((), "text")
    assert load_tokenizer(path).begin == (BEGIN,)


def test_a_folder_may_say_that_spellings_are_text(path):
    settings = path.with_name("tokenizer_config.json")
    settings.write_text('{"split_special_tokens": true, "eos_token": "</s>"}')
    path.rename(path.with_name("tokenizer.json"))
    own = load_tokenizer(path.parent)
    assert own.special_tokens == "text"
    assert END not in own.encode("a</s>b")
    assert END in load_tokenizer(path.parent, special_tokens="parse").encode("a</s>b")
    settings.write_text('{"eos_token": "</s>"}')
    assert END in load_tokenizer(path.parent).encode("a</s>b")


def test_nothing_is_said_of_spellings_where_the_objective_places_special_tokens(path):
    from_text = path.with_name("source.txt")
    from_text.write_text("a b </s> c " * 9)
    special = MaskIds(pad=3, cls=0, sep=1, mask=2, end_of_document=1, vocab_size=13)
    objective = MaskedPairs(special, seq_length=8)
    tokenizer = load_tokenizer(path, special_tokens="text")
    data = DataConfig(str(from_text), str(path), validation_fraction=0)
    sizes = {"seq_length": 8, "vocab_size": 13, "seed": 0}
    assert "spells" in open_data(data, tokenizer, **sizes).remarks[-1]
    assert "spells" not in str(open_data(data, tokenizer, **sizes, objective=objective).remarks)
