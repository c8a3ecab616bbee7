"""Ids of the special tokens that objectives need, by the names that tokenizers have for them."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxptd.data.tokenizers import Tokenizer
from jaxptd.errors import UserError

MASK_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
SPAN_PAD = "<pad>"
SENTINELS = 100  # of T5's vocabulary
# In the order of their ids: the sentinel of the first span has the last.
SPAN_TOKENS = (SPAN_PAD, *(f"<extra_id_{span}>" for span in reversed(range(SENTINELS))))


@dataclasses.dataclass(frozen=True)
class MaskIds:
    """Ids of masked language modelling.

    Args:
        pad: fills a sequence up.
        cls: begins a sequence.
        sep: ends each of its two parts.
        mask: is in place of a masked token.
        end_of_document: of the corpus; like the other four it is never masked.
        vocab_size: ids are in [0, vocab_size).
    """

    pad: int
    cls: int
    sep: int
    mask: int
    end_of_document: int
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "MaskIds":
        """Finds the ids of a tokenizer.

        Raises:
            UserError: it does not have all four tokens.
        """
        pad, cls_, sep, mask = _find(tokenizer, MASK_TOKENS, "masked language modelling")
        end, size = tokenizer.end_of_document, tokenizer.vocab_size
        return cls(pad=pad, cls=cls_, sep=sep, mask=mask, end_of_document=end, vocab_size=size)

    @property
    def special(self) -> tuple[int, ...]:
        """All but the ordinary ids."""
        return (self.pad, self.cls, self.sep, self.mask, self.end_of_document)


@dataclasses.dataclass(frozen=True)
class SpanIds:
    """Ids of span corruption.

    Args:
        pad: fills a sequence up; the decoder's first input.
        end: the last token of source and of targets.
        sentinels: of the first span, the second and so on.
        vocab_size: ids are in [0, vocab_size).
    """

    pad: int
    end: int
    sentinels: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "SpanIds":
        """Finds the ids of a tokenizer; its end of document ends sequences.

        Raises:
            UserError: it does not have the tokens.
        """
        (pad, _) = _find(tokenizer, (SPAN_PAD, "<extra_id_0>"), "span corruption")
        sentinels = tuple(_sentinels(tokenizer))
        return cls(pad, tokenizer.end_of_document, sentinels, tokenizer.vocab_size)


def _find(tokenizer: Tokenizer, names: Sequence[str], objective: str) -> tuple[int, ...]:
    found = {name: tokenizer.token_id(name) for name in names}
    if missing := [name for name, number in found.items() if number is None]:
        raise UserError(
            f"data.tokenizer has no token {' and no '.join(missing)}, which {objective} needs; "
            "add what is missing to its file, or use bytes"
        )
    return tuple(number for number in found.values() if number is not None)


def _sentinels(tokenizer: Tokenizer) -> Iterator[int]:
    """The ids of <extra_id_0>, <extra_id_1>, ..., as many as there are."""
    span = 0
    while (number := tokenizer.token_id(f"<extra_id_{span}>")) is not None:
        yield number
        span += 1
