"""The section `processes` of a config."""

import dataclasses
import re

from jaxptd.config.checks import require_not_negative, require_positive
from jaxptd.errors import UserError


@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """The processes of a run. What is null is found from Slurm, Open MPI, Kubernetes or torchrun.

    Args:
        coordinator: host:port of process 0 as the others reach it; the port is free there.
        count: processes of the run; null without a launcher, or 1, is this one alone.
        id: number of this process, from 0.
        wait: seconds that processes wait for each other when a run starts.
        stuck_after: seconds without a sign of life, or in one thing (a step: ten times what steps
            take, if that is longer), after which a process counts as dead or stuck and the run
            ends; 0 is never.
    """

    coordinator: str | None = None
    count: int | None = None
    id: int | None = None
    wait: float = 300.0
    stuck_after: float = 40.0

    def __post_init__(self) -> None:
        require_positive("processes", self, "count", "wait")
        require_not_negative("processes", self, "id", "stuck_after")
        if self.coordinator is not None:
            check_address("processes.coordinator", self.coordinator)

    def anywhere(self) -> "ProcessesConfig":
        """Without what says where a run ran: it may go on elsewhere."""
        return dataclasses.replace(self, coordinator=None, count=None, id=None)


def check_address(what: str, address: str) -> None:
    """Raises UserError unless it is host:port."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^\s:\[\]]+):(\d+)", address)
    if not match or not 0 < int(match[2]) < 65536:
        raise UserError(f"{what}={address}: use host:port, as in node01:55527")
