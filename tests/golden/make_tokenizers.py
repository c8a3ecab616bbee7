"""Writes the ids that transformers gives texts, with each kind of tokenizer on the Hub.

    PYTHONPATH=tests/helpers python tests/golden/make_tokenizers.py

Needs transformers; made with transformers 5.24.0 and tokenizers 0.23.3. For each kind the file
holds the ids of each text, their decoded text, the ids that begin a text, and `eos_token`'s id.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from hugging.tokenizer_kinds import KINDS, texts, write_kind
from transformers import AutoTokenizer


def judged(name: str) -> dict[str, Any]:
    """Results of transformers for the texts of a kind."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = AutoTokenizer.from_pretrained(write_kind(Path(folder) / "made", name))
    spelled = texts(theirs.get_added_vocab())
    ids = {text: theirs.encode(text, add_special_tokens=False) for text in spelled}
    return {
        "ids": ids,
        "decoded": [theirs.decode(each) for each in ids.values()],
        "begin": theirs.encode("")[: len(theirs.encode("Hello")) - len(ids["Hello"])],
        "eos": theirs.eos_token_id,
    }


if __name__ == "__main__":
    rows = (f"{json.dumps(name)}: {json.dumps(judged(name))}" for name in KINDS)
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    Path(__file__).with_name("tokenizers.json").write_text(text)
