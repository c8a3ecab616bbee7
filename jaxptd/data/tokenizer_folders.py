"""Hugging Face tokenizer folders: `tokenizer.json`, configs that name special tokens, templates.

`eos_token_id` is a number or a list: chat models have several tokens that end a text. Documents end
with the first one in `config.json` that `generation_config.json` also has, else with the first of
either file. All of both files end a generation.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxptd.errors import UserError, quoted, read_small

TOKENIZER = "tokenizer.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
SETTINGS = "tokenizer_config.json"
OLD_NAMES, OLD_TOKENS = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, MORE_TEMPLATES, DEFAULT = "chat_template.jinja", "additional_chat_templates", "default"
OTHERS = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
DECODER, ADDED = "added_tokens_decoder", "added_tokens"  # key in `settings`
FIELD, SPLIT = "eos_token_id", "split_special_tokens"
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
    remedy = "use bytes, or the path of a tokenizer.json or its folder"
    others = [name for name in OTHERS if os.path.exists(os.path.join(folder, name))]
    if others:
        remedy = f"write one next to {others[0]} with transformers' save_pretrained"
    raise UserError(f"data.tokenizer={folder!r}: it is a folder without {TOKENIZER}; {remedy}")


def chat_templates(folder: str) -> dict[str, tuple[str, str]]:
    """A folder's chat templates by name: the text of each, and its file; empty without any.

    The usual one is `default`. Files with templates replace those of `tokenizer_config.json`.

    Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`.

    Raises:
        UserError: a file cannot be read, or the config has something else in their place.
    """
    root = Path(folder)
    files = {path.stem: path for path in sorted((root / MORE_TEMPLATES).glob("*.jinja"))}
    if os.path.lexists(root / TEMPLATE):
        files[DEFAULT] = root / TEMPLATE
    if files:
        remedy = "put the model's own file there"
        return {n: (read_small(path, remedy=remedy), str(path)) for n, path in files.items()}
    where, given = os.path.join(folder, SETTINGS), settings(folder).get("chat_template")
    listed = [{"name": DEFAULT, "template": given}] if isinstance(given, str) else given or []
    try:
        named = {each["name"]: each["template"] for each in listed}
    except (TypeError, KeyError, IndexError):
        named = {"": None}
    if not all(isinstance(text, str) for each in named.items() for text in each):
        raise UserError(
            f"data.tokenizer: {where} has a chat_template that is neither a text nor a list of "
            "objects with name and template; put the model's own file there"
        )
    return {name: (text, f"the chat_template of {where}") for name, text in named.items()}


def spelled_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The spellings of the tokens that settings name, such as bos_token."""
    fields = {name: next(_fields(settings.get(name), special=True), None) for name in NAMED}
    return {name: str(token["content"]) for name, token in fields.items() if token}


def end_of_document(folder: str) -> int | None:
    """The id that ends a document, from the folder's configs; None if they name none.

    Raises:
        UserError: a config is broken.
    """
    configured, generation = (_ends(folder, name) for name in (CONFIG, GENERATION))
    both = [end for end in configured if end in generation]
    return next(iter([*both, *configured, *generation]), None)


def ends(folder: str) -> tuple[int, ...]:
    """Every id that ends a generation: those of `generation_config.json`, then of `config.json`.

    Source: transformers, `GenerationConfig.eos_token_id`, which may be a list.

    Raises:
        UserError: a config is broken.
    """
    candidates = (_ends(folder, name) for name in (GENERATION, CONFIG))
    return tuple(dict.fromkeys(end for each in candidates for end in each))


def settings(folder: str) -> Mapping[str, Any]:
    """The content of `tokenizer_config.json`; empty without the file.

    In old ones, without `added_tokens_decoder`, `special_tokens_map.json` overrides it and the
    tokens of `added_tokens.json` become `added_tokens`.

    Source: transformers 5.24, `PreTrainedTokenizerBase._from_pretrained`.

    Raises:
        UserError: a file is not a JSON object.
    """
    values = _object(folder, SETTINGS)
    if DECODER in values:
        return values
    return {**values, **_object(folder, OLD_NAMES), ADDED: list(_object(folder, OLD_TOKENS))}


def listed_tokens(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tokens of `added_tokens_decoder`, as fields of an `AddedToken`, by their numbers.

    Their flags override those of `tokenizer.json`.
    """
    decoder = settings.get(DECODER)
    numbered = decoder.items() if isinstance(decoder, dict) else ()
    for _, token in sorted((int(n), token) for n, token in numbered if str(n).isdecimal()):
        yield from _fields(token, special=isinstance(token, dict) and bool(token.get("special")))


def named_tokens(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tokens that settings name, as fields of an `AddedToken`, in transformers' order.

    They are added to those of `tokenizer.json` if missing there.

    Source: transformers 5.24, `TokenizersBackend.__init__`.
    """
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    others = list(others.values()) if isinstance(others, dict) else others
    extra = (name for name in settings if name.endswith("_token") and name not in NAMED)
    named = [*(settings.get(name) for name in (*NAMED, *extra))]
    named += others if isinstance(others, list) else []
    for token in settings.get(ADDED, ()):
        yield from _fields(token, special=token in named)
    for token in named:
        yield from _fields(token, special=True)


def _fields(token: Any, *, special: bool) -> Iterator[Mapping[str, Any]]:
    """The fields of a token given as its spelling or as an object; none for anything else."""
    fields = {"content": token} if isinstance(token, str) else token
    if isinstance(fields, dict) and isinstance(fields.get("content"), str):
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        given = {name: fields[name] for name in flags if isinstance(fields.get(name), bool)}
        yield {"content": fields["content"], "special": special, "normalized": not special} | given


def is_of_llama(folder: str, settings: Mapping[str, Any]) -> bool:
    """True if transformers uses its Llama 2 tokenizer class for a folder.

    Source: transformers 5.24, `AutoTokenizer.from_pretrained`.
    """
    config = _object(folder, CONFIG)
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    named = str(name).removesuffix("Fast") == "LlamaTokenizer"
    return (
        named and config.get("model_type", "llama") == "llama"
    )  # other models have their own classes


def _object(folder: str, name: str) -> dict[str, Any]:
    """The content of a JSON file; empty without it. Raises UserError if it is not an object."""
    path = os.path.join(folder, name)
    content = _read(path) if os.path.lexists(path) else {}
    if not isinstance(content, dict):
        raise UserError(
            f"data.tokenizer: {path} is not a JSON object; replace it with the model's own file"
        )
    return content


def _ends(folder: str, name: str) -> list[int]:
    """The ids in a config's `eos_token_id`; none if the file or the field is missing."""
    value = _object(folder, name).get(FIELD)
    ends: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_id(end) for end in ends):
        raise UserError(
            f"data.tokenizer: {os.path.join(folder, name)} has {FIELD}={quoted(value)}; use a "
            "token id, or a list of them"
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
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deeply
        raise UserError(f"data.tokenizer: {path} is not JSON ({error}); repair it") from error
