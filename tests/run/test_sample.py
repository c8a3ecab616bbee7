"""The prompt and lines of the sample at the end of a run."""

import numpy as np
import pytest

from jaxptd.config import DataConfig
from jaxptd.data import ByteTokenizer, WindowsInOrder
from jaxptd.generate import Sampling
from jaxptd.run.generator import PROMPT, sample_prompt, sample_settings, tidy

TEXT = "\n\nIt was a bright cold day in April, and the clocks were striking thirteen."


def windows(text: str, *, seq_length: int = 60) -> WindowsInOrder:
    tokens = ByteTokenizer().encode(text)
    return WindowsInOrder(tokens, seq_length=seq_length, vocab_size=257)


def prompt(source: str, validation: WindowsInOrder | None) -> str:
    return sample_prompt(DataConfig(source=source), ByteTokenizer(), validation)


def test_the_standard_library_is_continued_with_python():
    assert prompt("stdlib", windows(TEXT)) == PROMPT
    compile(PROMPT + "path = path", "prompt", "exec")


def test_other_text_is_continued_from_its_held_out_part_between_two_words():
    assert prompt("a.txt", windows(TEXT)) == "It was a bright cold day in April, and the"
    assert prompt("a.txt", windows(TEXT, seq_length=12)) == "It was a"
    assert prompt("a.txt", windows("é" * 60)) == "é" * 24  # letters stay whole
    assert prompt("a.txt", windows("x" + "é" * 60)) == "x" + "é" * 23


def test_without_held_out_text_the_sample_starts_a_document():
    assert prompt("a.txt", None) == ""


def test_ids_that_no_token_has_are_no_error():
    tokens = np.full(100, 60_000, np.uint16)
    validation = WindowsInOrder(tokens, seq_length=8, vocab_size=65_000)
    assert "\ufffd" not in prompt("a.bin", validation)


@pytest.mark.parametrize("tokenizer", ["bytes", "tokenizer.json"])
def test_a_model_of_bytes_is_drawn_from_more_carefully(tokenizer):
    sampling = Sampling(**sample_settings(DataConfig(tokenizer=tokenizer)))
    assert (sampling.temperature < Sampling.temperature) == (tokenizer == "bytes")


def test_blank_lines_and_control_codes_are_cut():
    assert tidy("\n  a:\n\n   \n    b  \r\n\n") == "  a:\n    b"
    assert tidy("a\x1b[2J\tb\x00") == "a\ufffd[2J\tb\ufffd"
    assert tidy(" \n\n") == ""
