"""Writes the ids that transformers gives chats, with each kind of chat template on the Hub.

    PYTHONPATH=tests/helpers python tests/golden/make_chats.py

Needs transformers; made with transformers 5.24.0, tokenizers 0.23.3 and Jinja2 3.1.6. For each kind
and chat the file holds `ids`, those that an answer would continue (`asked`), and where the template
says so, which tokens the assistant wrote (`mask`). It holds null for a chat that the template
refuses.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from hugging.chat_kinds import CHATS, KINDS, write_chat_kind
from transformers import AutoTokenizer


def judged(name: str) -> dict[str, Any]:
    """Results of transformers for the chats, with a kind of template."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = AutoTokenizer.from_pretrained(write_chat_kind(Path(folder) / "made", name))
    return {chat: _judged(theirs, **CHATS[chat]) for chat in CHATS}


def _judged(theirs: Any, messages: list[Any], tools: list[Any] | None = None) -> Any:
    masked = "{%- generation" in theirs.chat_template
    try:
        found = theirs.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=masked
        )
        asked = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
    except Exception:  # whatever an expression of a template raises
        return None
    mask = {"mask": found["assistant_masks"]} if masked else {}
    return {"ids": found["input_ids"], "asked": asked["input_ids"], **mask}


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(judged(name))}" for name in KINDS)
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    Path(__file__).with_name("chats.json").write_text(text)
