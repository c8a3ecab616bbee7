"""The text that a run ends with: its prompt, how it is drawn, and its lines."""

from collections.abc import Callable
from typing import TypedDict

from jaxptd.config import Config, DataConfig
from jaxptd.data import Samples, Tokenizer
from jaxptd.data.sources import STDLIB
from jaxptd.data.tokenizers import BYTES, UNKNOWN
from jaxptd.errors import UserError


class Settings(TypedDict, total=False):
    """Fields of `jaxptd.run.generator.Sampling`; those left out have its defaults."""

    temperature: float
    top_k: int


# A model of bytes needs a long prompt to begin with, and cooler draws than one of words: an
# unlikely letter spoils a word, and from then on the text.
PROMPT = "class Reader:\n    def __init__(self, path):\n        self."
BYTES_SETTINGS = Settings(temperature=0.7, top_k=10)
PROMPT_TOKENS = 48


def final_sample(
    write: Callable[..., str], config: Config, tokenizer: Tokenizer, validation: Samples | None
) -> str:
    """The sample that a run ends with, between two rules.

    Args:
        write: `Run.sample`, which continues a prompt.
        config: of the run.
        tokenizer: of the run.
        validation: held-out text, if there is any.
    """
    prompt = sample_prompt(config.data, tokenizer, validation)
    settings = sample_settings(config.data)
    try:
        text = write(prompt, tokens=config.train.sample_tokens, seed=config.train.seed, **settings)
    except UserError as error:  # token files whose vocabulary does not hold the prompt
        return f"no sample: {error}"
    rule = "-" * 72
    return f"{rule}\n{tidy(text)}\n{rule}"


def sample_prompt(data: DataConfig, tokenizer: Tokenizer, validation: Samples | None) -> str:
    """Text to continue: Python after the standard library's, else the beginning of held-out text.

    Empty without held-out text, which starts a document.
    """
    if data.source == STDLIB:
        return PROMPT
    if validation is None:
        return ""
    ids = validation.first_tokens(min(PROMPT_TOKENS, validation.seq_length))
    text = tidy(tokenizer.decode(ids.tolist()).strip(UNKNOWN))
    return text.rpartition(" ")[0] or text  # its last word may be cut


def sample_settings(data: DataConfig) -> Settings:
    """The settings that suit the tokenizer."""
    return BYTES_SETTINGS if data.tokenizer == BYTES else Settings()


def tidy(text: str) -> str:
    """The lines of a text that are not blank, without control codes and spaces at their ends."""
    shown = (c if c.isprintable() or c in "\n\t" else UNKNOWN for c in text.replace("\r", "\n"))
    lines = (line.rstrip() for line in "".join(shown).split("\n"))
    return "\n".join(line for line in lines if line)
