"""Converts text to token ids and back: bytes, or a Hugging Face `tokenizers` JSON file or folder.

Special tokens spelled out in a text, such as `<|endoftext|>`, are read as the tokens, as in
transformers, or as plain text: see `data.special_tokens`. What a tokenizer's files put before a
text (Llama's `<s>`) begins each document: see `data.begin_token`. `corpora.tokenize` adds both
ends. In decoded text the end of a document is a line feed, and ids without a token (which a model
with a padded vocabulary can produce) are U+FFFD.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from jaxptd import stores
from jaxptd.config import BeginToken, SpecialTokens
from jaxptd.data import tokenizer_folders
from jaxptd.data.tokenizer_folders import FIELD, SPLIT
from jaxptd.errors import UserError, install, quoted
from jaxptd.fields import checked
from jaxptd.stores import Place, StorePath, is_url, local_copy, place

if TYPE_CHECKING:
    from jaxptd.config import Config  # imports JAX

BYTES = "bytes"
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's marker for a space
RARE_LETTERS = "\N{LINEAR B SYLLABLE B008 A}\N{VAI SYLLABLE EE}\N{GLAGOLITIC CAPITAL LETTER AZU}"
HAS_ALL = "use a byte-level tokenizer, or one with an unknown token"


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to ids in [0, vocab_size) and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int:
        """The id that follows each document."""

    @property
    def begin(self) -> tuple[int, ...]:
        """The ids that each document begins with, usually one or none."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a generation, including the end of a document."""

    @property
    def special(self) -> Mapping[str, int]:
        """The special tokens that a text may spell out, and their ids."""

    @property
    def special_tokens(self) -> SpecialTokens:
        """`parse` if such a spelling is read as the token, `text` if as text."""

    def token_id(self, name: str) -> int | None:
        """The id of a special token, such as "[MASK]"; None if the tokenizer lacks it."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, 1D, in the smallest of uint16 and uint32 that holds vocab_size.

        Raises:
            UserError: the text has no UTF-8 form (half a surrogate pair), or the tokenizer has no
                token for a character.
        """

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of `text`, and the characters of each: the first and the one after, int64[n, 2].

        Raises:
            UserError: as `encode`.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, which may be any integers; invalid text is shown as U+FFFD."""


def with_begin(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The ids of a text, with begin tokens in front unless it already has them."""
    begin = list(tokenizer.begin)
    return list(ids) if list(ids[: len(begin)]) == begin else [*begin, *ids]


def continuation(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text that `ids` add to a prompt.

    They are decoded together with the prompt, because SentencePiece-style decoders drop a space at
    the beginning of a text.
    """
    known, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    complete = known.rstrip(UNKNOWN)  # ids may complete the last character of a truncated prompt
    return whole[len(complete) :] if whole.startswith(complete) else tokenizer.decode(ids)


def until_stop(text: str, stops: Iterable[str]) -> str:
    """The text before the first of the stops; empty stops are ignored."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def pieces(
    chunks: Iterable[Sequence[int]], decode: Callable[[Sequence[int]], str], stops: Sequence[str]
) -> Iterator[str]:
    """The text of all chunks before the first stop, in pieces that are not empty.

    Held back until more is known: the bytes of an unfinished character, and a text that a stop may
    begin with. After a stop no further chunk is asked for. Together the pieces are
    `until_stop(decode(all ids), stops)`, for any way of cutting ids into chunks.

    Args:
        chunks: of ids.
        decode: all ids so far -> their text; more ids add to it, but for unfinished characters.
        stops: texts that end it; empty ones are ignored.
    """
    ids: list[int] = []
    shown = ""
    for chunk in chunks:
        ids += chunk
        text = decode(ids).rstrip(UNKNOWN)
        end, stopped = _known(text, [stop for stop in stops if stop])
        if end > len(shown):
            yield text[len(shown) : end]
            shown = text[:end]
        if stopped:
            return
    if rest := until_stop(decode(ids), stops)[len(shown) :]:
        yield rest


def _known(text: str, stops: Sequence[str]) -> tuple[int, bool]:
    """The number of characters before any stop, found or begun; whether one is found there."""
    found = len(until_stop(text, stops))
    begun = len(text)
    for stop in stops:
        first = max(len(text) - len(stop) + 1, 0)
        begins = (place for place in range(first, len(text)) if stop.startswith(text[place:]))
        begun = min(begun, next(begins, begun))
    return min(found, begun), found < len(text) and found <= begun


def spellings(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches spelled-out special tokens; None if the tokenizer has none."""
    names = sorted(tokenizer.special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def spelling(tokenizer: Tokenizer, token: int) -> str:
    """A token's name, or its text, in quotes, for a message."""
    names = {number: name for name, number in tokenizer.special.items()}
    return quoted(repr(names.get(token) or tokenizer.decode([token])))


def id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest of uint16 and uint32 that holds the ids of a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class ByteTokenizer:
    """The UTF-8 bytes of the text; 256 ends a document.

    Args:
        special: names of tokens that occur in no text, with ids from 257.
    """

    vocab_size = 257
    end_of_document = 256
    begin: tuple[int, ...] = ()
    ends = (256,)
    special: Mapping[str, int] = MappingProxyType({})  # texts cannot spell out these tokens
    special_tokens: SpecialTokens = "text"

    def __init__(self, special: Sequence[str] = ()) -> None:
        first = type(self).vocab_size
        self._special = {name: first + number for number, name in enumerate(special)}
        self.names = {number: name.encode() for name, number in self._special.items()}
        self.vocab_size = first + len(self._special)

    def token_id(self, name: str) -> int | None:
        return self._special.get(name)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint16)

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        size_T = np.array([len(_utf8(letter)) for letter in text], dtype=np.int64)
        letter = np.repeat(np.arange(len(text)), size_T)
        return self.encode(text), np.stack([letter, letter + 1], axis=1)

    def decode(self, ids: Sequence[int]) -> str:
        pieces = b"".join(map(self._piece, np.asarray(ids, dtype=np.int64).tolist()))
        return pieces.decode("utf-8", errors="replace")

    def _piece(self, token: int) -> bytes:
        if token == self.end_of_document:
            return b"\n"
        # 0xFF never occurs in UTF-8, so it decodes to U+FFFD whatever its neighbours.
        return bytes([token]) if 0 <= token <= 0xFF else self.names.get(token, b"\xff")


class JsonTokenizer:
    """A trained tokenizer of the `tokenizers` library, read by `load_tokenizer`.

    Args:
        tokenizer: the library's object.
        name: path of its file.
        end_of_document: id of the token that ends a document.
        ends: further ids that end a generation.
        begin: ids that a document begins with.
        special_tokens: whether a spelled-out special token is read as the token.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str,
        end_of_document: int,
        ends: Sequence[int] = (),
        begin: Sequence[int] = (),
        special_tokens: SpecialTokens = "parse",
    ) -> None:
        # Files remember the padding and truncation last used; a corpus needs neither.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = special_tokens == "text"
        self.special_tokens = special_tokens
        self._tokenizer = tokenizer
        self._known = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        self.end_of_document = end_of_document
        self.ends = tuple(dict.fromkeys([*ends, end_of_document]))
        self.begin = tuple(begin)
        added = tokenizer.get_added_tokens_decoder()
        self.special = {each.content: token for token, each in added.items() if each.special}
        self.vocab_size = max(self._known) + 1  # ids may have gaps
        self.name = name
        self._has_tokens = set[str]()

    def token_id(self, name: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(name)
        return number

    def encode(self, text: str) -> np.ndarray:
        return self._encode(text)[0]

    def encode_places(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids, encoding = self._encode(text)
        return ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)

    def _encode(self, text: str) -> tuple[np.ndarray, Any]:
        """The ids of a text, and what the library says of them."""
        _utf8(text)
        if self._drops_unknown:
            self._check_known(text)
        encoding = self._encoding(text)
        return np.array(encoding.ids, dtype=id_dtype(self.vocab_size)), encoding

    def _encoding(self, text: str) -> Any:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"data.tokenizer={self.name!r} cannot encode the text: {error}; {HAS_ALL}"
            ) from error

    @functools.cached_property
    def _drops_unknown(self) -> bool:
        """True if characters missing from the vocabulary vanish from the text."""
        try:
            return not any(self._encoding(letter).ids for letter in RARE_LETTERS)
        except UserError:
            return False

    def _check_known(self, text: str) -> None:
        """Raises UserError if a character of the text has no token."""
        for character in set(text) - self._has_tokens:
            if not character.isspace() and not self._encoding(character).ids:
                raise UserError(
                    f"data.tokenizer={self.name!r} has no token for {character!a} (character "
                    f"{text.index(character)} of a text) and no unknown token; {HAS_ALL}"
                )
            self._has_tokens.add(character)

    def decode(self, ids: Sequence[int]) -> str:
        pieces: list[str] = []
        run: list[int] = []
        for token in map(int, ids):
            if token in self._known and token != self.end_of_document:
                run.append(token)
                continue
            pieces += [self._decode_run(run), "\n" if token == self.end_of_document else UNKNOWN]
            run = []
        return "".join([*pieces, self._decode_run(run)])

    def _decode_run(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""


def on_disk(name: str) -> Path:
    """The path of a tokenizer's file or folder; of a copy if `data.tokenizer` is a URL."""
    where = place(name, field="data.tokenizer")
    if not isinstance(where, StorePath):
        return where
    return stores.on_disk(where) if where.suffix == ".json" else local_copy(where)


@checked("jaxptd.load_tokenizer")
def load_tokenizer(
    name: str | Place,
    special: Sequence[str] = (),
    *,
    special_tokens: SpecialTokens = "auto",
    begin_token: BeginToken = "auto",
) -> Tokenizer:
    """Loads the tokenizer that `data.tokenizer` names.

    >>> load_tokenizer("bytes").encode("def").tolist()
    [100, 101, 102]

    A folder's ends are `eos_token_id` in its `generation_config.json` and `config.json`, else the
    `eos_token` of its `tokenizer_config.json`; the first that both configs have ends documents.
    Otherwise it is the first token that the tokenizer has of `<|endoftext|>`, `</s>`, `<eos>`,
    `[SEP]` and `<|end_of_text|>`.

    Args:
        name: "bytes", the path or URL of a `tokenizers` JSON file, or of a folder with a
            `tokenizer.json`.
        special: names of tokens that follow the 257 of "bytes"; files have their own.
        special_tokens: `parse` reads a spelled-out special token as the token, `text` as plain
            text. `auto` does what transformers does: `text` if the folder's
            `tokenizer_config.json` has `split_special_tokens: true`, else `parse`.
        begin_token: `auto` begins documents as the post-processor in `tokenizer.json` does, like
            transformers 5, whatever `add_bos_token` says. `none` adds no token.

    Raises:
        UserError: the file is missing or not a tokenizer, it has no end of document, a config is
            broken, or the `hf` extra is missing.
    """
    if str(name) == BYTES:
        return ByteTokenizer(special)
    path = str(on_disk(str(name)))
    try:
        loaded = _load(path, special_tokens=special_tokens, begin_token=begin_token)
    except UserError as error:
        if not is_url(name):
            raise
        raise UserError(str(error).replace(path, str(name))) from error  # not the copy's path
    if is_url(name):
        loaded.name = loaded.name.replace(path, str(name))
    return loaded


def _load(name: str, *, special_tokens: SpecialTokens, begin_token: BeginToken) -> "JsonTokenizer":
    """Loads the tokenizer of a file or a folder."""
    folder = name if os.path.isdir(name) else None
    if folder is None and not os.path.isfile(name):
        problem = "it is not a file on disk" if os.path.exists(name) else "no such file"
        raise UserError(
            f"data.tokenizer={name!r}: {problem}; use bytes, or the path of a tokenizer.json or "
            "its folder"
        )
    path = tokenizer_folders.tokenizer_file(folder) if folder else name
    tokenizer, settings = _read_json(path), tokenizer_folders.settings(folder) if folder else {}
    if folder and tokenizer_folders.is_of_llama(folder, settings):
        _read_as_llama(tokenizer, settings)
    _add_special_tokens(tokenizer, settings)
    if special_tokens == "auto":
        special_tokens = "text" if settings.get(SPLIT) is True else "parse"
    return JsonTokenizer(
        tokenizer,
        name=path,
        end_of_document=_end_of_document(tokenizer, path, folder, settings),
        ends=tokenizer_folders.ends(folder) if folder else (),
        begin=_begin(tokenizer.post_processor) if begin_token == "auto" else (),
        special_tokens=special_tokens,
    )


def with_vocabulary(config: "Config", special: Sequence[str] = ()) -> "Config":
    """Sets model.vocab_size to the tokenizer's where it is None. special: see `load_tokenizer`."""
    if config.model.vocab_size is not None:
        return config
    size = load_tokenizer(config.data.tokenizer, special).vocab_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def _read_json(path: str) -> Any:
    """Reads a file of the `tokenizers` library."""
    try:
        import tokenizers  # the optional extra; everything else here needs only numpy
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={path!r} needs the tokenizers library; {install('hf')}"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"data.tokenizer={path!r} is not a tokenizer.json: {error}") from error


def _add_special_tokens(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Applies the settings' tokens as transformers does: flags of known ones, and new tokens."""
    from tokenizers import AddedToken  # already imported, to read the file

    def there() -> dict[str, str]:
        return {each.content: repr(each) for each in tokenizer.get_added_tokens_decoder().values()}

    listed = [AddedToken(**fields) for fields in tokenizer_folders.listed_tokens(settings)]
    known = there()
    tokenizer.add_tokens([each for each in listed if known.get(each.content) != repr(each)])
    for fields in tokenizer_folders.named_tokens(settings):
        if fields["content"] not in there():
            tokenizer.add_tokens([AddedToken(**fields)])


def _read_as_llama(tokenizer: Any, settings: Mapping[str, Any]) -> None:
    """Overrides `tokenizer.json` as transformers' Llama 2 class does.

    A space at the beginning of a text, or after a special token, is not doubled by the one that is
    put before a text.

    Source: transformers 5.24, `LlamaTokenizer.__init__`.
    """
    from tokenizers import decoders, models, pre_tokenizers

    parts = [part.__getstate__() for part in (tokenizer.pre_tokenizer, tokenizer.decoder) if part]
    if not isinstance(tokenizer.model, models.BPE) or any(b"ByteLevel" in part for part in parts):
        return
    begins_with_space = settings.get("add_prefix_space") in (None, True)
    scheme = "first" if settings.get("legacy", False) is False else "always"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        SPACE, prepend_scheme=scheme if begins_with_space else "never", split=False
    )
    strips = [decoders.Strip(content=" ", left=1)] if begins_with_space else []
    pieces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*pieces, *strips])


def _begin(processor: Any) -> tuple[int, ...]:
    """The ids that a post-processor of the library puts before a text."""
    return _begin_of(json.loads(processor.__getstate__())) if processor else ()


def _begin_of(state: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids before a text, from the JSON of a post-processor."""
    if "processors" in state:  # the last one's ids are outermost
        return tuple(token for each in reversed(state["processors"]) for token in _begin_of(each))
    if "single" in state:
        ids: list[int] = []
        for piece in state["single"]:
            if "SpecialToken" not in piece:
                break
            ids += state["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        return tuple(ids)
    return (state["cls"][1],) if "cls" in state else ()  # BERT's and RoBERTa's


def _end_of_document(
    tokenizer: Any, path: str, folder: str | None, settings: Mapping[str, Any]
) -> int:
    """The id that ends a document: from the configs next to the tokenizer, or by a known name."""
    end = tokenizer_folders.end_of_document(folder) if folder else None
    if end is not None and end not in tokenizer.get_vocab(with_added_tokens=True).values():
        raise UserError(
            f"data.tokenizer={path!r} has no token {end}, the {FIELD} of the config next to it; "
            "put the files of one model there"
        )
    name = settings.get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if end is None and isinstance(name, str):
        end = tokenizer.token_to_id(name)
    return _named_end(tokenizer, path) if end is None else end


def _named_end(tokenizer: Any, path: str) -> int:
    """The id of the first known end-of-document name that the tokenizer has."""
    known = [tokenizer.token_to_id(token) for token in END_OF_DOCUMENT_NAMES]
    ends = [token for token in known if token is not None]
    if not ends:
        raise UserError(
            f"data.tokenizer={path!r} has no end-of-document token; add one of "
            f"{', '.join(END_OF_DOCUMENT_NAMES)} to it, or name the folder of a model, whose "
            f"config.json has {FIELD}"
        )
    return ends[0]


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except AttributeError as error:
        raise UserError(
            f"a tokenizer encodes texts, not {type(text).__name__}; use a str"
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(
            f"text has half a surrogate pair ({text[error.start]!a} at character {error.start}), "
            "which UTF-8 cannot hold; remove it"
        ) from error
