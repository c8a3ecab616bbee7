"""Runs whose processes die and start again, under the supervisor, from states in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import STEPS, numbers, options
from together import PATIENCE, ROOT, trainer
from turns import slow

from jaxptd.distributed.launchers import PORTS
from jaxptd.distributed.supervisor import free_port
from jaxptd.run.folder import RunDir

SUPERVISED = """
import sys
from jaxptd.distributed.supervisor import Supervisor
code, count, restarts, *argv = sys.argv[1:]
def say(line):
    print(f"launch: {line}", file=sys.stderr, flush=True)
number = -1
def command(attempt):
    return [sys.executable, "-c", f"ATTEMPT = {attempt}\\n{code}", *argv]
def counted():
    global number
    number += 1
    return eval(count)
sys.exit(Supervisor(command, count=counted, restarts=int(restarts), say=say).run())
"""
# Each process is on a host of its own. In each attempt that `deaths` names one of them dies in a
# step, once a state of the step `kept` is complete; the disk of its host is gone with it.
DIES = """
import shutil
from jaxptd.checkpoint import memory

sys.argv = [each.replace("HOST", f"{{FOLDER}}/host{{RANK}}") for each in sys.argv]
os.makedirs(f"{{FOLDER}}/host{{RANK}}", exist_ok=True)
after_step = Training._after_step

def files(rank):
    return [name for _, _, names in os.walk(f"{{FOLDER}}/host{{rank}}") for name in names]

def dies(self, step, meter, *, last):
    if (RANK, step) == ({deaths}.get(ATTEMPT), {step}):
        while sum(name.startswith(f"{kept:08d}.") for name in {files}) < {count}:
            time.sleep(0.01)
        shutil.rmtree(f"{{FOLDER}}/host{{RANK}}")
        os.kill(os.getpid(), 9)
    return after_step(self, step, meter, last=last)

Training._after_step = dies
"""


def patches_that_kill(
    *deaths: int, step: int = 9, files: str = "files(0) + files(1)", count: int = 4
) -> str:
    """Patches that kill a process in a step, once so many files of step 8 are there.

    deaths: the process that is killed in each attempt, one after the other.
    """
    by_attempt = dict(enumerate(deaths))
    return DIES.format(deaths=by_attempt, step=step, kept=8, files=files, count=count)


def run(folder: Path, patches: str, *overrides: str, count: str = "2", restarts: int = 1):
    """Runs the supervisor to its end."""
    code = trainer(f"FOLDER = {str(folder)!r}\n{patches}")
    words = [code, count, str(restarts), *options(folder), *overrides]
    return subprocess.run(
        [sys.executable, "-c", SUPERVISED, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def check_curve(folder: Path, whole: list[dict]) -> None:
    rows = numbers(RunDir(folder / "run").metrics())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, expected in zip(rows, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


MEMORY = ("--checkpoint.memory_every=2", "--checkpoint.memory_dir=HOST")


@pytest.mark.parametrize("deaths", [[1], slow([1, 0]), slow([0, 1, 1, 0])])
def test_a_host_is_lost_and_the_run_goes_on_from_its_partners_copy(tmp_path, whole, deaths):
    """The next one is lost before the run has made a step, so the copies were made again."""
    patches = patches_that_kill(*deaths)
    ended = run(tmp_path, patches, "--layout.tp=2", *MEMORY, restarts=len(deaths))
    assert ended.returncode == 0, ended.stderr
    assert [line for line in ended.stderr.splitlines() if "launch: " in line] == [
        f"launch: process {rank} of 2 was killed by SIGKILL; restart {number} of {len(deaths)}"
        for number, rank in enumerate(deaths, 1)
    ]
    assert ended.stdout.count(f"resuming at step 8 from {tmp_path}/host0/jaxptd-") == len(deaths)
    check_curve(tmp_path, whole)
    # The store has the last state, so memory has none.
    assert [os.listdir(tmp_path / f"host{rank}") for rank in (0, 1)] == [[], []]


@pytest.mark.slow
def test_all_processes_end_early_at_the_step_of_a_run_that_was_not_killed(tmp_path):
    """The second evaluation, after the kill, is compared with the first, before it."""
    early = ("--train.patience=1", "--train.min_improvement=10", "--train.eval_every=5")
    ended = run(tmp_path, patches_that_kill(1), "--layout.tp=2", *MEMORY, *early)
    assert ended.returncode == 0, ended.stderr
    assert "resuming at step 8 from" in ended.stdout
    assert "ended at step 10: validation_loss has not improved by more than 10 on" in ended.stdout
    steps = [row["step"] for row in RunDir(tmp_path / "run").metrics()]
    assert steps == list(range(1, 11))


SIZES = """
after_step = Training._after_step

def dies(self, step, meter, *, last):
    if ATTEMPT < 2 and step == 4 * (ATTEMPT + 1) + 1 and RANK == 0:
        folder = self.run.checkpoints.memory.folder
        while sum(f"{step - 1:08d}." in each for each in os.listdir(folder)) < jax.process_count():
            time.sleep(0.01)
        os.kill(os.getpid(), 9)
    return after_step(self, step, meter, last=last)

Training._after_step = dies
"""


@pytest.mark.slow
def test_on_fewer_processes_and_more_again_the_curve_is_the_same(tmp_path, whole):
    elastic = ("--layout.dp=2", "--processes.elastic=[1,2]", "--train.micro_batches=2")
    memory = ("--checkpoint.memory_every=4", f"--checkpoint.memory_dir={tmp_path}")
    ended = run(tmp_path, SIZES, *elastic, *memory, count="2 - (number == 1)", restarts=2)
    assert ended.returncode == 0, ended.stderr
    resumed = [line for line in ended.stdout.splitlines() if line.startswith("resuming")]
    assert [line.split()[3] for line in resumed] == ["4", "8"]
    layouts = [line for line in ended.stdout.splitlines() if "simulated CPU device" in line]
    assert ["dp=2" in line for line in layouts] == [True, False, True]
    check_curve(tmp_path, whole)
    assert "dp: 2" in (tmp_path / "run" / "config.yaml").read_text()  # as it was given
    assert "micro_batches: 2" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_the_command_trains_as_one_process(tmp_path, whole):
    command = [sys.executable, "-m", "jaxptd", "launch", "-n", "2", "--"]
    command += ["train", *options(tmp_path), "--layout.dp=2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "2 simulated CPU devices of 2 processes, layout dp=2" in ended.stdout
    check_curve(tmp_path, whole)


LAYOUTS = [
    ("--layout.dp=2", "--layout.zero=3"),
    ("--layout.pp=2", "--layout.dp=2"),
    ("--layout.tp=4", "--layout.sequence_parallel=true"),
    ("--layout.cp=2", "--layout.zero=1"),
    ("--layout.row=2", "--layout.col=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_on_every_kind_of_layout(tmp_path, whole, layout):
    patches = patches_that_kill(1)
    ended = run(tmp_path, patches, *layout, *MEMORY)
    assert ended.returncode == 0, ended.stderr
    assert "resuming at step 8 from " in ended.stdout
    check_curve(tmp_path, whole)


@pytest.mark.slow
def test_with_a_newer_checkpoint_memory_is_not_read(tmp_path, whole):
    patches = patches_that_kill(1, step=11)
    ended = run(
        tmp_path,
        patches,
        "--layout.tp=2",
        *("--checkpoint.memory_every=4", "--checkpoint.memory_dir=HOST"),
        "--checkpoint.asynchronous=false",
    )
    assert ended.returncode == 0, ended.stderr
    assert f"resuming at step 10 from {tmp_path}/run/checkpoints" in ended.stdout
    check_curve(tmp_path, whole)


# ---- stand-ins for launchers that restart a run --------------------------------------------------


def slurm(attempt: int, rank: int, count: int, port: int) -> dict[str, str]:
    """The variables of a task of a job that Slurm has queued again."""
    return {
        "SLURM_JOB_ID": str(port - PORTS.start),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_RESTART_COUNT": str(attempt),
    }


def torchrun(attempt: int, rank: int, count: int, port: int) -> dict[str, str]:
    """The variables of a worker of torchrun, `--max-restarts 3 --nnodes 1:2`."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port - 1),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }


def jobset(attempt: int, rank: int, count: int, port: int) -> dict[str, str]:
    """The variables of a pod of a JobSet; its command line has the rest."""
    return {"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"pretrain-hosts-0-{rank}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "counts"), [(slurm, (2, 1)), (torchrun, (2, 1)), (jobset, (2, 2))]
)
def test_under_a_launcher_that_starts_a_run_again(tmp_path, whole, launcher, counts):
    """One process is killed, the other ends by itself; the same command goes on."""
    fields = ["--layout.dp=2", "--processes.elastic=[1,2]", "--processes.stuck_after=5"]
    fields += ["--checkpoint.memory_every=4", f"--checkpoint.memory_dir={tmp_path}"]
    for attempt, count in enumerate(counts):
        port = free_port()
        dies = patches_that_kill(1, files="os.listdir(self.run.checkpoints.memory.folder)", count=2)
        patches = f"ATTEMPT = {attempt}\n{dies}"
        code = trainer(f"FOLDER = {str(tmp_path)!r}\n{patches}")
        code = code.replace('os.environ["RANK"]', 'os.environ["NUMBER"]')
        flags = [f"--processes.count={count}", f"--processes.coordinator=127.0.0.1:{port}"]
        flags = [*fields, *(flags if launcher is jobset else [])]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, *options(tmp_path), *flags],
                env={
                    **os.environ,
                    **launcher(attempt, rank, count, port),
                    "PYTHONPATH": str(ROOT),
                    "NUMBER": str(rank),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        said = [each.communicate(timeout=PATIENCE) for each in processes]
        codes = [each.returncode for each in processes]
        assert codes == ([3, -9] if attempt == 0 else [0] * count), said
    assert "resuming at step 8 from " in said[0][0]
    check_curve(tmp_path, whole)
