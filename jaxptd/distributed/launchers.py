"""Finds the processes of a run, from the config or from the launcher's environment variables.

Slurm, Open MPI, Kubernetes and torchrun each set variables of their own. The caller passes them as
a mapping. The innermost launcher counts: torchrun may run inside Slurm, and `mpirun` in a Slurm
batch script.
"""

import dataclasses
import math
import re
import zlib
from collections.abc import Mapping

from jaxptd.config import ProcessesConfig
from jaxptd.config.run import address_of, check_address
from jaxptd.errors import UserError

Environ = Mapping[str, str]

PORTS = range(61440, 65536)  # where a launcher sets no port, the job number picks one, as in JAX
KUBERNETES_PORT = 55527  # as in JAX


@dataclasses.dataclass(frozen=True)
class World:
    """The processes of a run, and this process's place among them.

    Args:
        count: number of processes.
        id: number of this process, from 0.
        coordinator: host:port of process 0. None in a run of one process.
        local: number of this process among those on its host. None if unknown.
        visible: number of devices that the environment makes visible. None if all are.
    """

    count: int = 1
    id: int = 0
    coordinator: str | None = None
    local: int | None = None
    visible: int | None = None

    @property
    def alone(self) -> bool:
        return self.count == 1

    @property
    def name(self) -> str:
        return self.name_of(self.id)

    def name_of(self, rank: int) -> str:
        return f"process {rank} of {self.count}"

    def share(self, devices: int) -> int:
        """Devices of each process. Raises UserError if they do not split over the processes."""
        if devices % self.count:
            raise UserError(
                f"the layout's {devices} devices do not split over processes.count={self.count}; "
                "change the layout or the number of processes"
            )
        return devices // self.count

    def device_ids(self, share: int) -> list[int] | None:
        """The devices of its host that this process uses. None for all visible ones."""
        if self.local is None or (self.visible is not None and self.visible <= share):
            return None
        return list(range(self.local * share, (self.local + 1) * share))


@dataclasses.dataclass(frozen=True)
class _LauncherHints:
    """The values that a launcher has set; None for those it has not."""

    launcher: str
    coordinator: str | None
    count: int | None
    id: int | None
    local: int | None = None
    per_host: int | None = None


def find(config: ProcessesConfig, environ: Environ) -> World:
    """Finds the processes of this run; the config's values override the environment's.

    Raises:
        UserError: only some of the values are set, or they contradict each other.
    """
    if config.count == 1:
        return World()
    hints = _launcher(environ)
    if hints is not None and hints.count == 1 and config.count is None:
        return World()
    given = {name: getattr(config, name) for name in ("coordinator", "count", "id")}
    if hints is not None:
        given = {name: getattr(hints, name) if x is None else x for name, x in given.items()}
    if all(value is None for value in given.values()):
        return World()
    _check_complete(given, hints)
    if not 0 <= given["id"] < given["count"]:
        raise UserError(
            f"processes.id={given['id']} with processes.count={given['count']}: "
            f"use 0 to {given['count'] - 1}"
        )
    local = hints.local if hints is not None and hints.per_host != 1 else None
    devices = environ.get("CUDA_VISIBLE_DEVICES")
    visible = len(devices.split(",")) if devices else None
    return World(given["count"], given["id"], given["coordinator"], local, visible)


def _check_complete(given: dict[str, str | int | None], hints: _LauncherHints | None) -> None:
    missing = [f"processes.{name}" for name, value in given.items() if value is None]
    if not missing:
        return
    present = [f"processes.{name}={value}" for name, value in given.items() if value is not None]
    source = f" ({hints.launcher} sets nothing else)" if hints else ""
    raise UserError(
        f"{', '.join(present)} without {' and '.join(missing)}{source}; give "
        f"{' '.join(f'--{name} ...' for name in missing)}, or --processes.count 1 to run one "
        "process"
    )


# ---- the launchers --------------------------------------------------------------------------


def _launcher(environ: Environ) -> _LauncherHints | None:
    """Reads the variables of the innermost launcher; None if there is no launcher."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _torchrun(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    if "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:  # started by srun
        return _slurm(environ)
    if "JOB_COMPLETION_INDEX" in environ:
        return _kubernetes(environ)
    if "MASTER_ADDR" in environ:
        return _torchrun(environ)
    return None


def _torchrun(environ: Environ) -> _LauncherHints:
    """Reads torchrun's variables, which other launchers (Kubeflow, Lightning) set too."""
    host, port = environ.get("MASTER_ADDR"), _integer(environ, "MASTER_PORT")
    if port is not None and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        port += 1  # torchrun itself listens at MASTER_PORT
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    coordinator = address_of(host, port) if host and port is not None else None
    if coordinator:
        check_address("the environment's MASTER_ADDR:MASTER_PORT", coordinator)
    return _LauncherHints(
        "torchrun's environment" + (f" without {' and '.join(missing)}" if missing else ""),
        coordinator,
        _integer(environ, "WORLD_SIZE"),
        _integer(environ, "RANK"),
        _integer(environ, "LOCAL_RANK"),
        _integer(environ, "LOCAL_WORLD_SIZE"),
    )


def _open_mpi(environ: Environ) -> _LauncherHints:
    """Reads Open MPI's variables, assuming that process 0 is on mpirun's host.

    Version 4 sets the address of that host, version 5 does not.
    """
    count = _integer(environ, "OMPI_COMM_WORLD_SIZE")
    per_host = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    job = uri.partition(".")[0] or environ.get("PMIX_NAMESPACE", "")
    match = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    host = (match[1] or match[2]) if match else None
    if count is not None and count == per_host:
        host = "127.0.0.1"
    return _LauncherHints(
        "Open MPI",
        address_of(host, _port(zlib.crc32(job.encode()))) if host else None,
        count,
        _integer(environ, "OMPI_COMM_WORLD_RANK"),
        _integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        per_host,
    )


def _slurm(environ: Environ) -> _LauncherHints:
    """Reads the variables of a Slurm step, which `salloc` and batch scripts do not set."""
    count = _integer(environ, "SLURM_STEP_NUM_TASKS")
    job, step = _integer(environ, "SLURM_JOB_ID"), _integer(environ, "SLURM_STEP_ID")
    nodes = _integer(environ, "SLURM_STEP_NUM_NODES")
    host = first_host(environ["SLURM_STEP_NODELIST"])
    return _LauncherHints(
        "Slurm",
        address_of(host, _port(job + (step or 0))) if job is not None else None,
        _integer(environ, "SLURM_NTASKS") if count is None else count,
        _integer(environ, "SLURM_PROCID"),
        _integer(environ, "SLURM_LOCALID"),
        math.ceil(count / nodes) if count and nodes else None,
    )


def _kubernetes(environ: Environ) -> _LauncherHints:
    """Reads the variables of a pod of an indexed Job, whose headless service has the Job's name.

    The pod's hostname is the Job's name and the pod's index. No variable gives the number of pods.
    """
    index = _integer(environ, "JOB_COMPLETION_INDEX")
    job = environ.get("HOSTNAME", "").removesuffix(f"-{index}")
    host = f"{job}-0.{job}:{KUBERNETES_PORT}" if job else None
    return _LauncherHints("Kubernetes", host, None, index)


def first_host(nodes: str) -> str:
    """The first host of Slurm's list of hosts, as `scontrol show hostnames` prints it.

    A name may have several ranges, each with numbers of a fixed width.

    >>> first_host("node[07-09,12],other"), first_host("a1,a2"), first_host("rack[1-2]n[01-04]-ib")
    ('node07', 'a1', 'rack1n01-ib')
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    assert match is not None  # it matches the empty string
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", match[0])


def _port(number: int) -> int:
    return PORTS[number % len(PORTS)]


def _integer(environ: Environ, name: str) -> int | None:
    if name not in environ:
        return None
    try:
        return int(environ[name])
    except ValueError as error:
        raise UserError(
            f"the environment has {name}={environ[name]}, not a number; unset it, or use "
            "--processes.count 1 to run one process"
        ) from error
