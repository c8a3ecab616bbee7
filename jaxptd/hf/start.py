"""The state of step 0 of a run whose config names weights to start from."""

from collections.abc import Callable
from pathlib import Path

from jaxptd.config.training import RANDOM
from jaxptd.errors import UserError, quoted
from jaxptd.hf.directory import Directory, is_directory
from jaxptd.hf.read import read_params, remarks_of
from jaxptd.run.saved import restore_weights
from jaxptd.step import Program, State


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
        for line in remarks_of(directory):
            say(line)
    else:
        params = restore_weights(program, path)
    say(f"starting from the weights of {path}")
    return program.states.new(params)
