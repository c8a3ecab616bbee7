"""The recipes in `examples/cluster/`: scripts run with a fake scheduler and Python that record.

The command's parser reads each command line, and the variables that the launcher sets identify the
processes that it starts.
"""

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from jaxptd.commands.run_options import read_run
from jaxptd.config import Config
from jaxptd.distributed.launchers import find
from jaxptd.distributed.stop import SIGNALS
from jaxptd.errors import BAD_INPUT, BUG
from jaxptd.train import parser

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
DOCKERFILE = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ")
SCRIPTS = ("slurm.sbatch", "two_hosts.sh")


def config_of(options: list[str]) -> Config:
    return read_run(parser(), options, new=True)[0]


def write_program(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_script(name: str, *options: str, folder: Path, code: int = 0, text="", **variables: str):
    """Runs a script; srun, scontrol and python print their arguments, and exit with this code.

    text: text of the script, if it differs from the file.
    """
    for program in ("srun", "scontrol", "python"):
        said = f'"CPUs $SRUN_CPUS_PER_TASK $IN_VENV" {program} "$@" end'
        write_program(folder / "bin" / program, f'printf "%s\\n" {said}\nexit {code}')
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").write_text("export IN_VENV=active\n")
    environ = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}
    script = folder / name
    script.write_text(text or (CLUSTER / name).read_text())
    command = ["bash", str(script), *options]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    calls = [call.split("\n")[1:] for call in done.stdout.split("\nend\n") if call]
    return done, calls


def training_options(call: list[str]) -> list[str]:
    return call[call.index("jaxptd.train") + 1 :]


def test_every_recipe_is_checked_here() -> None:
    others = {"Dockerfile", "jobset.yaml", "kustomization.yaml", "ray_train.py", "skypilot.yaml"}
    assert {path.name for path in CLUSTER.iterdir() if path.is_file()} == {*SCRIPTS, *others}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(CLUSTER / name)]).returncode == 0


# ---- Slurm ------------------------------------------------------------------------------------


def sbatch() -> dict[str, str]:
    """The options of the batch script, by name."""
    text = (CLUSTER / "slurm.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.M))


def test_slurms_options_are_at_the_top() -> None:
    """Slurm ignores options after the first line that is not a comment."""
    lines = (CLUSTER / "slurm.sbatch").read_text().splitlines()
    assert all(line.startswith("#SBATCH") for line in lines[1 : 1 + len(sbatch())])


def test_slurm_starts_a_process_a_node_for_the_layouts_devices(tmp_path: Path) -> None:
    done, (call,) = run_script("slurm.sbatch", "--train.steps", "7", folder=tmp_path)
    assert (done.returncode, call[0]) == (0, "srun")
    config, options = config_of(training_options(call)), sbatch()
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    assert config.layout.num_devices == nodes * int(options["gpus-per-node"])
    assert config.train.steps == 7
    environ = {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": "node[01-04]",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "0",
    }
    world = find(config.processes, environ)
    assert (world.count, world.id, world.local) == (nodes, 3, None)
    assert str(world.coordinator).startswith("node01:")


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [
        *((ended, 0, False) for ended in (0, 1, 2, 130)),
        *((saved, 99, True) for saved in (129, 138, 140, 143)),
        *((saved, 100, False) for saved in (138, 143)),
        *((died, 19, True) for died in (3, 134, 137, 139)),
        *((died, 20, False) for died in (3, 137)),
    ],
)
def test_slurm_starts_a_run_again_that_is_not_done(tmp_path, code, restarts, again) -> None:
    lock = tmp_path / "shared" / "lock.json"
    lock.parent.mkdir()
    lock.touch()
    done, calls = run_script(
        "slurm.sbatch",
        folder=tmp_path,
        code=code,
        RUN_DIR="shared",
        SLURM_JOB_ID="41",
        SLURM_RESTART_COUNT=str(restarts),
    )
    assert done.returncode == code
    assert calls[1:] == [["scontrol", "requeue", "41"]] * again
    assert config_of(training_options(calls[0])).train.run_dir == "shared"
    assert lock.exists() == (restarts == 0)


def test_slurms_processes_get_their_cpus_and_the_environment(tmp_path: Path) -> None:
    done, _ = run_script("slurm.sbatch", folder=tmp_path, SLURM_CPUS_PER_TASK="64")
    assert done.stdout.startswith("CPUs 64 active\nsrun\n")
    options = sbatch()
    assert (options["mem"], options["output"], options["open-mode"]) == ("0", "%x-%j.out", "append")


def test_slurm_signals_the_processes_which_answer_by_saving() -> None:
    name, _, seconds = sbatch()["signal"].partition("@")
    assert getattr(signal, f"SIG{name}") in SIGNALS  # without `B:`
    assert 128 + getattr(signal, f"SIG{name}") == 138  # the exit code for which the script requeues
    assert int(seconds) >= 90


@pytest.mark.parametrize(
    ("line", "before"),
    [
        ("#train=(apptainer ", ["apptainer", "exec", "--nv"]),
        ("#containers=(", ["--container-image=HOST#jaxptd"]),
    ],
)
def test_slurms_containers_run_the_same_command(tmp_path: Path, line, before) -> None:
    text = (CLUSTER / "slurm.sbatch").read_text()
    assert text.count(line) == 1
    text = text.replace(line, line[1:])
    done, (call,) = run_script("slurm.sbatch", "--train.steps=7", folder=tmp_path, text=text)
    assert done.stderr == ""
    assert call[2 : 2 + len(before)] == before
    assert config_of(training_options(call)).train.steps == 7


def test_what_nccl_may_need_is_exported_by_a_line_that_is_uncommented(tmp_path: Path) -> None:
    text = re.sub(r"^#(?=export NCCL)", "", (CLUSTER / "slurm.sbatch").read_text(), flags=re.M)
    fakes = "env | grep ^NCCL_ | sort | tr '\\n' ' ' >&2\n"
    text = text.replace("\nsrun ", f"\n{fakes}srun ")
    done, _ = run_script("slurm.sbatch", folder=tmp_path, text=text)
    names = [word.partition("=")[0] for word in done.stderr.split()]
    assert names == [
        *("NCCL_DEBUG", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA"),
        *("NCCL_NET_GDR_LEVEL", "NCCL_SOCKET_IFNAME"),
    ]


@pytest.mark.parametrize(
    "scancel",
    [
        pytest.param("sleep 0.2; touch down", id="srun ends after scancel"),
        pytest.param("touch down; while kill -0 $(cat up); do :; done", id="srun ends before it"),
    ],
)
def test_a_batch_script_that_gets_the_signal_itself_passes_it_on(tmp_path: Path, scancel) -> None:
    """The page's loop: srun runs until the signal arrives, and the script exits with its code."""
    page = (ROOT / "docs" / "howto" / "slurm.md").read_text()
    (loop,) = re.findall(r"```bash\n(trap [^`]*?srun .*?)```", page, flags=re.S)
    program = "echo $$ > new; mv new up; until [ -e down ]; do sleep 0.05; done; exit 3"
    write_program(tmp_path / "bin" / "srun", program)
    write_program(tmp_path / "bin" / "scancel", f'echo "$@"; {scancel}')
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}
    options = {"cwd": tmp_path, "env": environ, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(["bash", "-c", loop], **options) as script:
        while not (tmp_path / "up").exists():
            assert script.poll() is None
            time.sleep(0.02)
        script.send_signal(signal.SIGUSR1)
        assert script.communicate()[0] == "--signal=USR1 41\n"
    assert script.returncode == 3


# ---- two hosts by hand ------------------------------------------------------------------------


def test_two_hosts_are_two_processes_of_one_run(tmp_path: Path) -> None:
    configs = []
    for number in (0, 1):
        _, (call,) = run_script("two_hosts.sh", "node01", str(number), folder=tmp_path)
        configs.append(config_of(training_options(call)))
        world = find(configs[-1].processes, {})
        assert (world.count, world.id, world.coordinator) == (2, number, "node01:5555")
    assert [config.layout.num_devices for config in configs] == [16, 16]
    assert configs[0].train == configs[1].train


def test_two_hosts_need_their_arguments(tmp_path: Path) -> None:
    done, calls = run_script("two_hosts.sh", "node01", folder=tmp_path)
    assert done.returncode != 0
    assert calls == []
    assert "usage: two_hosts.sh FIRST_HOST 0|1" in done.stderr


# ---- Kubernetes -------------------------------------------------------------------------------


def test_a_jobsets_pods_find_the_first_one() -> None:
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    name, *options = container["args"]
    config = config_of(options)
    assert (name, replicated["replicas"], job["completionMode"]) == ("train", 1, "Indexed")
    assert config.layout.num_devices == job["completions"] * int(
        container["resources"]["limits"]["nvidia.com/gpu"]
    )
    hosts = f"{jobset['metadata']['name']}-{replicated['name']}-0"  # the Job's name
    for index in range(job["parallelism"]):
        environ = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{hosts}-{index}"}
        world = find(config.processes, environ)
        assert (world.count, world.id) == (job["completions"], index)
        # the pods' subdomain is the JobSet's name
        assert world.coordinator == f"{hosts}-0.{jobset['metadata']['name']}:55527"


def test_a_jobset_starts_pods_again_unless_the_input_is_bad() -> None:
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [BUG, BAD_INPUT]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy asks for
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    (memory,) = [volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume]
    assert (mounts["shared-memory"], memory["medium"]) == ("/dev/shm", "Memory")
    run_dir = config_of(pod["containers"][0]["args"][1:]).train.run_dir
    assert run_dir.startswith(mounts["runs"] + "/")


def test_a_jobsets_comments_are_lines_that_can_be_uncommented() -> None:
    text = (CLUSTER / "jobset.yaml").read_text()
    uncommented = re.sub(r"# (?=env:|  - \{name: NCCL|rdma/|securityContext:)", "", text)
    pod = yaml.safe_load(uncommented)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert [each["name"] for each in container["env"]] == [
        *("NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 8}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def patched(document: Any, patches: list[dict[str, Any]]) -> Any:
    """Applies the operation `add` of RFC 6902."""
    for patch in patches:
        assert patch["op"] == "add"
        *way, last = patch["path"].strip("/").split("/")
        there = document
        for key in way:
            there = there[int(key) if isinstance(there, list) else key]
        if isinstance(there, list):
            assert last == "-"
            there.append(patch["value"])
        else:
            assert last not in there, f"{patch['path']} would be replaced"
            there[last] = patch["value"]
    return document


def test_gke_adds_its_network_to_the_jobset(tmp_path: Path) -> None:
    custom = yaml.safe_load((CLUSTER / "kustomization.yaml").read_text())
    assert custom["resources"] == ["jobset.yaml"]
    (patch,) = custom["patches"]
    plain = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    assert patch["target"] == {"kind": plain["kind"], "name": plain["metadata"]["name"]}
    jobset = patched(plain, yaml.safe_load(patch["patch"]))
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    networks = json.loads(template["metadata"]["annotations"]["networking.gke.io/interfaces"])
    rails = [each["network"] for each in networks if each["network"].startswith("rdma-")]
    (container,) = template["spec"]["containers"]
    assert rails == [f"rdma-{i}" for i in range(container["resources"]["limits"]["nvidia.com/gpu"])]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    # The command, with gIB's script and the program from here.
    shell, flag, script, name = container["command"]
    write_program(tmp_path / "jaxptd", 'echo "$NCCL_NET" "$@"')
    (tmp_path / "set.sh").write_text("export NCCL_NET=gIB\n")
    script = script.replace("/usr/local/gib/scripts/set_nccl_env.sh", str(tmp_path / "set.sh"))
    command = [shell, flag, script, name, *container["args"]]
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["gIB", *container["args"]]


# ---- SkyPilot ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
def test_skypilots_machines_find_the_first_one(tmp_path: Path, rank: int) -> None:
    task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    (bucket,) = task["file_mounts"]
    write_program(tmp_path / "jaxptd", 'printf "%s\\n" "$@"')
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.2\n10.0.0.3\n10.0.0.4",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(rank),
    }
    command = ["bash", "-c", task["run"]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    name, *options = done.stdout.split("\n")[:-1]
    config = config_of(options)
    world = find(config.processes, environ)
    assert (name, world.count, world.id, world.coordinator) == ("train", 4, rank, "10.0.0.7:55527")
    assert config.layout.num_devices == world.count * int(
        task["resources"]["accelerators"].partition(":")[2]
    )
    assert all(x.startswith(f"{bucket}/") for x in (config.train.run_dir, config.data.source))


# ---- Ray --------------------------------------------------------------------------------------


@pytest.fixture
def ray_train(monkeypatch):
    """`ray_train.py`, with a Ray that runs tasks here at once, and a Python that only records."""

    class DeadNodeError(Exception):
        pass

    class Task:
        def __init__(self, function):
            self.function = function

        def options(self, **chosen):
            asked.append((self.function.__name__, chosen))
            return self

        def remote(self, *given):
            return self.function(*given)

    def get(found):
        if found is DeadNodeError:
            raise DeadNodeError
        return found

    asked: list[tuple[str, dict]] = []
    ray = types.ModuleType("ray")
    ray.exceptions = types.SimpleNamespace(RayError=DeadNodeError)
    ray.remote = lambda **chosen: Task
    ray.get, ray.init = get, lambda: None
    util, groups = types.ModuleType("ray.util"), types.ModuleType("ray.util.placement_group")
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    util.get_node_ip_address = lambda: "10.0.0.7"
    groups.placement_group = lambda bundles, strategy: types.SimpleNamespace(
        bundles=bundles, strategy=strategy, ready=lambda: None
    )
    strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: (
        group,
        placement_group_bundle_index,
    )
    for module in (ray, util, groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    space = runpy.run_path(str(CLUSTER / "ray_train.py"))
    calls, codes = [], []

    def run(command):
        calls.append(command)
        code = codes.pop(0) if codes else 0
        return types.SimpleNamespace(returncode=code)

    monkeypatch.setattr(space["subprocess"], "run", run)

    def start(*argv: str, ended: Sequence[int] = ()) -> int:
        codes[:] = ended
        monkeypatch.setattr(sys, "argv", ["ray_train.py", *argv])
        return space["main"]()

    return start, calls, asked


OPTIONS = ("--config", "gpt2-1.5b", "--layout.dp", "2", "--layout.tp", "8")


def test_ray_starts_a_process_on_every_node(ray_train) -> None:
    start, calls, asked = ray_train
    assert start("--nodes", "2", "--gpus", "8", "--", *OPTIONS) == 0
    for rank, command in enumerate(calls):
        config = config_of(training_options(command))
        world = find(config.processes, {})
        assert (world.count, world.id, world.coordinator) == (2, rank, "10.0.0.7:55527")
        assert config.layout.num_devices == 16
    places = [chosen["scheduling_strategy"] for name, chosen in asked if name == "train"]
    assert [index for _, index in places] == [0, 1]
    assert places[0][0].strategy == "STRICT_SPREAD"
    assert [each["GPU"] for each in places[0][0].bundles] == [8, 8]
    assert [chosen["num_gpus"] for name, chosen in asked if name == "train"] == [8, 8]


@pytest.mark.parametrize(
    ("ended", "code", "attempts"),
    [
        ([3, 137, 0, 0], 0, 2),  # one was killed, the other has seen it
        ([2, 2], BAD_INPUT, 1),
        ([0, BUG], BUG, 1),
        ([3, 3] * 3, 3, 3),
    ],
)
def test_ray_starts_them_again_when_one_dies(ray_train, ended, code, attempts) -> None:
    start, calls, _ = ray_train
    arguments = ("--nodes", "2", "--gpus", "8", "--restarts", "2", "--", *OPTIONS)
    assert start(*arguments, ended=ended) == code
    assert len(calls) == 2 * attempts


# ---- Docker -----------------------------------------------------------------------------------


def test_the_image_is_cuda_13_and_its_user_is_not_root() -> None:
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.M) == [
        "nvidia/cuda:13.0.1-base-ubuntu24.04"
    ]
    (user,) = re.findall(r"^USER (\S+)", DOCKERFILE, flags=re.M)
    assert f"--uid {user}" in DOCKERFILE
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == int(user)  # a number, so that it can be checked
    assert ast.literal_eval(DOCKERFILE.partition("ENTRYPOINT ")[2].splitlines()[0]) == ["jaxptd"]


def test_the_image_has_what_nccl_opens_for_rdma() -> None:
    (packages,) = re.findall(r"apt-get install -y --no-install-recommends (.*?)&&", DOCKERFILE)
    assert {"libibverbs1", "ibverbs-providers", "rdma-core"} <= set(packages.split())


def test_the_image_has_all_that_the_package_is_built_from(tmp_path: Path) -> None:
    home = "/home/jaxptd/source"
    for copied in re.findall(rf"^COPY --chown=\d+ (.*) {home}", DOCKERFILE, flags=re.M):
        for source in map(Path, copied.split()):
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / source)
            else:
                shutil.copy(ROOT / source, tmp_path)
    (wheel,) = WheelBuilder(str(tmp_path)).build(directory=str(tmp_path / "dist"))
    with zipfile.ZipFile(wheel) as found:
        names = set(found.namelist())
        (metadata,) = [name for name in names if name.endswith("/METADATA")]
        extras = set(re.findall(r"^Provides-Extra: (\S+)", found.read(metadata).decode(), re.M))
    assert {"jaxptd/train.py", "jaxptd/configs/quickstart.yaml"} <= names
    (asked,) = re.findall(rf"{home}\[([\w,]+)\]", DOCKERFILE)
    assert set(asked.split(",")) <= extras


def test_the_command_of_the_image_is_accepted() -> None:
    comment = "".join(re.findall(r"^#  +(.*\n)", (CLUSTER / "Dockerfile").read_text(), flags=re.M))
    (options,) = re.findall(r"jaxptd train (.*)", comment.replace("\\\n", " "))
    assert config_of(shlex.split(options)).train.platform == "auto"
