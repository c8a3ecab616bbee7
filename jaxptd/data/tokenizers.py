"""Converts text to token ids and back: bytes, or a Hugging Face `tokenizers` JSON file or folder.

A tokenizer never emits its end-of-document id for text, whatever the text says; `corpora.tokenize`
adds it after each document. In decoded text it is a line feed, and ids that no token has (a model's
padded vocabulary can produce them) are U+FFFD.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from jaxptd.data.tokenizer_folders import FIELD, end_of_document, tokenizer_file
from jaxptd.errors import UserError
from jaxptd.fields import checked

if TYPE_CHECKING:
    from jaxptd.config import Config  # imports JAX

BYTES = "bytes"
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<eos>", "[SEP]", "<|end_of_text|>")
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
RARE_LETTERS = "\N{LINEAR B SYLLABLE B008 A}\N{VAI SYLLABLE EE}\N{GLAGOLITIC CAPITAL LETTER AZU}"
HAS_ALL = "use a tokenizer of bytes, or one with an unknown token"


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to ids in [0, vocab_size) and back."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int:
        """The id that follows each document."""

    def token_id(self, name: str) -> int | None:
        """The id of a special token, such as "[MASK]"; None if there is none."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, 1D, in the smallest of uint16 and uint32 that holds vocab_size.

        Raises:
            UserError: the text has no UTF-8 form (half a surrogate pair), or the tokenizer has no
                token for a character.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, which may be any integers; invalid text is shown as U+FFFD."""


def id_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest of uint16 and uint32 that holds the ids of a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


class ByteTokenizer:
    """The UTF-8 bytes of the text; 256 ends a document.

    Args:
        special: names of tokens that no text has, whose ids follow, 257 and so on.
    """

    vocab_size = 257
    end_of_document = 256

    def __init__(self, special: Sequence[str] = ()) -> None:
        first = type(self).vocab_size
        self._special = {name: first + number for number, name in enumerate(special)}
        self._names = {number: name.encode() for name, number in self._special.items()}
        self.vocab_size = first + len(self._special)

    def token_id(self, name: str) -> int | None:
        return self._special.get(name)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        pieces = b"".join(map(self._piece, np.asarray(ids, dtype=np.int64).tolist()))
        return pieces.decode("utf-8", errors="replace")

    def _piece(self, token: int) -> bytes:
        if token == self.end_of_document:
            return b"\n"
        # 0xFF occurs in no UTF-8 text, so it decodes to U+FFFD whatever its neighbours are.
        return bytes([token]) if 0 <= token <= 0xFF else self._names.get(token, b"\xff")


class JsonTokenizer:
    """A trained tokenizer of the `tokenizers` library, read by `load_tokenizer`.

    Args:
        tokenizer: of the library.
        name: of its file.
        end_of_document: id of the token that ends a document.
    """

    def __init__(self, tokenizer: Any, *, name: str, end_of_document: int) -> None:
        # Files keep the padding and truncation they were last used with; a corpus needs neither.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # "<|endoftext|>" within a text is text (as in tiktoken's encode_ordinary): only
        # `corpora.tokenize` ends documents.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._known = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        self.end_of_document = end_of_document
        self.vocab_size = max(self._known) + 1  # ids can have gaps
        self._name = name
        self._has_tokens = set[str]()

    def token_id(self, name: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(name)
        return found

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        if self._drops_unknown:
            self._check_known(text)
        return np.array(self._ids(text), dtype=id_dtype(self.vocab_size))

    def _ids(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"data.tokenizer={self._name!r} cannot encode the text: {error}; {HAS_ALL}"
            ) from error

    @functools.cached_property
    def _drops_unknown(self) -> bool:
        """True if characters that the vocabulary does not have vanish from the text."""
        try:
            return not any(self._ids(letter) for letter in RARE_LETTERS)
        except UserError:
            return False

    def _check_known(self, text: str) -> None:
        """Raises UserError if a character of the text has no token."""
        for character in set(text) - self._has_tokens:
            if not character.isspace() and not self._ids(character):
                raise UserError(
                    f"data.tokenizer={self._name!r} has no token for {character!a} (character "
                    f"{text.index(character)} of a text), nor one for unknown text; {HAS_ALL}"
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


@checked("jaxptd.load_tokenizer")
def load_tokenizer(name: str | Path, special: Sequence[str] = ()) -> Tokenizer:
    """Loads the tokenizer that `data.tokenizer` names.

    >>> load_tokenizer("bytes").encode("def").tolist()
    [100, 101, 102]

    A folder's end of document is `eos_token_id` in its `config.json` or `generation_config.json`.
    Otherwise it is the first token that the tokenizer has of `<|endoftext|>`, `</s>`, `<eos>`,
    `[SEP]` and `<|end_of_text|>`.

    Args:
        name: "bytes", the path of a `tokenizers` JSON file, or of a folder with a `tokenizer.json`.
        special: names of the tokens that "bytes" has behind its 257; files have their own.

    Raises:
        UserError: no such file, not a tokenizer, no end of document, configs that contradict each
            other, or no `hf` extra.
    """
    name = str(name)
    if name == BYTES:
        return ByteTokenizer(special)
    if os.path.isdir(name):
        return _load_json(tokenizer_file(name), end_of_document(name))
    if not os.path.isfile(name):
        what = "it is no file on disk" if os.path.exists(name) else "no such file"
        raise UserError(
            f"data.tokenizer={name!r}: {what}; use bytes, or the path of a tokenizers JSON file "
            "or of a folder that has one"
        )
    return _load_json(name)


def with_vocabulary(config: "Config", special: Sequence[str] = ()) -> "Config":
    """Sets model.vocab_size to the tokenizer's where it is None. special: see `load_tokenizer`."""
    if config.model.vocab_size is not None:
        return config
    size = load_tokenizer(config.data.tokenizer, special).vocab_size
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def _load_json(path: str, end: int | None = None) -> JsonTokenizer:
    """Reads a JSON file. end: id that ends a document; None is that of the first known name."""
    try:
        import tokenizers  # the optional extra; everything else here needs numpy only
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={path!r} needs the tokenizers library; pip install 'jaxptd[hf]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"data.tokenizer={path!r} is not a tokenizers JSON file: {error}"
        ) from error
    end = _named_end(tokenizer, path) if end is None else end
    if end not in tokenizer.get_vocab(with_added_tokens=True).values():
        raise UserError(
            f"data.tokenizer={path!r} has no token {end}, the {FIELD} of the config beside it; "
            "put the files of one model there"
        )
    return JsonTokenizer(tokenizer, name=path, end_of_document=end)


def _named_end(tokenizer: Any, path: str) -> int:
    """The id of the first known name of an end of document that the tokenizer has."""
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
