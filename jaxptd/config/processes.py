"""The section `processes` of a config."""

import dataclasses
import ipaddress
import re

from jaxptd.config.checks import require_not_negative, require_positive
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields


@named_fields
@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """The processes of a run. Null fields are read from Slurm, Open MPI, Kubernetes or torchrun.

    Args:
        coordinator: host:port of process 0, as the others reach it, with a port that is free there;
            an IPv6 address stands in brackets, [::1]:55527.
        count: number of processes; 1, or null without a launcher, is this process alone.
        id: number of this process, from 0.
        wait: seconds that processes wait for each other when a run starts.
        stuck_after: the run ends when a process has sent no sign of life for so many seconds, or
            spent them in one phase (in a step, ten times the usual duration if that is longer); 0
            is never.
    """

    coordinator: str | None = dataclasses.field(default=None, metadata={"paths": False})
    count: int | None = None
    id: int | None = None
    wait: float = 300.0
    stuck_after: float = 40.0

    def __post_init__(self) -> None:
        check_fields(self, "processes")
        require_positive("processes", self, "count", "wait")
        require_not_negative("processes", self, "id", "stuck_after")
        if self.coordinator is not None:
            check_address("processes.coordinator", self.coordinator)

    def anywhere(self) -> "ProcessesConfig":
        """Clears the fields that say where a run ran, since it may be resumed elsewhere."""
        return dataclasses.replace(self, coordinator=None, count=None, id=None)


def address_of(host: str, port: int) -> str:
    """Joins a host and a port; an IPv6 address, with or without brackets, gets them.

    >>> address_of("node01", 55527), address_of("fe80::1%eth0", 55527)
    ('node01:55527', '[fe80::1%eth0]:55527')
    """
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if _is_ipv6(bare) else f"{host}:{port}"


def check_address(what: str, address: str) -> None:
    """Raises UserError unless `address` is host:port. what: the field, for the message."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|[^\s:\[\]]+):([0-9]+)", address)
    if match and (match[1] is None or _is_ipv6(match[1])) and 0 < int(match[2][:9]) < 65536:
        return
    remedy = "use host:port, as in node01:55527"
    host, _, port = address.rpartition(":")
    forms = [f"[{host}]:{port}"] * _is_ipv6(host) + [f"[{address}]:55527"] * _is_ipv6(address)
    if forms:
        remedy += f", and brackets for an IPv6 address: {' or '.join(forms)}"
    raise UserError(f"{what}={quoted(address)}: {remedy}")


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False
