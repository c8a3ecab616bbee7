"""Work in which every process has a part, and which counts only if all parts succeed.

Without it a process whose disk is full would leave, and the others wait for it.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

from jaxptd.checkpoint.manifest import CheckpointError, reason
from jaxptd.distributed.coordination import is_first, share

PATIENCE = 3600.0  # seconds for the slowest process; a dead one is noticed much earlier


def agreed(name: str, part: Callable[[], Any]) -> list[Any]:
    """Does this process's part, and waits for the others'.

    Args:
        name: of this piece of work, see `share`.
        part: its result is anything JSON can hold.

    Returns:
        The results of all processes, in their order.

    Raises:
        Exception: this process's own, if no other one failed.
        CheckpointError: all failures, each with its process.
    """
    mine, failure = None, None
    try:
        mine = part()
    except Exception as error:
        failure = error
    message = {"result": mine, "failure": reason(failure) if failure else None}
    heard = share(f"checkpoint.{name}", json.dumps(message), seconds=PATIENCE)
    everyone = [json.loads(text) for text in heard]
    failed = {process: each["failure"] for process, each in enumerate(everyone) if each["failure"]}
    if failure is not None and [*failed] == [jax.process_index()]:
        raise failure
    if failed:
        text = "; ".join(f"{each} (process {process})" for process, each in failed.items())
        raise CheckpointError(text) from failure
    return [each["result"] for each in everyone]


def by_first(name: str, part: Callable[[], Any]) -> Any:
    """What process 0 makes of it, on all processes. Raises as `agreed`."""
    return agreed(name, part if is_first() else lambda: None)[0]
