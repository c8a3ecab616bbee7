"""Chats: answers of a model on the command line, from Python, and for records in files."""

import functools
import io
import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
from hugging import chatting
from hugging.chat_kinds import END, KINDS, said, write_chat_kind
from turns import slow

import jaxptd
from jaxptd import Layout, UserError, generate
from jaxptd.chat import main as chat
from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, load_tokenizer
from jaxptd.data.chats import Chats
from jaxptd.errors import run_command
from jaxptd.run.sampling import Sampling
from jaxptd.run.writer import ChatWriter

TEXT = "{% for m in messages %}{{ m.role[0] ~ ':' ~ m.content ~ ';\n' }}{% endfor %}a:"
GREEDY = ("--temperature", 0, "--tokens", chatting.TOKENS)
ANSWER = {"role": "assistant", "content": chatting.ANSWERS["short"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    assert len(jax.devices()) == 8  # starts JAX before a command does, with fewer
    return chatting.write_chat_model(tmp_path_factory.mktemp("chat") / "model")


@functools.cache
def loaded(folder: Path, layout: Layout):
    return jaxptd.from_hf(folder, layout=layout, platform="cpu")


@pytest.fixture
def talk(folder, capfd, monkeypatch):
    """(lines of stdin, options) -> stdout, stderr."""

    def run(text, *options, expect=0, of=chat, model=folder, kind=io.StringIO) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", kind(text))
        argv = ["--run-dir", model, "--platform", "cpu", *options]
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(functools.partial(of, [str(each) for each in argv]))
        assert end.value.code == expect
        return capfd.readouterr()

    return run


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", chatting.CHATS)
def test_transformers_answers_the_same(name: str, folder: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert chatting.answer(folder, chatting.CHATS[name]) == chatting.ANSWERS[name]


@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(), Layout(dp=2, tp=2, zero=3)),
        *(slow(Layout(**x)) for x in ({"pp": 2}, {"row": 2, "col": 2}, {"cp": 2}, {"ep": 2})),
    ],
    ids=str,
)
def test_an_answer_is_that_of_transformers_on_every_layout(layout: Layout, folder: Path) -> None:
    run = loaded(folder, layout)
    for name, messages in chatting.CHATS.items():
        found = run.chat(messages, temperature=0, tokens=chatting.TOKENS)
        assert found == chatting.ANSWERS[name]


def test_an_answer_ends_where_the_template_ends_a_turn(folder: Path, monkeypatch) -> None:
    run, whole = loaded(folder, Layout()), chatting.ANSWERS["short"]
    end = run.tokenizer.token_id("^")
    assert whole.count("^") == 1
    ask = functools.partial(run.chat, chatting.CHATS["short"], temperature=0)
    for found in (((end,), []), ((), ["^"])):
        monkeypatch.setattr(Chats, "turn_end", lambda _, found=found: found)
        assert ask(tokens=chatting.TOKENS) == whole.partition("^")[0]


def test_an_answer_ends_with_the_models_length(folder: Path) -> None:
    run, chat = loaded(folder, Layout()), said("fox world " * 60)
    room = 192 - len(ChatWriter(run._writer(Sampling(0), ())).asked({"messages": chat}))
    assert 0 < room < 30
    assert run.chat(chat, temperature=0) == run.chat(chat, temperature=0, tokens=room)


ENDS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma3": "<end_of_turn>", "phi": "<|end|>"}
ENDS |= dict.fromkeys(("qwen2.5", "qwen3", "chatml"), "<|im_end|>") | {"deepseek": END}


@pytest.mark.parametrize("name", KINDS)
def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(name, tmp_path) -> None:
    path = str(write_chat_kind(tmp_path / "made", name))
    config = DataConfig(tokenizer=path, messages_field="messages")
    tokenizer = load_tokenizer(path)
    assert Chats(config, tokenizer).turn_end() == ((tokenizer.special[ENDS[name]],), [])


def test_a_text_behind_an_answer_ends_it(tmp_path) -> None:
    (tmp_path / "t.jinja").write_text(TEXT.removesuffix("a:"))
    config = DataConfig(messages_field="messages", chat_template=str(tmp_path / "t.jinja"))
    assert Chats(config, ByteTokenizer()).turn_end() == ((), [";"])


# ---- the command ---------------------------------------------------------------------------------


def test_lines_of_a_pipe_are_messages_of_one_conversation(talk, folder: Path) -> None:
    out, err = talk("Hello\n\nfox?\n/new\nHello\n/quit\nnever\n", *GREEDY, "--json", "--quiet")
    found = [json.loads(line) for line in out.splitlines()]
    asked = [*said("Hello"), ANSWER, *said("fox?")]
    second = loaded(folder, Layout()).chat(asked, temperature=0, tokens=chatting.TOKENS)
    assert [each["content"] for each in found] == [ANSWER["content"], second, ANSWER["content"]]
    assert found[0] == ANSWER
    assert err == ""


def test_an_answer_is_printed_and_a_cut_one_is_said_to_be(talk) -> None:
    out, err = talk("Hello", *GREEDY)
    assert out.startswith("worl^")
    assert out.count("\n") == 1
    assert err == "(cut: --tokens, or the model's length, is reached)\n"
    system = talk("Hello", *GREEDY, "--system", "fox")[0]
    assert system != out


def test_a_terminal_asks_again_after_a_chat_that_is_too_long(talk, monkeypatch) -> None:
    text = "Hello\n" + "fox " * 300 + "\nHello\n"
    out, err = talk(text, *GREEDY, expect=2)
    assert out.count("\n") == 1
    line = "leaves no room for an answer in model.seq_length=192; begin a new one"
    assert line in err.splitlines()[-1]
    monkeypatch.setattr("builtins.input", lambda prompt: _next(sys.stdin))
    out, err = talk(text.replace("\nHello", "\n/new\nHello"), *GREEDY, kind=Terminal)
    assert err.splitlines()[0] == "/new begins a new conversation, /quit leaves"
    assert err.count("error: the chat has") == 1
    assert out == "\n".join([out.split("\n")[0]] * 2) + "\n"


class Terminal(io.StringIO):
    """A terminal's stdin."""

    def isatty(self) -> bool:
        return True


def _next(lines: io.StringIO) -> str:
    if not (line := lines.readline()):
        raise EOFError
    return line


def test_without_a_template_it_says_what_to_do(talk, folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    (bare / "chat_template.jinja").unlink()
    out, err = talk("Hello", expect=2, model=bare)
    assert (out, err.count("\n")) == ("", 1)
    assert "has none; name a Jinja file with data.chat_template" in err
    (tmp_path / "t.jinja").write_text(TEXT)
    assert talk("Hello", *GREEDY, "--data.chat_template", tmp_path / "t.jinja", model=bare)[0]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "its chat is an empty list"),
        ([3], "messages.0. is 3; expected a dict"),
        ([{"role": "user"}], "message 1 has no content"),
        (said("a", "b"), "the chat has its answer already"),
        (said("fox " * 300), "which leaves no room for an answer in model.seq_length=192"),
    ],
)
def test_bad_messages_are_one_line(messages, words: str, folder: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        loaded(folder, Layout()).chat(messages)
    assert "\n" not in str(caught.value)


# ---- records of a file ---------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [(), slow(("--layout.dp", 2))], ids=str)
def test_records_get_the_answers_that_they_get_alone(devices, talk, folder, tmp_path) -> None:
    chats = [*chatting.CHATS.values(), said("fox"), said("world the"), said("fox " * 40)]
    records = [{"id": n, "messages": chat} for n, chat in enumerate(chats)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    options = ("--prompts", tmp_path / "c.jsonl", "--tokens", 12, "--seed", 3, *devices)
    out, _ = talk("", *options, of=generate.main)
    rows = [json.loads(line) for line in out.splitlines()]
    run = loaded(folder, Layout())
    for row, record in zip(rows, records, strict=True):
        *asked, answer = row["messages"]
        assert {**row, "messages": asked} == record
        alone = run.chat(record["messages"], tokens=12, seed=3)
        assert answer == {"role": "assistant", "content": alone}


@pytest.mark.parametrize(
    ("form", "record", "added"),
    [
        ("sharegpt", {"conversations": [{"from": "human", "value": "a"}]}, ("from", "value")),
        ("alpaca", {"instruction": "a", "input": "b", "output": ""}, None),
        ("alpaca", {"instruction": "a"}, None),
    ],
)
def test_an_answer_has_the_form_of_its_record(form, record, added, tmp_path) -> None:
    (tmp_path / "t.jinja").write_text(TEXT)
    config = DataConfig(format=form, chat_template=str(tmp_path / "t.jinja"))
    chats = Chats(config, ByteTokenizer())
    text = "u:a\n\nb;\na:" if "input" in record else "u:a;\na:"
    assert bytes(chats.asked(record)).decode() == text
    if added:
        message = dict(zip(added, ("gpt", "c"), strict=True))
        expected = {"conversations": [*record["conversations"], message]}
    else:
        expected = record | {"output": "c"}
    assert chats.answered(record, "c") == expected
    with pytest.raises(UserError, match="the chat has its answer already"):
        chats.asked(expected)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (['{"messages": []}'], "--prompts, line 1: its chat is an empty list"),
        (['{"text": "a"}'], "line 1: it has no messages, which holds the chat"),
        (['{"prompt": "a"}', '{"messages": []}'], 'line 2: use an object such as {"prompt"'),
        (['{"messages": []}', '{"prompt": "a"}'], 'line 2: use an object such as {"prompt"'),
    ],
)
def test_bad_records_are_one_line(lines, words: str, talk, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    _, err = talk("", "--prompts", tmp_path / "c.jsonl", expect=2, of=generate.main)
    assert words in err
    assert err.count("\n") == 1
