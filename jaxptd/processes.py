"""The processes of a run: which one this is, and how they wait for each other.

Nothing here runs on devices, so a thread may call it while a step runs.
"""

from typing import Any

import jax


def is_first() -> bool:
    """Whether this is the process that writes logs and the run directory."""
    return jax.process_index() == 0


def barrier(name: str, *, seconds: float = 600.0) -> None:
    """Waits until every process has come here.

    Args:
        name: of this meeting; each meeting of a run needs one of its own.
        seconds: to wait at most.
    """
    client = _client()
    if client is not None:
        client.wait_at_barrier(f"jaxptd.{name}", int(seconds * 1000))


def _client() -> Any:
    """JAX's coordination service; None in a run of one process."""
    from jax._src import distributed  # no public name yet

    return distributed.global_state.client
