"""The text that a run ends with: its prompt, how it is drawn, and its lines."""

from typing import TypedDict

from jaxptd.config import DataConfig
from jaxptd.data.sources import STDLIB
from jaxptd.data.tokenizers import BYTES

# A model of bytes needs a long prompt to begin with, and cooler draws than one of words: an
# unlikely letter spoils a word, and from then on the text.
PROMPT = "class Reader:\n    def __init__(self, path):\n        self."


class Settings(TypedDict, total=False):
    """Fields of `jaxptd.generate.Sampling`; those left out have its defaults."""

    temperature: float
    top_k: int


BYTES_DRAWN = Settings(temperature=0.7, top_k=10)


def sample_prompt(data: DataConfig) -> str:
    """The beginning of a Python class after the standard library's text; else of a document."""
    return PROMPT if data.source == STDLIB else ""


def sample_settings(data: DataConfig) -> Settings:
    """The settings that suit the tokenizer."""
    return BYTES_DRAWN if data.tokenizer == BYTES else Settings()


def without_blank_lines(text: str) -> str:
    """The lines of a text that are not blank, without spaces at their ends."""
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)
