"""The recipes of `examples/cluster/`: their scripts run, with a scheduler and a Python that record.

Each command line is read by the command's own parser, and the processes that it starts are found
from the variables that its launcher sets.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml
from hatchling.builders.wheel import WheelBuilder

from jaxptd.config import Config
from jaxptd.config.run_options import read_run
from jaxptd.distributed.launchers import find
from jaxptd.train import parser

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
DOCKERFILE = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ")
SCRIPTS = ("slurm.sbatch", "two_hosts.sh")


def config_of(options: list[str]) -> Config:
    return read_run(parser(), options, new=True)[0]


def run_script(name: str, *options: str, folder: Path, code: int = 0, **variables: str):
    """Runs a script; srun, scontrol and python write their arguments, and end with this code."""
    for program in ("srun", "scontrol", "python"):
        fake = folder / "bin" / program
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f'#!/bin/sh\nprintf "%s\\n" {program} "$@" end\nexit {code}\n')
        fake.chmod(0o755)
    environ = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **variables}
    command = ["bash", str(CLUSTER / name), *options]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    calls = [call.split("\n") for call in done.stdout.split("\nend\n") if call]
    return done, calls


def training_options(call: list[str]) -> list[str]:
    return call[call.index("jaxptd.train") + 1 :]


def test_every_recipe_is_checked_here() -> None:
    assert {path.name for path in CLUSTER.iterdir()} == {*SCRIPTS, "Dockerfile", "jobset.yaml"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash(name: str) -> None:
    assert subprocess.run(["bash", "-n", str(CLUSTER / name)]).returncode == 0


# ---- Slurm ------------------------------------------------------------------------------------


def sbatch() -> dict[str, str]:
    """The options of the batch script, by name."""
    text = (CLUSTER / "slurm.sbatch").read_text()
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.M))


def test_slurms_options_are_at_the_top() -> None:
    """Slurm reads none after the first command or the first line that is no comment."""
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
    [(0, 0, False), (2, 0, False), (143, 0, True), (143, 99, True), (3, 0, True), (3, 20, False)],
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
    assert rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never"  # which podFailurePolicy asks for
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    run_dir = config_of(pod["containers"][0]["args"][1:]).train.run_dir
    assert run_dir.startswith(mounts["runs"] + "/")


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
