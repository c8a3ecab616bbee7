"""Work in which every process has a part, and which counts only if all parts succeed.

Without it a process whose disk is full would leave, and the others wait for it.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

from jaxptd.errors import UserError
from jaxptd.processes import is_first, said, share

PATIENCE = 3600.0  # seconds for the slowest process; a dead one is noticed much earlier


def agreed(name: str, part: Callable[[], Any], *, why: Callable[[Exception], str]) -> list[Any]:
    """Does this process's part, and waits for the others'.

    Args:
        name: of this piece of work, see `share`.
        part: its result is anything JSON can hold.
        why: an error in words, for the other processes.

    Returns:
        The results of all processes, in their order.

    Raises:
        Exception: this process's own, if it was the first in order to fail.
        UserError: the failure of another process.
    """
    mine, failure = None, None
    try:
        mine = part()
    except Exception as error:
        failure = error
    message = {"result": mine, "failure": why(failure) if failure else None}
    heard = [json.loads(text) for text in share(name, json.dumps(message), seconds=PATIENCE)]
    for process, each in enumerate(heard):
        if each["failure"] is not None:
            if failure is not None and process == jax.process_index():
                raise failure
            raise UserError(f"{each['failure']} (process {process})") from failure
    return [each["result"] for each in heard]


def by_first(name: str, part: Callable[[], Any], *, why: Callable[[Exception], str]) -> Any:
    """What process 0 makes of it, on all processes. Raises as `agreed`."""
    return agreed(name, part if is_first() else lambda: None, why=why)[0]


def failed_elsewhere(name: str) -> bool:
    """Whether a process has already failed at this piece of work; waits for nobody."""
    return any(json.loads(text)["failure"] is not None for text in said(name).values())
