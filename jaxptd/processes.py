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


def share(name: str, value: str, *, seconds: float = 600.0) -> list[str]:
    """Brings one value and waits for the others': those of all processes, in their order.

    Args:
        name: of this meeting, as in `barrier`; it may be used again once another one has been held.
        value: of this process.
        seconds: to wait at most.
    """
    client = _client()
    if client is None:
        return [value]
    folder = f"jaxptd.{name}/"
    own = f"{folder}{jax.process_index()}"
    client.key_value_set(own, value)
    barrier(f"{name}.said", seconds=seconds)
    values = dict(client.key_value_dir_get(folder))
    barrier(f"{name}.heard", seconds=seconds)
    client.key_value_delete(own)
    return [values[f"{folder}{process}"] for process in range(jax.process_count())]


def _client() -> Any:
    """JAX's coordination service; None in a run of one process."""
    from jax._src import distributed  # no public name yet

    return distributed.global_state.client
