"""Training in two real processes of four simulated devices each, over loopback."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import STEPS, numbers, options
from together import ROOT, Together, trainer

from jaxptd.run.folder import RunDir

# Each process prints what it would save: checkpoints have separate tests.
SAVED = """
def save(self, step, state, *, description):
    with Path(f"{FOLDER}/saved.{RANK}").open("a") as file:
        file.write(f"{step}\\n")
Checkpoints.save = Checkpoints.save_async = save
"""
# And which rows of the data it reads.
ROWS = """
from jaxptd.data import Windows
rows = Windows.rows
def noted(self, samples):
    with Path(f"{FOLDER}/rows.{RANK}").open("a") as file:
        file.write(f"{[int(s) for s in samples]}\\n")
    return rows(self, samples)
Windows.rows = noted
"""
SIGNAL = """
log = Training._row
def hurt(self, step, meter, *, last):
    if (RANK, step) == ({rank}, {step}):
        signal.raise_signal(signal.{name})
    return log(self, step, meter, last=last)
Training._row = hurt
"""


@pytest.fixture
def start(tmp_path):
    """Starts two trainers with patches and options."""
    started = []

    def begin(*overrides: str, patches: str = "", count: int = 2) -> Together:
        code = trainer(f"FOLDER = {str(tmp_path)!r}\n{SAVED}\n{patches}")
        started.append(Together(code, options(tmp_path, *overrides), tmp_path, count=count))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


def saved(folder: Path, rank: int) -> list[int]:
    return [int(line) for line in (folder / f"saved.{rank}").read_text().split()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Rows of one process with eight devices."""
    folder = tmp_path_factory.mktemp("whole")
    command = [sys.executable, "-m", "jaxptd.train", *options(folder, "--layout.dp=2")]
    subprocess.run([*command, "--layout.tp=4"], cwd=ROOT, check=True, capture_output=True)
    return numbers(RunDir(folder / "run").metrics())


DP2_TP4 = ("--layout.dp=2", "--layout.tp=4")
CROSSING = [
    ("--layout.tp=4", "--layout.cp=2", "--layout.sequence_parallel=true"),
    ("--layout.cp=8",),
    ("--layout.row=2", "--layout.col=4"),
    ("--layout.pp=2", "--layout.dp=2", "--layout.tp=2"),
    ("--layout.pp=2", "--layout.tp=4", "--layout.schedule=zb-h1"),
]


def trains_as_one_process(start, whole, tmp_path, layout, patches=""):
    ended = start(*layout, "--train.sample_tokens=5", patches=patches).ended()
    assert [each.code for each in ended] == [0, 0], ended
    assert [each.err for each in ended] == ["", ""]
    rows = numbers(RunDir(tmp_path / "run").metrics())
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, expected in zip(rows, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert [saved(tmp_path, rank) for rank in (0, 1)] == [[5, 10, 12]] * 2
    return ended


@pytest.mark.slow
def test_two_processes_train_as_one_and_only_the_first_writes(start, whole, tmp_path):
    ended = trains_as_one_process(start, whole, tmp_path, DP2_TP4, ROWS)
    assert "8 simulated CPU devices of 2 processes, layout dp=2 tp=4" in ended[0].out
    assert f"step 10/{STEPS}  loss" in ended[0].out
    assert "-" * 72 in ended[0].out
    assert ended[1].lines == []
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert "coordinator: null" in written  # where a run ran does not matter
    for rank in (0, 1):  # each reads its four of every batch's eight rows, for both fields
        found = [json.loads(line) for line in (tmp_path / f"rows.{rank}").read_text().splitlines()]
        assert len(found) >= 2 * STEPS
        half = set(range(4 * rank, 4 * rank + 4))
        assert {sample % 8 for samples in found for sample in samples} == half


@pytest.mark.slow
def test_two_processes_pack_whole_records_as_one(start, tmp_path):
    """Each packs for itself; nothing is exchanged."""
    lines = [json.dumps({"text": "ab" * (1 + n % 8)}) for n in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    whole = (f"--data.source={tmp_path / 'a.jsonl'}", "--data.documents=whole", *DP2_TP4)
    one = [*options(tmp_path, *whole), f"--train.run_dir={tmp_path / 'one'}"]
    subprocess.run(
        [sys.executable, "-m", "jaxptd.train", *one], cwd=ROOT, check=True, capture_output=True
    )
    trains_as_one_process(start, numbers(RunDir(tmp_path / "one").metrics()), tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("layout", CROSSING, ids=" ".join)
def test_whatever_axis_crosses_the_processes(start, whole, tmp_path, layout):
    trains_as_one_process(start, whole, tmp_path, layout)


PLACED = """
os.environ["SLURM_TOPOLOGY_ADDR"] = f"switch{1 - RANK}.node{RANK}"
from jaxptd import mesh
make = mesh.make_mesh
import jaxptd.train
def noted(layout):
    made = make(layout)
    Path(f"{FOLDER}/order.{RANK}").write_text(
        str([device.process_index for device in made.devices.flat])
    )
    return made
jaxptd.train.make_mesh = noted
"""


@pytest.mark.slow
def test_the_order_of_processes_follows_the_network_and_changes_no_number(start, whole, tmp_path):
    ended = trains_as_one_process(start, whole, tmp_path, DP2_TP4, PLACED)
    assert (tmp_path / "order.0").read_text() == str([1] * 4 + [0] * 4)
    assert "NVLink" not in ended[0].out  # no domain is known of simulated devices


# ---- signals, deaths, errors ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "step", "name"), [(0, 7, "SIGTERM"), (1, 7, "SIGUSR1"), (1, 4, "SIGINT")]
)
def test_a_signal_to_any_process_stops_all_after_the_same_step(start, tmp_path, rank, step, name):
    run = start(*DP2_TP4, patches=SIGNAL.format(rank=rank, step=step, name=name))
    ended = run.ended()
    code = 128 + getattr(signal, name)
    assert [(each.code, each.err) for each in ended] == [(code, "")] * 2
    stopped = saved(tmp_path, 0)[-1]
    assert stopped == step + 3  # it arrives after that step's check: one more step, then 2
    assert saved(tmp_path, 0) == saved(tmp_path, 1)
    assert f"stopped at step {stopped}: saved; repeat the command to continue" in ended[0].out
    assert [row["step"] for row in numbers(RunDir(tmp_path / "run").metrics())] == list(
        range(1, stopped + 1)
    )


@pytest.mark.slow
def test_a_signal_just_before_the_end_stops_no_step_but_ends_without_a_sample(start, tmp_path):
    patches = SIGNAL.format(rank=1, step=STEPS - 1, name="SIGTERM")
    ended = start(*DP2_TP4, "--train.sample_tokens=5", patches=patches).ended()
    assert [(each.code, each.err) for each in ended] == [(143, "")] * 2
    assert saved(tmp_path, 0) == saved(tmp_path, 1) == [5, 10, 12]
    assert "stopped" not in ended[0].out
    assert "-" * 72 not in ended[0].out


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(1, "SIGKILL"), (1, "SIGSTOP"), (0, "SIGSTOP")])
def test_a_dead_or_stopped_process_ends_the_training_of_all(start, tmp_path, rank, number):
    run = start(*DP2_TP4, "--train.steps=100000", "--processes.stuck_after=5")
    run.wait_for("step 20/")
    run.signal(rank, getattr(signal, number))
    other = run.ended(without=rank)[1 - rank]
    line = other.err.splitlines()[-1]
    assert other.code == 3, other
    assert line.startswith(f"error: process {rank} of 2 has been silent for 5 s, last heard ")
    assert " at step " in line
    if rank == 1:  # process 0 ended cleanly
        assert not (tmp_path / "run" / "lock.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("--layout.tp=4", "--train.run_dir={folder}/text.txt"), "text.txt is a file; name a dir"),
        (("--layout.tp=4", "--train.run_dir={folder}/run{rank}"), "train.run_dir is "),
        (("--layout.dp=3", "--train.global_batch_size=6"), "3 devices do not split over processes"),
    ],
)
def test_what_is_wrong_ends_all_with_one_line(start, tmp_path, overrides, line):
    given = [each.format(folder=tmp_path, rank="RANK") for each in overrides]
    own = "sys.argv = [each.replace('RANK', str(RANK)) for each in sys.argv]"
    ended = start(*given, patches=own).ended()
    assert [each.code for each in ended] == [2, 2], ended
    for each in ended:
        assert line in each.err
        assert each.err.count("\n") == 1, each.err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_who_waits_in_vain_for_the_others_says_so(start):
    run = start("--processes.wait=5", *DP2_TP4)
    run.processes[1].kill()
    first = run.ended()[0]
    assert first.code == 2, first
    line = first.err.splitlines()[-1]  # JAX's is longer
    assert line.startswith("error: process 0 of 2 could not join the others at 127.0.0.1:")
    assert line.endswith("in processes.wait=5 s; start all processes with the same coordinator")
