"""Tokenizer folders of Hugging Face: `tokenizer.json`, and configs that name special tokens.

`eos_token_id` is a number or a list: chat models have several tokens that end a text. The first of
`config.json` that `generation_config.json` has, too, ends documents, else the first of either; all
of both files end a generation.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxptd.errors import UserError, quoted

TOKENIZER = "tokenizer.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
SETTINGS = "tokenizer_config.json"
FIELD = "eos_token_id"
# Tokens that `tokenizer_config.json` names, in the order in which transformers adds them.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
        UserError: a config is broken.
    """
    own, generation = (_ends(os.path.join(folder, name)) for name in (CONFIG, GENERATION))
    both = [end for end in own if end in generation]
    return next(iter([*both, *own, *generation]), None)


def ends(folder: str) -> tuple[int, ...]:
    """Every id that ends a generation: those of `generation_config.json`, then of `config.json`.

    Source: transformers, `GenerationConfig.eos_token_id`, which may be a list.

    Raises:
        UserError: a config is broken.
    """
    found = (_ends(os.path.join(folder, name)) for name in (GENERATION, CONFIG))
    return tuple(dict.fromkeys(end for each in found for end in each))


def settings(folder: str) -> Mapping[str, Any]:
    """The content of `tokenizer_config.json`; empty without the file.

    Raises:
        UserError: it is no JSON object.
    """
    path = os.path.join(folder, SETTINGS)
    found = _read(path) if os.path.lexists(path) else {}
    if not isinstance(found, dict):
        raise UserError(f"data.tokenizer: {path} has no JSON object; repair it")
    return found


def special_tokens(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The special tokens that a `tokenizer_config.json` names, as fields of an `AddedToken`.

    Source: transformers 5.24, `TokenizersBackend.__init__`.
    """
    decoder = settings.get("added_tokens_decoder")
    listed = list(decoder.values()) if isinstance(decoder, dict) else []
    others = settings.get("additional_special_tokens") or settings.get("extra_special_tokens")
    others = list(others.values()) if isinstance(others, dict) else others
    named = [settings.get(name) for name in NAMED]
    for token in [*listed, *named, *(others if isinstance(others, list) else [])]:
        fields = {"content": token} if isinstance(token, str) else token
        if isinstance(fields, dict) and isinstance(fields.get("content"), str):
            flags = ("single_word", "lstrip", "rstrip", "normalized")
            given = {name: fields[name] for name in flags if isinstance(fields.get(name), bool)}
            special = token not in listed or bool(fields.get("special"))
            yield {"content": fields["content"], "special": special, "normalized": False} | given


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
