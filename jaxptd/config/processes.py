"""The section `processes` of a config."""

import dataclasses
import re

from jaxptd.config.checks import require_not_negative, require_positive
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields


@named_fields
@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """The processes of a run. Null fields are read from Slurm, Open MPI, Kubernetes or torchrun.

    Args:
        coordinator: host:port of process 0, as the others reach it, with a port that is free there.
        count: number of processes; 1, or null without a launcher, is this process alone.
        id: number of this process, from 0.
        wait: seconds that processes wait for each other when a run starts.
        stuck_after: the run ends when a process has sent no sign of life for so many seconds, or
            spent them in one phase (in a step, ten times the usual duration if that is longer); 0
            is never.
    """

    coordinator: str | None = None
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


def check_address(what: str, address: str) -> None:
    """Raises UserError unless `address` is host:port. what: the field, for the message."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^\s:\[\]]+):(\d+)", address)
    if not match or not 0 < int(match[2]) < 65536:
        raise UserError(f"{what}={quoted(address)}: use host:port, as in node01:55527")
