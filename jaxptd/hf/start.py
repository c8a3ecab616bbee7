"""The state of step 0 of a run whose config names weights to start from."""

from collections.abc import Callable, Iterator
from pathlib import Path

from jaxptd.config import Config
from jaxptd.config.training import RANDOM
from jaxptd.data.sources import find_files
from jaxptd.data.token_files import is_token_file
from jaxptd.data.tokenizer_folders import TOKENIZER
from jaxptd.data.tokenizers import BYTES
from jaxptd.errors import UserError, quoted
from jaxptd.hf.directory import Directory, is_directory
from jaxptd.hf.read import read_params, remarks_of
from jaxptd.models.families import family_of
from jaxptd.run.saved import restore_weights
from jaxptd.step import Program, State

MOST_OF_BYTES = 512  # ids: 257, special tokens, and some room


def first_state(program: Program, *, say: Callable[[str], None]) -> State:
    """The state of step 0: parameters that are drawn, or those that `checkpoint.start` names.

    Moments are zero in both cases.

    Raises:
        UserError: the directory is not there, or damaged, or of another model.
    """
    start = program.config.checkpoint.start
    if start in (None, RANDOM):
        return program.init_state()
    path = Path(start)
    if not path.is_dir():
        raise UserError(
            f"checkpoint.start: there is no folder {quoted(start)}; name that of a run, of a "
            "checkpoint in it, or of a Hugging Face model"
        )
    if is_directory(path):
        directory = Directory(path)
        params = read_params(program, directory)
        for line in (*remarks_of(directory), *_of_strangers(program.config, path)):
            say(line)
    else:
        params = restore_weights(program, path)
    say(f"starting from the weights of {path}")
    return program.states.new(params)


def _of_strangers(config: Config, path: Path) -> Iterator[str]:
    """A sentence if text is read as bytes by a model whose weights know other tokens."""
    size = config.model.vocab_size or 0
    if config.data.tokenizer != BYTES or not family_of(config.model).has_vocabulary:
        return
    if (path / TOKENIZER).is_file():
        remedy = f"use --data.tokenizer {path}, if its texts are meant"
    elif size > MOST_OF_BYTES:
        remedy = "name the model's own tokenizer.json as data.tokenizer"
    else:
        return
    source = config.data.source
    files = find_files(source if isinstance(source, str) else list(source))
    if not all(map(is_token_file, files)):
        yield (
            f"warning: data.tokenizer=bytes reads text as bytes, and the weights of {path} know "
            f"other tokens, {size} of them; {remedy}"
        )
