"""Tokenizer folders of Hugging Face: `tokenizer.json`, and configs that name the end of document.

`eos_token_id` is a number or a list: chat models have several tokens that end a text. The first of
`config.json` ends documents, if `generation_config.json` has it too or has none.
"""

import json
import os
from typing import Any

from jaxptd.errors import UserError, quoted

TOKENIZER = "tokenizer.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
FIELD = "eos_token_id"


def tokenizer_file(folder: str) -> str:
    """The path of a folder's `tokenizer.json`.

    Raises:
        UserError: there is none.
    """
    path = os.path.join(folder, TOKENIZER)
    if os.path.isfile(path):
        return path
    if os.path.lexists(path):
        raise UserError(f"data.tokenizer: {path} is not a regular file; put the tokenizer there")
    remedy = "use bytes, or the path of a tokenizers JSON file or of a folder that has one"
    if os.path.exists(os.path.join(folder, "tokenizer.model")):
        remedy = "write one beside tokenizer.model, with transformers' save_pretrained"
    raise UserError(f"data.tokenizer={folder!r}: it is a folder without {TOKENIZER}; {remedy}")


def end_of_document(folder: str) -> int | None:
    """The id that ends a document, from the folder's configs; None if they name none.

    Raises:
        UserError: a config is broken, or the two contradict each other.
    """
    own, generation = (_ends(os.path.join(folder, name)) for name in (CONFIG, GENERATION))
    if not own or not generation:
        return next(iter([*own, *generation]), None)
    if both := [end for end in own if end in generation]:
        return both[0]
    raise UserError(
        f"data.tokenizer={folder!r}: {FIELD} is {own} in {CONFIG} and {generation} in "
        f"{GENERATION}; correct one of them"
    )


def _ends(path: str) -> list[int]:
    """The ids in a config's `eos_token_id`; none without the file or the field."""
    config = _read(path) if os.path.lexists(path) else {}
    if not isinstance(config, dict):
        raise UserError(f"data.tokenizer: {path} has no JSON object; put the model's config there")
    found = config.get(FIELD)
    ends: list[Any] = [] if found is None else found if isinstance(found, list) else [found]
    if not all(_is_id(end) for end in ends):
        raise UserError(
            f"data.tokenizer: {path} has {FIELD}={quoted(found)}; use a token's number, or a list"
        )
    return ends


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read(path: str) -> Any:
    """Reads a JSON file."""
    if not os.path.isfile(path):
        raise UserError(f"data.tokenizer: {path} is not a regular file; remove it")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deep
        raise UserError(f"data.tokenizer: {path} is not JSON ({error}); repair it") from error
