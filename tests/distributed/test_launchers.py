"""Finds the processes of a run from flags and from each launcher's variables."""

import pytest

from jaxptd.config import ProcessesConfig
from jaxptd.distributed.launchers import World, find, first_host
from jaxptd.errors import UserError

NOTHING = ProcessesConfig()
TORCHRUN = {
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "16",
    "RANK": "9",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008],big1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "pre-train-3"}


def without(environ: dict[str, str], *names: str, **others: str) -> dict[str, str]:
    return {name: x for name, x in environ.items() if name not in names} | others


@pytest.mark.parametrize(
    ("config", "environ", "world"),
    [
        (NOTHING, {}, World()),
        (NOTHING, TORCHRUN, World(16, 9, "node01:29500", local=1)),
        (
            NOTHING,
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            World(16, 9, "node01:29501", local=1),
        ),
        (NOTHING, without(TORCHRUN, "LOCAL_RANK"), World(16, 9, "node01:29500")),
        (NOTHING, TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, World(16, 9, "node01:29500")),
        (NOTHING, SLURM, World(4, 2, "gpu007:61445", local=0)),  # 4099 + 2 = 5 mod 4096
        (
            NOTHING,  # one task per node
            SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
            World(2, 1, "gpu007:61445"),
        ),
        (NOTHING, SLURM | {"CUDA_VISIBLE_DEVICES": "2"}, World(4, 2, "gpu007:61445", 0, 1)),
        (ProcessesConfig(count=4), KUBERNETES, World(4, 3, "pre-train-0.pre-train:55527")),
        (ProcessesConfig("a:1", 2, 1), {}, World(2, 1, "a:1")),
        (ProcessesConfig("a:1", 2, 1), SLURM, World(2, 1, "a:1", local=0)),
        (ProcessesConfig("a:1"), SLURM, World(4, 2, "a:1", local=0)),
        *(
            (NOTHING, TORCHRUN | {"MASTER_ADDR": host}, World(16, 9, f"{found}:29500", local=1))
            for host, found in (
                ("::1", "[::1]"),
                ("[::1]", "[::1]"),
                ("fe80::1%eth0", "[fe80::1%eth0]"),
                ("2001:db8:0:0:1::7", "[2001:db8:0:0:1::7]"),
                ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]"),
                ("10.0.0.1", "10.0.0.1"),
            )
        ),
        (ProcessesConfig("[fe80::1]:5"), TORCHRUN, World(16, 9, "[fe80::1]:5", local=1)),
    ],
)
def test_what_is_given_and_what_is_found(config, environ, world):
    assert find(config, environ) == world


def test_open_mpi_on_several_hosts_and_on_one():
    world = find(NOTHING, OPEN_MPI)
    assert (world.count, world.id, world.local) == (4, 3, 1)
    host, _, port = str(world.coordinator).partition(":")
    assert host == "10.96.0.1"
    assert 61440 <= int(port) < 65536
    others = without(OPEN_MPI, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    assert find(NOTHING, others).coordinator == world.coordinator
    six = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "13.0;tcp6://[fe80::b9b,2620::2]:43370"}
    assert str(find(NOTHING, six).coordinator).startswith("[fe80::b9b]:")
    scope = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "13.0;tcp6://[fe80::b9b%ib0]:43370"}
    assert str(find(NOTHING, scope).coordinator).startswith("[fe80::b9b%ib0]:")
    one = without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri", OMPI_COMM_WORLD_LOCAL_SIZE="4")
    assert str(find(NOTHING, one).coordinator).startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        (NOTHING, TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}),
        (NOTHING, {"WORLD_SIZE": "1"}),
        (NOTHING, SLURM | {"SLURM_STEP_NUM_TASKS": "1"}),
        (NOTHING, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}),  # salloc
        (NOTHING, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),  # sbatch
        (ProcessesConfig(count=1), KUBERNETES),
        (ProcessesConfig(count=1), {"RANK": "one"}),
    ],
)
def test_one_process_is_alone(config, environ):
    assert find(config, environ) == World()


@pytest.mark.parametrize(
    ("environ", "inner"),
    [
        (SLURM | TORCHRUN, "node01:29500"),  # srun torchrun
        (SLURM | {"MASTER_ADDR": "node01", "MASTER_PORT": "1"}, "gpu007:61445"),  # only exported
        (SLURM | OPEN_MPI, "10.96.0.1:"),  # mpirun inside a Slurm step
        (KUBERNETES | TORCHRUN, "node01:29500"),  # a pod of a training operator
    ],
)
def test_of_several_launchers_the_innermost_counts(environ, inner):
    assert str(find(NOTHING, environ).coordinator).startswith(inner)


@pytest.mark.parametrize(
    ("config", "environ", "line"),
    [
        (
            ProcessesConfig(count=2),
            {},
            "processes.count=2 without processes.coordinator and processes.id; give "
            "--processes.coordinator ... --processes.id ..., or --processes.count 1",
        ),
        (
            ProcessesConfig("a:1"),
            {},
            "processes.coordinator=a:1 without processes.count and processes.id",
        ),
        (
            NOTHING,
            without(TORCHRUN, "MASTER_PORT"),
            "processes.count=16, processes.id=9 without processes.coordinator (torchrun's "
            "environment without MASTER_PORT sets nothing else); give --processes.coordinator ...",
        ),
        (NOTHING, without(TORCHRUN, "WORLD_SIZE"), " without processes.count"),
        (
            NOTHING,
            {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "processes.coordinator=a:1 without processes.count and processes.id",
        ),
        (NOTHING, without(SLURM, "SLURM_JOB_ID"), " without processes.coordinator"),
        (
            NOTHING,
            without(OPEN_MPI, "OMPI_MCA_orte_hnp_uri"),  # version 5, several hosts
            "processes.count=4, processes.id=3 without processes.coordinator (Open MPI sets",
        ),
        (NOTHING, KUBERNETES, " without processes.count"),
        (
            NOTHING,
            TORCHRUN | {"MASTER_ADDR": "node01:29500"},
            "the environment's MASTER_ADDR:MASTER_PORT=node01:29500:29500: use host:port",
        ),
        (
            NOTHING,
            TORCHRUN | {"MASTER_PORT": "0"},
            "the environment's MASTER_ADDR:MASTER_PORT=node",
        ),
        (NOTHING, TORCHRUN | {"RANK": "nine"}, "the environment has RANK=nine, not a number"),
        (NOTHING, TORCHRUN | {"RANK": "16"}, "processes.id=16 with processes.count=16: use 0 to"),
        (ProcessesConfig("a:1", 2, 2), {}, "processes.id=2 with processes.count=2: use 0 to 1"),
    ],
)
def test_half_of_it_is_refused_with_what_is_missing(config, environ, line):
    with pytest.raises(UserError) as caught:
        find(config, environ)
    assert line in str(caught.value)


@pytest.mark.parametrize("address", ["host", "host:", ":5", "host:0", "host:70000", "a b:1", "::1"])
def test_an_address_is_a_host_and_a_port(address):
    with pytest.raises(UserError, match="use host:port, as in node01:55527"):
        ProcessesConfig(coordinator=address)


@pytest.mark.parametrize(
    ("address", "forms"),
    [
        ("::1", "[::1]:55527"),
        ("::1:1234", "[::1]:1234 or [::1:1234]:55527"),  # ambiguous
        ("2001:db8:0:0:1:2:3:7:5555", "[2001:db8:0:0:1:2:3:7]:5555"),
        ("fe80::1%eth0", "[fe80::1%eth0]:55527"),
    ],
)
def test_an_ipv6_address_without_brackets_is_refused_with_what_was_meant(address, forms):
    with pytest.raises(UserError, match=r"and brackets for an IPv6 address: ") as caught:
        ProcessesConfig(coordinator=address)
    assert str(caught.value).endswith(f": {forms}")


@pytest.mark.parametrize(
    "address", ["[node01]:5", "[::1]", "[::1]:", "[::1]:99999999999", "[::g]:1"]
)
def test_only_an_ipv6_address_stands_in_brackets(address):
    with pytest.raises(UserError, match="use host:port, as in node01:55527"):
        ProcessesConfig(coordinator=address)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu", "gpu"),
        ("gpu7,gpu8", "gpu7"),
        ("n[001-003,007],gpu[1,3]", "n001"),
        ("n[7,001-003]", "n7"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("a[1-2]b[3-4]-ib", "a1b3-ib"),
        ("a[1-2]b[3-4]-ib,c1", "a1b3-ib"),
        ("r[10-11][00-15]s", "r1000s"),
        ("[1-3]", "1"),
        ("n[0001]", "n0001"),
        ("node-a-[09-10].cluster.example", "node-a-09.cluster.example"),
        ("login,rack[1-2]n[1-2]", "login"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, host):
    assert first_host(nodes) == host


def test_devices_are_shared_evenly():
    assert World(4, 1, "a:1").share(8) == 2
    with pytest.raises(UserError, match="8 devices do not split over processes.count=3; change"):
        World(3, 1, "a:1").share(8)


@pytest.mark.parametrize(
    ("local", "visible", "ids"),
    [
        (None, None, None),  # unknown: it uses all that it sees
        (1, None, [2, 3]),
        (0, 8, [0, 1]),
        (1, 2, None),  # each sees only its share (srun --gpus-per-task)
    ],
)
def test_processes_of_a_host_share_its_devices(local, visible, ids):
    assert World(4, 1, "a:1", local, visible).device_ids(2) == ids
