"""Joins the processes of a run, and passes values between them.

The values go through JAX's coordination service, which runs in process 0. Nothing here uses the
devices, so a thread may call it while a step runs.
"""

import functools
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxptd.config import ProcessesConfig
from jaxptd.distributed.launchers import World
from jaxptd.distributed.watchdog import on_abort
from jaxptd.errors import BAD_INPUT, UserError, print_error
from jaxptd.topology import NetworkPlace, place_of, remember

KEYS = "jaxptd/"  # prefix of every key, because JAX has keys of its own
DAY = 86400.0  # seconds; `Liveness` finds a dead or stuck process long before


def join(world: World, config: ProcessesConfig, *, devices: int) -> None:
    """Connects this process with the others; call it before JAX starts its devices.

    Args:
        world: the processes.
        config: has the time to wait for them.
        devices: number of devices of the whole layout.

    Raises:
        UserError: the devices do not split over the processes, or one does not join in time.
    """
    if world.alone:
        return
    local_devices = world.share(devices)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    line = (
        f"{world.name} could not join the others at {world.coordinator} in processes.wait="
        f"{config.wait:g} s; start all processes with the same coordinator"
    )

    def give_up() -> None:  # JAX aborts when some processes did not join in time
        print_error(line)
        os._exit(BAD_INPUT)

    remove = on_abort(give_up)
    try:
        jax.distributed.initialize(
            world.coordinator,
            world.count,
            world.id,
            world.device_ids(local_devices),
            cluster_detection_method="deactivate",  # `launchers.find` has done it
            partition_index=config.domain,  # XLA's name for the number of a domain
            initialization_timeout=max(1, int(config.wait)),
            # `Liveness` is quicker and says more.
            heartbeat_timeout_seconds=max(100, int(3 * config.stuck_after or DAY)),
        )
    except RuntimeError as error:
        if "Failed to start RPC server" in str(error):
            raise UserError(
                f"{world.name} cannot listen at {world.coordinator}: the port is taken, or the "
                "address is another host's; use another processes.coordinator"
            ) from error
        raise UserError(f"{line} ({' '.join(str(error).split())[:200]})") from error
    finally:
        remove()
    _share_places(world, place_of(config.domain, config.place, os.environ))


def _share_places(world: World, place: NetworkPlace) -> None:
    """Tells every process where the devices of all are in the network."""
    put(f"places/{world.id}", place.written())
    barrier("places", seconds=DAY)
    remember({int(rank): NetworkPlace.read(text) for rank, text in get_all("places").items()})


def is_alone() -> bool:
    """True in a run of one process."""
    return _client() is None


def is_first() -> bool:
    """True in process 0, which prints and writes the run directory.

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


def own_host() -> str:
    """The address at which the other processes reach this one: that of its way to process 0.

    That of process 0 may be a loopback address, if its host has its own name for that. Then it is
    the address that process 0 has for a process on another host. All processes call this together.
    """
    host, seen = _way_to_first()
    all_seen = [json.loads(x) for x in share("hosts", json.dumps([socket.gethostname(), seen]))]
    return _from_elsewhere(host, all_seen) if is_first() else host


def _way_to_first() -> tuple[str, str]:
    """The addresses of both ends of the way from this process to process 0."""
    address = _state().coordinator_address
    if address is None:
        return "127.0.0.1", "127.0.0.1"
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(found[0], found[1]) as way:
        way.connect(found[4])  # of a datagram socket, which sends nothing
        return str(way.getsockname()[0]), str(found[4][0])


def _from_elsewhere(host: str, seen: Sequence[Sequence[str]]) -> str:
    """The address of process 0 for other hosts.

    Args:
        host: as process 0 sees it.
        seen: the name of each process's host, and process 0's address as that process sees it.

    >>> _from_elsewhere("127.0.1.1", [["a", "127.0.1.1"], ["a", "127.0.1.1"], ["b", "10.0.0.1"]])
    '10.0.0.1'
    """
    if not ipaddress.ip_address(host.partition("%")[0]).is_loopback:
        return host
    return next((address for name, address in seen if name != seen[0][0]), host)


# ---- exchanges among all processes ------------------------------------------------------------


def barrier(name: str, *, seconds: float = 600.0) -> None:
    """Waits until every process has called this.

    Args:
        name: of this barrier; each one in a run needs its own name.
        seconds: longest wait.
    """
    client = _client()
    if client is not None:
        client.wait_at_barrier(f"jaxptd.{name}", int(seconds * 1000))


def share(name: str, value: str, *, seconds: float = 600.0) -> list[str]:
    """Gathers one value from every process, in the order of the processes.

    Args:
        name: as in `barrier`; it may be reused after another barrier.
        value: of this process.
        seconds: longest wait.
    """
    client = _client()
    if client is None:
        return [value]
    folder = f"jaxptd.{name}/"
    key = f"{folder}{jax.process_index()}"
    client.key_value_set(key, value)
    barrier(f"{name}.said", seconds=seconds)
    values = dict(client.key_value_dir_get(folder))
    barrier(f"{name}.heard", seconds=seconds)
    client.key_value_delete(key)
    return [values[f"{folder}{process}"] for process in range(jax.process_count())]


def check_alike(name: str, facts: Mapping[str, Any], *, remedy: str) -> None:
    """Raises UserError, in all processes, unless all of them have the same facts.

    Args:
        name: of this check; each one in a run needs its own name.
        facts: JSON values by readable names.
        remedy: what to do if they differ.
    """
    if is_alone():
        return
    put(f"{name}/{jax.process_index()}", json.dumps(facts))
    barrier(name, seconds=DAY)
    values = {int(rank): json.loads(text) for rank, text in get_all(name).items()}
    for rank in sorted(values):
        for fact, value in values[rank].items():
            if value != values[0].get(fact):
                raise UserError(
                    f"{fact} is {value} in process {rank} and {values[0].get(fact)} in process 0; "
                    f"{remedy}"
                )


# ---- values without a barrier -----------------------------------------------------------------


def put(key: str, value: str) -> None:
    """Writes a value that all processes can read; replaces an earlier one."""
    _client().key_value_set(KEYS + key, value, allow_overwrite=True)


def get_all(folder: str) -> dict[str, str]:
    """Reads all values under `folder/`, by the rest of their keys."""
    prefix = f"{KEYS}{folder}/"
    return {key.removeprefix(prefix): x for key, x in _client().key_value_dir_get(prefix)}


def put_first(folder: str, value: str) -> str:
    """Writes a value unless another process was first; returns the first one."""
    try:
        _client().key_value_set(f"{KEYS}{folder}/first", value)
    except jax.errors.JaxRuntimeError:  # another was first
        return get_all(folder)["first"]
    return value


def get_first(folder: str) -> str | None:
    """Reads the value that `put_first` has written there; None if there is none yet."""
    return get_all(folder).get("first")


def wait_for_first(folder: str, *, seconds: float) -> str:
    """Waits for the value that `put_first` writes there.

    Raises:
        JaxRuntimeError: no value arrives in time, or the service does not answer.
    """
    return _client().blocking_key_value_get(f"{KEYS}{folder}/first", int(seconds * 1000))


def _client() -> Any:
    """JAX's client of the coordination service; None in a run of one process."""
    return _state().client


def _state() -> Any:
    from jax._src import distributed  # no public name yet

    return distributed.global_state
