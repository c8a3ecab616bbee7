"""Chats as training data: their forms, what is learned, records that are too long, bad input."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, open_data
from jaxptd.data.batches import change
from jaxptd.data.chats import Chats, learned
from jaxptd.errors import UserError

TEMPLATE = """\
{%- for message in messages %}
{{- message.role[0] ~ ':' ~ message.content ~ ';' }}
{%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
{%- endfor %}
{{- 'a:' if add_generation_prompt }}"""
TWO = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "fo\N{LATIN SMALL LETTER U WITH DIAERESIS}r"},
]
WRITTEN = "u:one;a:two;u:three;a:fo\N{LATIN SMALL LETTER U WITH DIAERESIS}r;"
ONE = TWO[:2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.jinja").write_text(TEMPLATE)


def written(*chats, name="c.jsonl", field="messages", **others):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({field: chat, **others}) + "\n" for chat in chats)
    return name


def opened(source, *, seq_length=8, tokenizer=None, **fields):
    given = {"messages_field": "messages", "chat_template": "t.jinja", "validation_fraction": 0.0}
    given |= fields
    config = DataConfig(source=source, **given)
    tokenizer = tokenizer or ByteTokenizer()
    return open_data(config, tokenizer, seq_length=seq_length, vocab_size=257, seed=0)


def text(data):
    return bytes(data.train.tokens.tolist()).decode()


def taught(data):
    """What is learned of the data."""
    ids, counted = data.train.tokens, data.train.counted
    return bytes(ids[counted].tolist()).decode()


# ---- what is learned -----------------------------------------------------------------------------


def test_the_turns_of_the_assistant_are_learned_from_their_first_token_to_their_end():
    data = opened(written(TWO))
    assert text(data) == WRITTEN
    assert taught(data) == "two;fo\N{LATIN SMALL LETTER U WITH DIAERESIS}r;"
    first = WRITTEN.index("two")
    assert data.train.counted[first - 1 : first + 5].tolist() == [0, 1, 1, 1, 1, 0]
    assert taught(opened(written(TWO), train_on="last")).startswith("fo")
    assert opened(written(TWO), train_on="all").train.counted is None


def test_targets_are_the_tokens_that_are_learned():
    data = opened(written(*[TWO] * 4), seq_length=20).train
    ids, counted = data.tokens.astype(int), data.counted
    for number in range(data.windows_per_epoch):
        (start,) = data.starts(np.array([number]))
        window = slice(start + 1, start + 21)
        expected = np.where(counted[window], ids[window], -1)
        assert (data.targets([number])[0] == expected).all()


def test_each_chat_is_a_document_whatever_ends_its_turns(tmp_path):
    """Also where the end of a turn is the tokenizer's end of document, as in Qwen's."""
    data = opened(written(*[ONE] * 4), seq_length=20, documents="apart").train
    size, start = len("u:one;a:two;"), data.starts(np.array([0]))[0]
    place = start + np.arange(20)
    expected = place // size - place[0] // size
    assert data.documents([0], ord(";")).tolist() == [expected.tolist()]


@pytest.mark.parametrize(
    ("places", "span", "expected"),
    [
        ([[0, 2], [2, 4], [4, 6]], (2, 4), [0, 1, 0]),
        ([[0, 3], [3, 6]], (2, 4), [1, 1]),  # a token over the border has a part of the turn
        ([[0, 1], [2, 2], [2, 4], [4, 5]], (2, 5), [0, 0, 1, 1]),  # spaces that are left out
        ([[0, 2], [4, 4], [4, 6]], (2, 4), [0, 1, 0]),  # the same at the end of a turn
        ([[0, 1], [1, 2], [1, 2], [1, 2]], (1, 2), [0, 1, 1, 1]),  # the bytes of a letter
        ([[0, 1]], (1, 1), [0]),
    ],
)
def test_tokens_with_a_character_of_a_turn_are_learned(places, span, expected):
    assert learned(np.array(places), [span]).tolist() == [bool(each) for each in expected]


def test_a_template_says_what_is_learned(tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.role[0] ~ ':' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %};{% else %}{{ m.content }};{% endif %}"
        "{% endfor %}"
    )
    data = opened(written(TWO))
    assert text(data) == WRITTEN
    assert taught(data) == "twofo\N{LATIN SMALL LETTER U WITH DIAERESIS}r"
    assert taught(opened(written(TWO), train_on="last")).startswith("fo")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}",
            "changes the text around {% generation %}",
        ),
        (
            "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
            "{% generation %} within another",
        ),
        ("{{ messages | length }}", "message 2 or what comes before it differently"),
    ],
)
def test_a_template_that_does_not_show_turns_is_refused(tmp_path, template, message):
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(UserError, match=message):
        opened(written(TWO))


def test_chats_without_an_answer_are_left_out_and_counted():
    data = opened(written(TWO, TWO[:1], ONE))
    assert text(data) == WRITTEN + "u:one;a:two;"
    assert "1 of 3 chats have nothing that counts in the loss, and were left out" in data.remarks
    with pytest.raises(UserError, match="no chats are left: .* and 1 have nothing that counts"):
        opened(written(TWO[:1]))


# ---- forms ---------------------------------------------------------------------------------------

SHARE = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]


def test_sharegpt_is_recognized_and_said():
    data = opened(written(SHARE, field="talk"), messages_field="talk")
    assert (text(data), taught(data)) == ("u:one;a:two;", "two;")
    assert data.remarks[0].startswith('chats in "talk" have the form sharegpt')
    named = opened(written(SHARE, field="conversations"), messages_field=None, format="sharegpt")
    assert text(named) == text(data)
    assert not any("have the form" in remark for remark in named.remarks)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_alpaca_is_read_from_records_and_tables(name):
    rows = [("one", "more", "two"), ("three", "", "four"), ("none", "", "")]
    keys = ("instruction", "input", "output")
    if name == "a.jsonl":
        with open(name, "w") as file:
            file.writelines(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in rows)
    elif name == "a.csv":
        with open(name, "w") as file:
            file.write("\n".join(map(",".join, (keys, *rows))))
    else:
        pq.write_table(pa.table(dict(zip(keys, zip(*rows, strict=True), strict=True))), name)
    data = opened(name, messages_field=None, format="alpaca")
    assert text(data) == "u:one\n\nmore;a:two;u:three;a:four;"
    assert any("1 of 3 chats have nothing that counts" in each for each in data.remarks)


def test_parquet_has_the_chats_of_json():
    calls = [{"function": {"name": "f", "arguments": {"x": "1"}}}]
    chat = [TWO[0], {"role": "assistant", "content": "", "tool_calls": calls}, *TWO[2:]]
    pq.write_table(pa.table({"messages": [chat, ONE]}), "c.parquet")
    found = [opened(name).train for name in ("c.parquet", written(chat, ONE))]
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    assert (found[0].counted == found[1].counted).all()


def test_tools_go_to_the_template(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ tools | tojson if tools }}|" + TEMPLATE)
    tools = [{"name": "sky"}]
    for given in (tools, json.dumps(tools)):
        assert text(opened(written(ONE, tools=given))).startswith('[{"name": "sky"}]|u:')
    assert text(opened(written(ONE, functions=tools), tools_field="functions"))[0] == "["
    assert text(opened(written(ONE, tools=tools), tools_field=None))[0] == "|"


def test_sources_of_a_mixture_may_have_other_forms():
    names = {
        written(ONE, name="a.jsonl"): 1.0,
        written(SHARE, name="b.jsonl"): 1.0,
    }
    data = opened(names)
    forms = [remark for remark in data.remarks if "have the form" in remark]
    assert [remark.partition(":")[0] for remark in forms] == ["a.jsonl", "b.jsonl"]
    assert [part.tokens.tolist() for part in data.train.parts] == [[*b"u:one;a:two;"]] * 2
    numbers = np.arange(6)
    apart = data.train.documents(numbers, 256)
    sources, own = data.train.locate(numbers)
    for row, source, number in zip(apart, sources, own, strict=True):
        assert (row == data.train.parts[source].documents([number], 256)[0]).all()


# ---- records that are too long -------------------------------------------------------------------


def test_long_records_are_split_cut_left_out_or_refused():
    source = written(ONE, TWO, ONE)
    size = len(WRITTEN.encode())
    fitting = {"seq_length": size - 1}  # a sequence has one token more
    split = opened(source, seq_length=20)
    assert len(split.train.tokens) == 24 + size
    assert "1 of 3 chats have more tokens than a sequence, 21; they go on in another" in str(
        split.remarks
    )
    assert not any("more tokens" in remark for remark in opened(source, **fitting).remarks)
    cut = opened(source, seq_length=20, too_long="cut")
    assert text(cut) == "u:one;a:two;" + WRITTEN[:21] + "u:one;a:two;"
    assert "1 of 3 chats have more tokens than a sequence, 21; they lost" in str(cut.remarks)
    dropped = opened(source, seq_length=20, too_long="drop")
    assert text(dropped) == "u:one;a:two;" * 2
    assert "21; they were left out (data.too_long=drop)" in str(dropped.remarks)
    with pytest.raises(UserError, match="refuse: record 2 of data.source has 28 tokens.*21; use"):
        opened(source, seq_length=20, too_long="refuse")
    assert len(opened(source, too_long="refuse", **fitting).train.tokens) == 24 + size


def test_texts_and_prompts_may_be_too_long_as_well(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "a long text"}\n{"text": "two"}')
    unset = {"messages_field": None, "chat_template": None, "seq_length": 5}
    cut = opened("a.jsonl", too_long="cut", documents="apart", **unset)
    assert cut.train.tokens.tolist() == [*b"one", 256, *b"a long", *b"two", 256]
    assert cut.train.ends.tolist() == [4, 10, 14]  # also of the record without an end token
    dropped = opened("a.jsonl", too_long="drop", **unset)
    assert dropped.train.tokens.tolist() == [*b"one", 256, *b"two", 256]
    assert dropped.remarks == (
        "1 of 3 records have more tokens than a sequence, 6; they were left out "
        "(data.too_long=drop)",
    )
    (tmp_path / "p.jsonl").write_text('{"q": "long prompt", "text": "x"}\n{"q": "p", "text": "y"}')
    prompts = opened("p.jsonl", prompt_field="q", too_long="cut", **unset | {"seq_length": 2})
    assert prompts.train.tokens.tolist() == [*b"py", 256]  # nothing of the first was an answer


# ---- the identity of data ------------------------------------------------------------------------


def test_another_template_or_mask_is_other_data(tmp_path):
    before = opened(written(TWO, ONE))
    assert opened(written(TWO, ONE)).identity == before.identity
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("';'", "'.'"))
    after = opened("c.jsonl")
    assert "tokenizer or chat template has changed" in change(after.identity, before.identity)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    last = opened("c.jsonl", train_on="last")
    assert last.train.tokens.tolist() == before.train.tokens.tolist()
    assert last.identity != before.identity


def test_the_day_is_fixed(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%d %b %Y') }} " + TEMPLATE)
    with pytest.raises(
        UserError, match=r"writes today's date .*fix the day with data.chat_date=20"
    ):
        opened(written(ONE))
    assert text(opened("c.jsonl", chat_date="2026-03-01")) == "01 Mar 2026u:one;a:two;"


# ---- bad input -----------------------------------------------------------------------------------

BAD = [
    ([], r"c\.jsonl line 1: its chat is an empty list; it must be a list of messages"),
    ("hello", "its chat is a text; it must be a list"),
    (None, "its chat is null"),
    ({}, "its chat is an object"),
    ([3], "message 1 is a number; it must be an object"),
    ([{}], "message 1 has nothing; a message has role and content, or from and value"),
    ([{"text": "x", "by": "me"}], "message 1 has text, by; a message has role"),
    ([TWO[0], {"content": "x"}], "message 2 has no role"),
    ([{"role": 3, "content": "x"}], "message 1 has no role, a text such as user"),
    ([{"role": "user"}], "message 1 has no content; give it a text"),
    ([{"role": "user", "content": None}], "message 1 has no content: it is null; give it a text"),
    ([{"role": "user", "content": 3}], "message 1: content is a number; use a text or a list"),
    ([{"role": "user", "content": {"a": 1}}], "message 1: content is an object"),
    (
        [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
        r"message 1 has a part that is no text \(image\)",
    ),
    ([{"role": "user", "content": [3]}], r"has a part that is no text \(a number\)"),
    ([*ONE, {"role": "assistant", "tool_calls": "f"}], "message 3: tool_calls must be a list"),
    ([{"role": "user", "content": "\ud800"}], r"'\\ud800' is half a surrogate pair"),
    ([SHARE[0], {"from": "gpt"}], "a message has no value; ShareGPT's have from and value"),
    ([{"role": "user", "tool_calls": [{}]}, ""], "message 2 is a text; it must be an object"),
]


@pytest.mark.parametrize(("chat", "message"), BAD)
def test_bad_chats_are_refused_in_a_line(chat, message):
    with pytest.raises(UserError, match=message) as error:
        opened(written(chat))
    assert "\n" not in str(error.value)
    assert "c.jsonl line 1" in str(error.value)


def test_chats_that_are_read_as_text_are_named():
    hint = 'no string "text".*only messages; if messages is a chat, name it with data.messages_f'
    with pytest.raises(UserError, match=hint):
        opened(written(ONE), messages_field=None, chat_template=None)


def test_a_record_without_the_field_lists_those_it_has():
    with pytest.raises(
        UserError, match='has no field "chat".*it has messages: name the field of c'
    ):
        opened(written(ONE), messages_field="chat")
    with pytest.raises(
        UserError, match='no field "instruction".*data.format=alpaca reads instruct'
    ):
        opened("c.jsonl", messages_field=None, format="alpaca")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.txt", b"hello", r"c\.txt has no fields, so it holds no chats"),
        ("c.jsonl", b"", r"c\.jsonl holds no chats; leave it out"),
        ("c.jsonl", b'{"messages": [\xff]}', "line 1 is not UTF-8 text"),
        ("c.jsonl", b"{", "line 1 is not JSON"),
        ("c.jsonl", b"3", 'line 1 has no field "messages"; each line must be an object'),
        ("c.csv", b"messages\nhi\n", "its chat is a text; it must be a list of messages"),
    ],
)
def test_files_that_hold_no_chats_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened(name)


@pytest.mark.parametrize(
    ("tools", "message"),
    [("{", "its tools is a text that is not JSON"), ([1], "its tools is not a list of objects")],
)
def test_bad_tools_are_refused(tools, message):
    with pytest.raises(UserError, match=message):
        opened(written(ONE, tools=tools))


def test_a_chat_of_endless_text_is_refused(monkeypatch):
    monkeypatch.setattr("jaxptd.data.chats.LONGEST", 10)
    with pytest.raises(UserError, match="it has 54 characters; a chat has at most 10"):
        opened(written(ONE))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", r"t\.jinja is not Jinja: line 1: "),
        ("{{ raise_exception('no\nsystem') }}", "t.jinja.*refuses this chat: no system"),
        ("{{ messages[9].role }}", "refuses this chat: list object has no element 9"),
        ("{{ messages[0].content + 1 }}", "refuses this chat: TypeError: can only conc"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            "it takes more than 1000000 steps, so it may never end",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too often"),
        ("{{ 'a' * 10**9 }}", "result of . would be too large"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ ''.__class__ }}{{ ''.__class__.mro() }}", "is unsafe"),
        ("{{ namespace(__init__=1) }}", "a namespace has no name '__init__'"),
        ("{{ messages | random }}", "No filter named 'random'"),
    ],
)
def test_a_template_that_is_broken_raises_or_never_ends_is_refused(tmp_path, template, message):
    (tmp_path / "t.jinja").write_text(template)
    with pytest.raises(UserError, match=message) as error:
        opened(written(ONE))
    assert "\n" not in str(error.value)


def test_a_template_is_needed(monkeypatch):
    with pytest.raises(
        UserError, match="need a chat template, and data.tokenizer=bytes is not a f"
    ):
        opened(written(ONE), chat_template=None)
    with pytest.raises(UserError, match=r"data.chat_template no\.jinja: No such file"):
        opened("c.jsonl", chat_template="no.jinja")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "jaxptd.data.jinja", raising=False)
    with pytest.raises(UserError, match=r"a chat template needs Jinja2; .*\[hf\]"):
        opened("c.jsonl")


def test_a_token_that_the_tokenizer_does_not_name_is_said(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    assert (
        opened(written(ONE))
        .remarks[0]
        .startswith(
            "warning: the chat template reads bos_token, which data.tokenizer does not name"
        )
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_on": "all"}, "data.train_on=all is for chats; name their field with data.mess"),
        ({"chat_template": "x"}, "data.chat_template=x is for chats"),
        ({"tools_field": "x"}, "data.tools_field=x is for chats"),
        ({"messages_field": ""}, "data.messages_field is empty; name it, or use null"),
        ({"messages_field": "m", "text_field": "t"}, "data.text_field=t is not for records that h"),
        ({"format": "sharegpt", "prompt_field": "p"}, "data.prompt_field=p is not for records"),
        ({"format": "alpaca", "messages_field": "m"}, r"messages_field=m is not .*\(data.format\)"),
        ({"messages_field": "m", "chat_date": "today"}, "data.chat_date=today is not a day"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        DataConfig(**fields)


def test_special_tokens_must_be_parsed():
    tokenizer = ByteTokenizer()
    tokenizer.special = {"<|end|>": 256}
    with pytest.raises(UserError, match="data.special_tokens=text reads them as plain text; use p"):
        Chats(
            DataConfig(messages_field="m", chat_template="t.jinja", special_tokens="text"),
            tokenizer,
        )
