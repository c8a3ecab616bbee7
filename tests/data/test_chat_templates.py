"""Chat templates of the kinds on the Hub give chats the same ids as transformers."""

import json
import runpy
from pathlib import Path

import pytest
from hugging.chat_kinds import CHATS, END, KINDS, write_chat_kind

from jaxptd.config import DataConfig
from jaxptd.data import load_tokenizer
from jaxptd.data.chat_templates import load_chat_template
from jaxptd.data.chats import Chats
from jaxptd.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden"
JUDGED = json.loads((GOLDEN / "chats.json").read_text())
PARTS = ("gemma3",)  # whose templates take lists of text parts
# What the assistant says in two turns: " Hello ", "the\n", "quick\n\nbrown?", "fox 12".
TURNS = {
    "llama3": "the<|eot_id|>fox 12<|eot_id|>",
    "qwen2.5": "the\n<|im_end|>\nfox 12<|im_end|>\n",
    "mistral": "the</s>fox 12</s>",
    "gemma3": "the<end_of_turn>\nfox 12<end_of_turn>\n",
    "chatml": "the\n<|im_end|>fox 12<|im_end|>",
    "phi": "the\n<|end|>\nfox 12<|end|>\n<|endoftext|>",
    "deepseek": f"the\n{END}fox 12{END}",
}


def read(folder, chats, **fields):
    """Ids and masks of chats, read from a file."""
    path = folder.with_suffix(".jsonl")
    path.write_text("\n".join(map(json.dumps, chats)))
    config = DataConfig(tokenizer=str(folder), messages_field="messages", **fields)
    tokenizer = load_tokenizer(str(folder))
    found = list(Chats(config, tokenizer).read([path]))
    return tokenizer, [(ids.tolist(), counted.tolist()) for ids, counted, _ in found]


@pytest.fixture(params=KINDS)
def kind(request, tmp_path):
    return request.param, write_chat_kind(tmp_path / "there", request.param)


def test_ids_of_chats_are_those_of_transformers(kind):
    name, folder = kind
    for chat, theirs in JUDGED[name].items():
        if chat == "parts" and name not in PARTS:
            continue  # transformers prints Python's list
        if theirs is None:
            with pytest.raises(UserError, match="line 1: .*chat_template.jinja refuses this chat"):
                read(folder, [CHATS[chat]], train_on="all")
            continue
        _, ((ids, counted),) = read(folder, [CHATS[chat]], train_on="all")
        assert ids == theirs["ids"], chat
        assert all(counted) and len(counted) == len(ids)


def test_what_an_answer_continues_is_that_of_transformers(kind):
    name, folder = kind
    tokenizer = load_tokenizer(str(folder))
    template = load_chat_template(DataConfig(tokenizer=str(folder), format="messages"))
    asked = template.render(CHATS["a question"]["messages"], answer=True)
    assert tokenizer.encode(asked).tolist() == JUDGED[name]["a question"]["asked"]


def test_the_assistant_s_turns_are_learned_with_their_ends(kind):
    name, folder = kind
    if name not in TURNS:
        with pytest.raises(UserError, match="writes message 2 or what comes before it different"):
            read(folder, [CHATS["two turns"]])
        return
    tokenizer, ((ids, counted),) = read(folder, [CHATS["two turns"]])
    names = {number: spelled for spelled, number in tokenizer.special.items()}
    learned = [token for token, learns in zip(ids, counted, strict=True) if learns]
    found = "".join(names.get(token) or tokenizer.decode([token]) for token in learned)
    assert found.replace(" ", "") == TURNS[name].replace(" ", "")  # some decode no lone space


def test_masks_of_generation_are_those_of_transformers(tmp_path):
    folder = write_chat_kind(tmp_path / "there", "chatml")
    for chat, theirs in JUDGED["chatml"].items():
        if chat in ("parts", "letters"):  # transformers leaves out the last bytes of a letter
            continue
        _, ((ids, counted),) = read(folder, [CHATS[chat]])
        assert (ids, counted) == (theirs["ids"], [bool(each) for each in theirs["mask"]]), chat


@pytest.mark.parametrize("name", ["qwen3", "llama3", "chatml"])
def test_the_last_turn_alone_is_learned(tmp_path, name):
    folder = write_chat_kind(tmp_path / "there", name)
    tokenizer, ((ids, counted),) = read(folder, [CHATS["two turns"]], train_on="last")
    first = counted.index(True)
    assert all(counted[first:]) or not any(counted[-1:])
    text = tokenizer.decode(ids[first:])
    assert text.strip("\n").removeprefix("<think>\n\n</think>\n\n").startswith("fox 12")


def test_parts_are_joined_for_a_template_that_takes_texts(tmp_path):
    for name in ("llama3", "chatml", "phi", "mistral"):
        folder = write_chat_kind(tmp_path / name, name)
        joined = {"messages": [{"role": "user", "content": "the fox"}, *said_after("parts")]}
        _, (parts, texts) = read(folder, [CHATS["parts"], joined])
        assert parts == texts


def said_after(chat):
    return CHATS[chat]["messages"][1:]


def test_a_template_in_the_config_is_the_same(tmp_path):
    folders = [
        write_chat_kind(tmp_path / name, "llama3", as_file=name == "file")
        for name in ("file", "config")
    ]
    found = [read(folder, [CHATS["two turns"]])[1] for folder in folders]
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_golden_ids_are_those_of_transformers():
    pytest.importorskip("transformers")
    judged = runpy.run_path(str(GOLDEN / "make_chats.py"))["judged"]
    assert {name: judged(name) for name in KINDS} == JUDGED
