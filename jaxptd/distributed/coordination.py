"""The processes of a run: how they come together, wait for each other and tell each other things.

What they tell goes through JAX's coordination service, which process 0 holds. Nothing here runs on
devices, so a thread may call it while a step runs.
"""

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxptd.config import ProcessesConfig
from jaxptd.distributed.abort_hook import on_abort
from jaxptd.distributed.launchers import World
from jaxptd.errors import BAD_INPUT, UserError, print_error

KEYS = "jaxptd/"  # before every key, JAX has its own
DAY = 86400.0  # seconds; who is dead or stuck meanwhile, `Liveness` finds


def join(world: World, config: ProcessesConfig, *, devices: int) -> None:
    """Brings the processes together; before JAX starts its devices.

    Args:
        world: which processes.
        config: how long they wait.
        devices: of the whole layout.

    Raises:
        UserError: the devices do not split over the processes, or some do not come in time.
    """
    if world.alone:
        return
    share = world.share(devices)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    line = (
        f"{world.name} could not join the others at {world.coordinator} in processes.wait="
        f"{config.wait:g} s; start all of them, with the same coordinator"
    )

    def give_up() -> None:  # not all came in time: JAX aborts
        print_error(line)
        os._exit(BAD_INPUT)

    put_back = on_abort(give_up)
    try:
        jax.distributed.initialize(
            world.coordinator,
            world.count,
            world.id,
            world.device_ids(share),
            cluster_detection_method="deactivate",  # `world` did it
            initialization_timeout=max(1, int(config.wait)),
            # `Liveness` is quicker, and says more.
            heartbeat_timeout_seconds=max(100, int(3 * config.stuck_after or DAY)),
        )
    except RuntimeError as error:
        if "Failed to start RPC server" in str(error):
            raise UserError(
                f"{world.name} cannot listen at {world.coordinator}: the port is taken, or the "
                "host is another one; use another processes.coordinator"
            ) from error
        raise UserError(f"{line} ({' '.join(str(error).split())[:200]})") from error
    finally:
        put_back()


def is_alone() -> bool:
    """Whether the run has one process only."""
    return _client() is None


def is_first() -> bool:
    """Whether this is the process that prints, and writes the run directory.

    Unlike `jax.process_index()` it starts no devices.
    """
    return _state().process_id == 0


def first_only(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function do nothing except in the first process."""

    @functools.wraps(function)
    def in_first(*args: Any, **kwargs: Any) -> None:
        if is_first():
            function(*args, **kwargs)

    return in_first


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


def put(key: str, value: str) -> None:
    """Writes what all can read, over what stood there."""
    _client().key_value_set(KEYS + key, value, allow_overwrite=True)


def get_all(folder: str) -> dict[str, str]:
    """What stands under `folder/`, by the rest of its key."""
    prefix = f"{KEYS}{folder}/"
    return {key.removeprefix(prefix): x for key, x in _client().key_value_dir_get(prefix)}


def put_first(folder: str, value: str) -> str:
    """What the first process that came here said; all get the same."""
    try:
        _client().key_value_set(f"{KEYS}{folder}/settled", value)
    except jax.errors.JaxRuntimeError:  # another was first
        return get_all(folder)["settled"]
    return value


def get_first(folder: str) -> str | None:
    """What `put_first` was given there so far."""
    return get_all(folder).get("settled")


def wait_for(folder: str, *, seconds: float) -> str:
    """Waits for what `put_first` is given there; RuntimeError when the time is over."""
    return _client().blocking_key_value_get(f"{KEYS}{folder}/settled", int(seconds * 1000))


def check_alike(name: str, facts: Mapping[str, Any], *, remedy: str) -> None:
    """Raises UserError, in all processes, unless all of them give the same facts.

    Args:
        name: of this meeting; each meeting of a run needs one of its own.
        facts: what JSON can hold, by names for a person.
        remedy: what to do where they differ.
    """
    if _client() is None:
        return
    mine = json.loads(json.dumps(facts))
    put(f"{name}/{jax.process_index()}", json.dumps(mine))
    barrier(name, seconds=DAY)
    said = {int(rank): json.loads(text) for rank, text in get_all(name).items()}
    for rank in sorted(said):
        for what, value in said[rank].items():
            if value != said[0].get(what):
                raise UserError(
                    f"{what} is {value} in process {rank} and {said[0].get(what)} in process 0; "
                    f"{remedy}"
                )


def _client() -> Any:
    """JAX's client of the coordination service; None in a run of one process."""
    return _state().client


def _state() -> Any:
    from jax._src import distributed  # no public name yet

    return distributed.global_state
