"""The text of generated ids, a few at a time."""

import hypothesis
import hypothesis.strategies as st

from jaxptd.data.tokenizers import UNKNOWN, ByteTokenizer, pieces, until_stop

TOKENIZER = ByteTokenizer()


def shown(chunks, *stops: str) -> list[str]:
    return list(pieces(chunks, TOKENIZER.decode, stops))


def bytes_of(text: str) -> list[list[int]]:
    """Chunks of one byte each."""
    return [[byte] for byte in text.encode()]


def test_half_a_character_waits_for_the_rest():
    assert shown(bytes_of("aé€😀b")) == ["a", "é", "€", "😀", "b"]
    assert shown([*bytes_of("a"), [0xE2], [0x82]]) == ["a", UNKNOWN]  # the text ends within one
    assert shown([[0xE2], [0x82], *bytes_of("b")]) == [f"{UNKNOWN}b"]  # it never was one


def test_the_beginning_of_a_stop_waits_and_the_stop_is_not_shown():
    assert shown(bytes_of("abENE"), "END") == ["a", "b", "EN", "E"]
    assert shown(bytes_of("abENDc"), "END") == ["a", "b"]
    assert shown([list(b"a END b")], "", "END") == ["a "]
    assert shown(bytes_of("aéb"), "é") == ["a"]


def test_the_stop_that_begins_first_ends_a_text_even_if_another_is_complete_before():
    assert shown(bytes_of("abcd"), "c", "bcd") == ["a"]
    assert shown(bytes_of("abcx"), "c", "bcd") == ["a", "b"]


def test_no_chunk_is_asked_for_after_a_stop():
    chunks = iter(bytes_of("a.b"))
    assert shown(chunks, ".") == ["a"]
    assert list(chunks) == [[ord("b")]]


@hypothesis.given(
    st.lists(st.lists(st.sampled_from([*b"ab.", *"é€".encode(), 256, 300]), max_size=3)),
    st.lists(st.sampled_from(["", "a", "ab", "ba.", "aab", "é", ".é", "\n", UNKNOWN]), max_size=3),
)
def test_pieces_are_the_text_before_the_first_stop(chunks, stops):
    ids = [token for chunk in chunks for token in chunk]
    found = shown(chunks, *stops)
    assert "".join(found) == until_stop(TOKENIZER.decode(ids), stops)
    assert all(found)
