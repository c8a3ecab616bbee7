"""Work on all processes that fails on all of them if it fails on one.

Without it a process whose disk is full would leave a save, and the others would wait for it.
"""

import json
from collections.abc import Callable
from typing import Any

import jax

from jaxptd.checkpoint.errors import CheckpointError, reason
from jaxptd.distributed.coordination import is_first, share

TIMEOUT = 3600.0  # seconds for the slowest process; a dead one is noticed much earlier


def run_on_all(name: str, work: Callable[[], Any]) -> list[Any]:
    """Runs work on this process and waits for the other processes, which run theirs.

    Args:
        name: of this work, see `share`.
        work: returns what JSON can represent.

    Returns:
        The results of all processes, in the order of their ranks.

    Raises:
        Exception: this process's own, if no other process failed.
        CheckpointError: the failures of all processes, each with its rank.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    message = {"result": result, "failure": reason(failure) if failure else None}
    replies = share(f"checkpoint.{name}", json.dumps(message), seconds=TIMEOUT)
    everyone = [json.loads(text) for text in replies]
    failed = {process: each["failure"] for process, each in enumerate(everyone) if each["failure"]}
    if failure is not None and [*failed] == [jax.process_index()]:
        raise failure
    if failed:
        text = "; ".join(f"{each} (process {process})" for process, each in failed.items())
        raise CheckpointError(text) from failure
    return [each["result"] for each in everyone]


def run_on_first(name: str, work: Callable[[], Any]) -> Any:
    """Runs work on process 0 alone; all processes return its result. Raises as `run_on_all`."""
    return run_on_all(name, work if is_first() else lambda: None)[0]
