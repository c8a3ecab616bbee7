"""The text of ids that arrive a few at a time, as pieces that can be shown at once."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxptd.data.tokenizers import UNKNOWN, until_stop


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
    """How many characters come before any stop, found or begun; whether one is found there."""
    found = len(until_stop(text, stops))
    begun = len(text)
    for stop in stops:
        first = max(len(text) - len(stop) + 1, 0)
        begins = (place for place in range(first, len(text)) if stop.startswith(text[place:]))
        begun = min(begun, next(begins, begun))
    return min(found, begun), found < len(text) and found <= begun
