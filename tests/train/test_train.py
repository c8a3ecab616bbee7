"""Training as a person sees it: what a run writes, how it stops and goes on, how it refuses."""

import collections
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import jaxptd.train
from jaxptd.checkpoint import Checkpoints
from jaxptd.config.command_line import load_config
from jaxptd.data import ShuffledWindows, Windows, number_documents
from jaxptd.data.token_files import write_bin
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.errors import run_command
from jaxptd.mesh import SCHEDULES, make_mesh
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir
from jaxptd.step import Program
from jaxptd.train import Run, Stop, main

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "test-tiny.yaml"
TEXT = "".join(f"def function_{n}(a, b): return a + b * {n}\n" for n in range(400))
STEPS, EVERY = 12, 5  # of the runs below: checkpoints at 5, 10 and 12

FIELDS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "skipped",
    "tokens",
    "tokens_per_second",
    "step_time",
    "mfu",
]
EVALUATION = ["validation_loss", "perplexity"]
TIMES = ("tokens_per_second", "step_time", "mfu")


# ---- every layout trains the same -----------------------------------------------------------


def batches(count: int) -> np.ndarray:
    """Rows of text, int32[count, 8, 17]."""
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(ids) - 17, (count, 8, 1))
    return ids[starts + np.arange(17)]


@functools.cache
def curve(*overrides: str) -> np.ndarray:
    """Loss and gradient norm of 30 steps, with dropout and two micro-batches: [30, 2]."""
    config = load_config(CONFIG, ["--model.vocab_size=257", *overrides])
    program = Program(config, make_mesh(config.layout))
    state, rows = program.init_state(), []
    for batch in batches(30):
        fields = {"tokens": batch[:, :-1], "targets": batch[:, 1:]}
        if config.data.documents == "apart":  # every line is one
            fields["segments"] = number_documents(batch[:, :-1], ord("\n"))
        state, metrics = program.train_step(state, program.place(fields))
        rows.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(rows)


KINDS = ("zigzag", "blockwise", "rsa")
SEQUENCE = "--layout.sequence_parallel=true"
DP4 = ("--layout.dp=4",)
TP2 = ("--layout.tp=2",)
TP4 = ("--layout.tp=4",)
DP2_TP2 = ("--layout.dp=2", *TP2)
DP2_TP4 = ("--layout.dp=2", *TP4)
LAYOUTS = [DP4, TP2, TP4, DP2_TP2, DP2_TP4]
LAYOUTS += [(*layout, SEQUENCE) for layout in LAYOUTS[1:]]
LAYOUTS += [(*DP2_TP4, SEQUENCE, "--layout.collective_matmul=true")]
RINGS = [(f"--layout.cp={cp}", f"--layout.ring={ring}") for cp in (2, 8) for ring in KINDS]
CONTEXT = ("--layout.dp=2", "--layout.cp=2", *TP2, SEQUENCE)
RINGS += [(*CONTEXT, f"--layout.ring={ring}") for ring in KINDS]
LAYOUTS += [*RINGS, ("--layout.cp=4", *TP2)]
GRID = ("--layout.row=2", "--layout.col=2")
GRIDS = [(*GRID, f"--layout.matmul2d={kind}") for kind in ("gather", "summa", "fox", "cannon")]
GRIDS += [
    (*GRID, "--layout.dp=2"),
    (*GRID, "--layout.cp=2"),
    (*GRID, "--layout.attention2d=blocks"),
]
GRIDS += [("--layout.row=2", "--layout.col=4", f"--layout.ring={ring}") for ring in KINDS]
GRIDS += [("--layout.row=2", "--layout.col=4", "--layout.matmul2d_slices=2")]
GRIDS += [("--layout.row=2", "--layout.col=4", "--layout.matmul2d=summa")]
LAYOUTS += GRIDS
PP2 = ("--layout.pp=2",)
PIPELINES = [(*PP2, "--layout.dp=2"), (*PP2, *TP2, SEQUENCE), (*PP2, *GRID), (*PP2, *RINGS[0])]
LAYOUTS += PIPELINES
ZEROS = [
    (*layout, f"--layout.zero={stage}")
    for layout in (DP4, (*DP2_TP4, SEQUENCE), (*GRID, "--layout.dp=2"), CONTEXT, PIPELINES[0])
    for stage in (1, 2, 3)
]
LAYOUTS += ZEROS
WAYS = [(f"--model.remat={remat}",) for remat in ("dots", "attention", "full")]
WAYS += [("--model.scan_layers=false",), ("--train.micro_batches=1",), ("--train.micro_batches=4",)]


def name(overrides: tuple[str, ...]) -> str:
    return " ".join(o.rpartition(".")[2] for o in overrides)


@pytest.mark.parametrize(
    "overrides",
    [(*DP2_TP4, SEQUENCE), CONTEXT, GRIDS[4], WAYS[2], PIPELINES[0], ZEROS[-1]],
    ids=name,
)
def test_a_layout_trains_as_one_device_does(overrides):
    expected = curve()
    assert expected[-1, 0] < 0.6 * expected[0, 0]  # it learns
    np.testing.assert_allclose(curve(*overrides), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", LAYOUTS + WAYS, ids=name)
def test_every_layout_trains_as_one_device_does(overrides):
    np.testing.assert_allclose(curve(*overrides), curve(), rtol=1e-5)
    with jax.enable_x64(True):
        double = "--model.dtype=float64"
        np.testing.assert_allclose(curve(double, *overrides), curve(double), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_device_does(schedule, remat, micro_batches):
    model = ("--model.num_layers=5",)
    how = (f"--model.remat={remat}", f"--train.micro_batches={micro_batches}")
    found = curve(*model, *PP2, *TP2, f"--layout.schedule={schedule}", *how)
    np.testing.assert_allclose(found, curve(*model), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [DP2_TP4, *RINGS, GRIDS[5], GRIDS[6]], ids=name)
def test_every_layout_keeps_documents_apart_as_one_device_does(overrides):
    apart = "--data.documents=apart"
    assert np.abs(curve(apart) - curve()).max() > 1e-3
    np.testing.assert_allclose(curve(apart, *overrides), curve(apart), rtol=1e-5)


# ---- the command ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Runs the command on the tiny config, in this process, in a folder of its own."""

    folder: Path
    capture: pytest.CaptureFixture

    @property
    def options(self) -> list[str]:
        """Of a run that writes what it can, but samples no text."""
        source = self.folder / "text.txt"
        if not source.exists():
            source.write_text(TEXT)
        values = {
            "data.source": source,
            "train.run_dir": self.run_dir.path,
            "train.steps": STEPS,
            "train.sample_tokens": 0,
            "checkpoint.every": EVERY,
        }
        return ["--config", str(CONFIG), *(f"--{key}={value}" for key, value in values.items())]

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def steps(self) -> list[int]:
        return Checkpoints(self.run_dir.checkpoints, keep=1).steps()

    def __call__(self, *overrides: str) -> Outcome:
        self.capture.readouterr()
        with pytest.raises(SystemExit) as end:
            run_command(functools.partial(main, [*self.options, *overrides]))
        return Outcome(end.value.code or 0, *self.capture.readouterr())

    def refused(self, *overrides: str) -> str:
        """Runs what must fail; its one line on stderr."""
        outcome = self(*overrides)
        assert outcome.code == 2, outcome
        assert outcome.err.startswith("error: ")
        assert outcome.err.count("\n") == 1, outcome.err
        return outcome.err

    def contents(self) -> dict[str, bytes]:
        """Every file of the run directory."""
        files = (path for path in self.run_dir.path.rglob("*") if path.is_file())
        return {str(path.relative_to(self.run_dir.path)): path.read_bytes() for path in files}


@pytest.fixture(scope="module", autouse=True)
def devices():
    """JAX starts with the devices of all tests, not with those that the first command needs."""
    assert len(jax.devices()) == 8


@pytest.fixture
def train(tmp_path, capfd):
    return Trainer(tmp_path, capfd)


def numbers(rows: list[dict]) -> list[dict]:
    """The rows without what the clock says."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The rows of a run that nothing interrupted."""
    trainer = Trainer(tmp_path_factory.mktemp("whole"), None)
    assert main(trainer.options) == 0
    return numbers(trainer.run_dir.metrics())


# ---- what a run writes ----------------------------------------------------------------------


def test_what_a_run_writes(train):
    outcome = train("--train.sample_tokens=20", "--layout.dp=2", "--layout.tp=2")
    assert (outcome.code, outcome.err) == (0, "")
    lines = (train.run_dir.path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        evaluated = EVALUATION if row["step"] in (10, STEPS) else []
        assert list(row) == FIELDS + evaluated
        assert row["tokens"] == row["step"] * 8 * 16
        assert row["mfu"] is None  # no data sheet for a simulated device
        assert row["tokens_per_second"] == pytest.approx(8 * 16 / row["step_time"])
        if evaluated:
            assert row["perplexity"] == pytest.approx(math.exp(row["validation_loss"]))
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert train.steps == [10, 12]  # checkpoint.keep is 2
    resolved = load_config(train.run_dir.path / "config.yaml")
    asked = load_config(CONFIG, train.options[2:])
    assert resolved.model.vocab_size == 257  # the tokenizer's
    assert dataclasses.replace(resolved.model, vocab_size=None) == asked.model
    assert (resolved.data, resolved.optimizer) == (asked.data, asked.optimizer)
    assert "4 simulated CPU devices, layout dp=2 tp=2" in outcome.out
    assert f"step 10/{STEPS}  loss {rows[9]['loss']:.4f}" in outcome.out
    assert f"validation {rows[-1]['validation_loss']:.4f}" in outcome.out
    rule, sample = outcome.out.rstrip().rpartition("\n")[2], outcome.out.split("-" * 72)[1]
    assert rule == "-" * 72
    assert sample.startswith("\ndef ")
    assert len(sample) > len("\ndef \n")


def test_the_watchdog_knows_what_a_run_is_in(train, monkeypatch):
    """Else a long evaluation, or the end's wait for a save, is taken for a hang."""
    dogs, found = [], collections.defaultdict(list)

    def made(*args):
        dogs.append(Watchdog(*args))
        return dogs[0]

    def note(owner, name):
        plain = getattr(owner, name)

        def noting(*args, **kwargs):
            found[name].append(dogs[0].beat().phase)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    monkeypatch.setattr("jaxptd.train.Watchdog", made)
    for owner, name in (
        (RunCheckpoints, "start"),
        (Windows, "rows"),
        (Run, "evaluate"),
        (Run, "save"),
        (Run, "_log"),
        (Checkpoints, "wait"),
        (Stop, "asked_anywhere"),
        (jaxptd.train, "write_text"),
    ):
        note(owner, name)
    assert main([*train.options, "--train.sample_tokens=2"]) == 0
    assert found["wait"][-2:] == [Phase.SAVING, Phase.STARTING]  # then nothing is left to wait for
    assert {name: {*phases} for name, phases in found.items()} == {
        "start": {Phase.STARTING},
        "rows": {Phase.READING},
        "evaluate": {Phase.EVALUATING},
        "save": {Phase.SAVING},
        "_log": {Phase.LOOP},
        "wait": {Phase.SAVING, Phase.STARTING},
        "asked_anywhere": {Phase.WAITING},
        "write_text": {Phase.SAMPLING},
    }


def test_the_resolved_config_alone_is_the_same_run(train):
    train()
    before = numbers(train.run_dir.metrics())
    config = train.run_dir.path / "config.yaml"
    assert main(["--config", str(config), "--train.steps=14"]) == 0
    assert numbers(train.run_dir.metrics())[:STEPS] == before
    assert yaml.safe_load(config.read_text())["train"]["steps"] == 14
    assert train.steps == [12, 14]


def test_zero_means_never(train):
    outcome = train("--train.log_every=0", "--train.eval_every=0", "--checkpoint.every=0")
    assert (outcome.code, outcome.err) == (0, "")
    assert train.run_dir.metrics() == []
    assert train.steps == []
    assert "loss" not in outcome.out


def test_evaluations_are_logged_even_if_steps_are_not(train):
    train("--train.log_every=0", "--train.eval_every=4", "--checkpoint.every=0")
    rows = train.run_dir.metrics()
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert all(list(row) == FIELDS + EVALUATION for row in rows)


def test_without_a_validation_part_nothing_is_evaluated(train):
    train("--train.log_every=5", "--train.eval_every=4", "--data.validation_fraction=0")
    rows = train.run_dir.metrics()
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert all(list(row) == FIELDS for row in rows)


def test_a_run_saves_once_when_it_ends(train):
    train("--checkpoint.every=1000")
    assert train.steps == [STEPS]


def test_the_seed_decides(train, whole):
    train("--train.steps=3", "--train.seed=1")
    assert [row["loss"] for row in train.run_dir.metrics()] != [row["loss"] for row in whole[:3]]


# ---- killed, and the same command again -----------------------------------------------------


class Killed(BaseException):
    """Ends a run as a kill does, as far as its files can tell."""


def killed(*_, **__):
    raise Killed


def kill_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a moment when no checkpoint is being written: this process lives on, and would write."""
    log, save = RunDir.log, Checkpoints.save_async

    def deadly(self, row):
        log(self, row)
        if row["step"] == step:
            raise Killed

    def at_once(self, *args, **kwargs):
        save(self, *args, **kwargs)
        self.wait()

    monkeypatch.setattr(Checkpoints, "save_async", at_once)

    monkeypatch.setattr(RunDir, "log", deadly)


@pytest.mark.parametrize("step", [3, 9])
def test_a_killed_run_goes_on_to_the_last_digit(train, whole, step, monkeypatch):
    with monkeypatch.context() as patch:
        kill_after(step, patch)
        with pytest.raises(Killed):
            main(train.options)
    assert [row["step"] for row in train.run_dir.metrics()] == list(range(1, step + 1))
    outcome = train()
    assert ("resuming at step 5" in outcome.out) == (step == 9)
    assert numbers(train.run_dir.metrics()) == whole


def test_from_the_best_it_goes_on_and_later_ones_are_moved_once_it_begins(train, monkeypatch):
    losses = iter((1.0, 2.0, 3.0))  # of steps 10 and 12, and of 12 again
    monkeypatch.setattr(Run, "evaluate", lambda *_: dict.fromkeys(EVALUATION, next(losses)))
    main(train.options)
    assert train.steps == [10, 12]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunDir, "open", killed)
        main([*train.options, "--checkpoint.resume=best"])
    assert train.steps == [10, 12]
    main([*train.options, "--checkpoint.resume=best"])
    assert train.steps == [10, 12]
    assert [row["step"] for row in train.run_dir.metrics()] == [*range(1, STEPS + 1)]
    assert train.run_dir.metrics()[-1]["validation_loss"] == 3.0
    assert (train.run_dir.checkpoints / "00000012.aside").is_dir()


def test_onto_another_layout_it_goes_on_to_rounding(train, whole, monkeypatch):
    with monkeypatch.context() as patch:
        kill_after(9, patch)
        with pytest.raises(Killed):
            main([*train.options, "--layout.dp=2"])
    train(*CONTEXT[1:], "--model.remat=full", "--train.micro_batches=4")
    rows = numbers(train.run_dir.metrics())
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    for row, expected in zip(rows, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert load_config(train.run_dir.path / "config.yaml").layout.tp == 2


def goes_on(train, rows, monkeypatch, options):
    """Killed under the first options, stopped under the second, and to the end under the third."""
    with monkeypatch.context() as patch:
        kill_after(7, patch)
        with pytest.raises(Killed):
            main([*train.options, *options[0]])
    with monkeypatch.context() as patch:
        signal_in("log", signal.SIGTERM, step=9, monkeypatch=patch)
        assert "resuming at step 5" in train(*options[1]).out
    assert "resuming at step 10" in train(*options[2]).out
    found = numbers(train.run_dir.metrics())
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row, expected in zip(found, rows, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


DP2 = ("--layout.dp=2",)
PP4 = ("--layout.pp=4", "--train.micro_batches=4")
PARTS = (*PP4, "--layout.schedule=interleaved")


@pytest.mark.slow
def test_onto_another_schedule_it_goes_on_to_rounding(train, whole, monkeypatch):
    parts = (*PARTS, "--layout.stage_layers=[0,0,1,0,0,1,0,0]")  # the second layer comes first
    goes_on(train, whole, monkeypatch, [PP2, parts, DP2])
    finished = train(*parts, "--train.sample_tokens=5")  # written on the pipeline itself
    assert "resuming at step 12" in finished.out
    assert finished.out.split("-" * 72)[1].startswith("\ndef ")
    assert finished.out.split("-" * 72)[1] != "\ndef \n"


FOLDED = (*PP4, "--layout.schedule=zb-v", "--layout.stage_layers=[1,2,0,1,1,1,1,1]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [[PP2, PARTS, DP2], [DP2_TP2, FOLDED, PP2], [PARTS, DP2, FOLDED]],
    ids=["to dp", "to 1f1b", "to zb-v"],
)
def test_more_layers_onto_another_schedule(train, layouts, monkeypatch):
    layers = "--model.num_layers=8"
    other = RunDir(train.folder / "whole")
    assert main([*train.options, layers, f"--train.run_dir={other.path}"]) == 0
    options = [(*layout, layers) for layout in layouts]
    goes_on(train, numbers(other.metrics()), monkeypatch, options)


def test_documents_are_kept_apart_where_the_sequence_is_cut(train):
    lines = (json.dumps({"text": line}) for line in TEXT.splitlines())
    source = train.folder / "text.jsonl"
    source.write_text("\n".join(lines))
    apart, losses = "--data.documents=apart", []
    for choice in ([], [apart], [apart, "--layout.cp=2"]):
        run = train.folder / f"run{len(losses)}"
        options = [f"--data.source={source}", f"--train.run_dir={run}", "--checkpoint.every=0"]
        assert train(*options, *choice).code == 0
        losses.append([row["loss"] for row in RunDir(run).metrics()])
    joined, one, cut = losses
    assert cut == pytest.approx(one, rel=1e-5)
    assert one[-1] != pytest.approx(joined[-1], rel=1e-4)


def test_a_finished_run_has_nothing_left_to_do(train, whole):
    train()
    before = train.contents()
    assert "resuming at step 12" in train().out
    after = train.contents()
    assert {name for name in after if "tensorboard" not in name} == {
        name for name in before if "tensorboard" not in name
    }
    assert after["metrics.jsonl"] == before["metrics.jsonl"]


@pytest.mark.parametrize(
    "override",
    [
        "--model.dropout=0.2",
        "--data.validation_fraction=0.2",
        "--train.seed=3",
        "--optimizer.beta1=0.8",
    ],
)
def test_another_run_is_refused_and_nothing_changes(train, override):
    train("--train.steps=1")
    before = train.contents()
    field = override.removeprefix("--").partition("=")[0]
    assert f"holds another run: {field} is " in train.refused(override)
    assert train.contents() == before


def test_another_run_is_refused_even_if_its_config_is_lost(train):
    train("--train.steps=1")
    (train.run_dir.path / "config.yaml").unlink()
    before = train.contents()
    assert "another run: train.seed is 3, was 0" in train.refused("--train.seed=3")
    assert "checkpoint.resume is never" in train.refused("--checkpoint.resume=never")
    assert train.contents() == before
    assert "resuming at step 1" in train("--train.steps=2").out


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(train, whole):
    train()
    newest = train.run_dir.checkpoints / "00000012"
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    outcome = train()
    assert (outcome.code, outcome.err) == (0, "")
    assert f"warning: checkpoint {newest} is damaged: " in outcome.out
    assert "resuming at step 10" in outcome.out
    assert numbers(train.run_dir.metrics()) == whole
    assert "resuming at step 12" in train().out  # saved again, and good


# ---- resume by path -------------------------------------------------------------------------


def test_a_run_can_start_from_the_checkpoint_of_another_directory(train, whole):
    train()
    path = train.run_dir.checkpoints / "00000010"
    other = RunDir(train.folder / "other")
    outcome = train(f"--checkpoint.resume={path}", f"--train.run_dir={other.path}")
    assert f"resuming at step 10 from {path}" in outcome.out
    assert numbers(other.metrics()) == whole[10:]


def test_resuming_by_path_never_drops_newer_checkpoints(train):
    train()
    before = train.contents()
    path = train.run_dir.checkpoints / "00000010"
    assert "holds step 12, checkpoint.resume names step 10" in train.refused(
        f"--checkpoint.resume={path}"
    )
    assert train.contents() == before


def test_resuming_by_path_is_of_the_same_run_too(train):
    train("--train.steps=1")
    path = train.run_dir.checkpoints / "00000001"
    other = train.folder / "other"
    line = train.refused(
        f"--checkpoint.resume={path}", f"--train.run_dir={other}", "--train.seed=3"
    )
    assert f"{path} is of another run: train.seed is 3, was 0" in line
    assert not other.exists()


# ---- asked to stop --------------------------------------------------------------------------


def signal_in(method: str, number: int, *, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets a signal while it logs, evaluates or saves `step`."""
    owner = {"log": RunDir, "evaluate": Run, "save": Run}[method]
    original = getattr(owner, method)

    def signalling(self, *args):
        now = args[0]["step"] if method != "save" else args[1]
        if int(now) == step:
            signal.raise_signal(number)
        return original(self, *args)

    monkeypatch.setattr(owner, method, signalling)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_the_same_command_goes_on(
    train, whole, number, monkeypatch
):
    with monkeypatch.context() as patch:
        signal_in("log", number, step=7, monkeypatch=patch)
        outcome = train()
    assert (outcome.code, outcome.err) == (0, "")
    assert "stopped at step 8: saved; the same command goes on" in outcome.out
    assert train.steps == [5, 8]
    train()
    rows = numbers(train.run_dir.metrics())
    stopped = rows.pop(7)
    assert set(EVALUATION) < set(stopped)  # a last step is evaluated
    assert rows == [row for row in whole if row["step"] != 8]
    assert {key: stopped[key] for key in whole[7]} == whole[7]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_what_it_did_before(number):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    for signals in (0, 1):
        stop = Stop()
        with stop.listening():
            for _ in range(signals):
                assert signal.getsignal(number) not in before
                signal.raise_signal(number)
                assert [
                    signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)
                ] == before
        assert stop.asked == bool(signals)
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("method", "step"), [("evaluate", 10), ("save", 5)])
def test_whenever_the_signal_comes_the_run_saves_before_it_stops(train, method, step, monkeypatch):
    signal_in(method, signal.SIGTERM, step=step, monkeypatch=monkeypatch)
    outcome = train()
    assert f"stopped at step {step + 1}: saved" in outcome.out
    assert train.steps[-1] == step + 1


def test_a_run_that_never_saves_says_so_when_it_is_stopped(train, monkeypatch):
    signal_in("log", signal.SIGTERM, step=7, monkeypatch=monkeypatch)
    outcome = train("--checkpoint.every=0")
    assert outcome.code == 0
    assert "stopped at step 8: nothing saved, checkpoint.every is 0" in outcome.out
    assert train.steps == []


def test_a_run_resumed_by_path_says_how_to_go_on(train, monkeypatch):
    train("--train.steps=1")
    path = train.run_dir.checkpoints / "00000001"
    signal_in("log", signal.SIGTERM, step=3, monkeypatch=monkeypatch)
    outcome = train(f"--checkpoint.resume={path}", f"--train.run_dir={train.folder / 'other'}")
    assert "stopped at step 4: saved; checkpoint.resume=auto goes on" in outcome.out


# ---- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("--model.num_layer=2", "unknown key model.num_layer; did you mean model.num_layers?"),
        ("--train.steps=many", "train.steps: expected int, got many"),
        ("--layout.zero=4", "layout.zero: expected one of 0, 1, 2, 3, got 4"),
        ("--layout.tp=3", "model.num_heads=4 does not split over layout.tp=3; use a size"),
        ("--layout.dp=3", "train.global_batch_size=8 does not split over layout.dp=3"),
        ("--layout.dp=16 --train.global_batch_size=32", "needs 16 devices, this machine has 8"),
        ("--data.source={folder}/none.txt", "none.txt"),
        ("--data.source={folder}/empty.txt", "empty.txt"),
        ("--data.source={folder}/binary.txt", "binary.txt"),
        ("--data.source={folder}/short.txt", "one sequence takes model.seq_length + 1 = 17"),
        ("--data.tokenizer={folder}/none.json", "no such file; use bytes, or the path"),
        ("--checkpoint.resume={folder}/00000005", "there is no checkpoint"),
        ("--train.run_dir={folder}/text.txt", "text.txt is a file; name a directory"),
        ("--train.run_dir={folder}/text.txt/run", "text.txt is a file; name a directory"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(train, override, line):
    files = {"empty.txt": b"", "binary.txt": b"\x00\xff\xfe", "short.txt": b"short"}
    for file, content in files.items():
        (train.folder / file).write_bytes(content)
    before = sorted([*files, "text.txt"])
    assert line in train.refused(*override.format(folder=train.folder).split())
    assert sorted(path.name for path in train.folder.iterdir()) == before


TABLES = {
    "good": "F0,F1,,B0,,B1\n,F0,B0,F1,B1\n",
    "early": "F0,B0\nF0,B0\n",
    "words": "F0,what\n,F0\n",
}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("--layout.schedule=1f2b", "layout.schedule=1f2b: use one of 1f1b, gpipe, interleaved, "),
        ("--layout.schedule={folder}/none.csv", "none.csv: No such file"),
        ("--layout.schedule={folder}/early.csv", "early.csv: F0 of stage 1, chunk 0, is at tick 0"),
        ("--layout.schedule={folder}/words.csv", "words.csv: stage 0 has a cell 'what'; write F0"),
        (
            "--layout.schedule={folder}/good.csv --train.micro_batches=4",
            "good.csv is a table for train.micro_batches=2, not 4; use",
        ),
        (
            "--layout.schedule={folder}/good.csv --layout.pp=4 --model.num_layers=4",
            "good.csv is a table for layout.pp=2, not 4; use",
        ),
        ("--layout.virtual_stages=2", "layout.schedule=1f1b has virtual_stages=1, not 2; leave"),
        (
            "--layout.virtual_stages=1 --layout.schedule=interleaved",
            "schedule=interleaved with virtual_stages=1: use 2 or more",
        ),
        ("--layout.virtual_stages=0", "layout.virtual_stages=0: use 1 or more"),
        ("--layout.pp=4", "model.num_layers=2 leaves some of the pipeline's 4 parts"),
        ("--layout.schedule=zb-v", "model.num_layers=2 leaves some of the pipeline's 4 parts"),
        ("--layout.stage_layers=[1,2]", "layout.stage_layers=[1, 2]: use 2 numbers, one for each"),
        ("--layout.stage_layers=[1,0,1]", "that add up to model.num_layers=2"),
        ("--layout.stage_layers=[3,-1]", "that add up to model.num_layers=2"),
        ("--layout.pp=16 --model.num_layers=16", "needs 16 devices, this machine has 8"),
        ("--layout.pp=0", "layout.pp=0: an axis has at least one device"),
    ],
)
def test_a_pipeline_that_cannot_be_is_one_line_and_nothing_is_written(train, overrides, line):
    for name, table in TABLES.items():
        (train.folder / f"{name}.csv").write_text(table)
    before = sorted(path.name for path in train.folder.iterdir())
    found = train.refused("--layout.pp=2", *overrides.format(folder=train.folder).split())
    assert line in found
    assert sorted({path.name for path in train.folder.iterdir()} - {"text.txt"}) == before


def test_a_sequence_that_does_not_split_is_refused(train):
    line = train.refused("--layout.tp=4", SEQUENCE, "--model.seq_length=18")
    assert "model.seq_length=18 does not split over layout.tp=4" in line
    assert not train.run_dir.path.exists()


def test_devices_that_do_not_start_are_one_line(train, monkeypatch):
    def broken():
        raise RuntimeError("Unable to initialize backend:\n no driver")

    monkeypatch.setattr(jax, "devices", broken)
    line = train.refused()
    assert "cannot start its devices: Unable to initialize backend: no driver; use train" in line
    assert not train.run_dir.path.exists()


def test_never_resumes_nothing(train):
    train("--train.steps=1")
    before = train.contents()
    assert "checkpoint.resume is never; use another directory" in train.refused(
        "--checkpoint.resume=never"
    )
    assert train.contents() == before


def token_file(folder: Path, *, vocab_size: int) -> tuple[Path, ShuffledWindows]:
    """Ids below `vocab_size` in a nanoGPT file; and the sequences that training makes of them."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, 4000)
    path = folder / "tokens.bin"
    write_bin(path, tokens)
    return path, ShuffledWindows(tokens[:3800], seq_length=16, seed=0, vocab_size=vocab_size)


def test_an_id_outside_the_vocabulary_stops_the_run_and_spoils_nothing(train):
    path, windows = token_file(train.folder, vocab_size=257)
    place = int(windows.starts(np.arange(8 * 6, 8 * 7))[3]) + 5  # in a batch of step 7
    tokens = np.fromfile(path, "<u2")
    tokens[place] = 300
    write_bin(path, tokens)
    line = train.refused(f"--data.source={path}")
    assert f"token {place} of {path} has id 300, outside the model's 257 (0 to 256); use" in line
    assert train.steps == [5]
    assert [row["step"] for row in train.run_dir.metrics()] == [1, 2, 3, 4, 5, 6]


def test_a_vocabulary_without_the_prompt_only_costs_the_sample(train):
    path, _ = token_file(train.folder, vocab_size=64)
    vocabulary = ("--model.vocab_size=64", f"--data.source={path}", "--train.sample_tokens=5")
    outcome = train(*vocabulary, "--train.steps=2")
    assert (outcome.code, outcome.err) == (0, "")
    assert "no sample: the prompt 'def ' has id 102, the model knows 0 to 63" in outcome.out


# ---- diverging ------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, *, step: int) -> None:
    """Parameters become NaN in `step`, as in a step whose gradients overflow."""
    original = Program.train_step.func

    def train_step(program):
        healthy = original(program)

        def poisoned(state, batch):
            if int(state["step"]) + 1 == step:
                params = {name: p * math.nan for name, p in state["params"].items()}
                state = {**state, "params": params}
            return healthy(state, batch)

        return poisoned

    poisoned = functools.cached_property(train_step)
    poisoned.__set_name__(Program, "train_step")
    monkeypatch.setattr(Program, "train_step", poisoned)


@pytest.mark.parametrize(
    ("log", "evaluate", "save", "good"),
    [
        (1, 10, 5, [5]),
        (5, 0, 7, []),
        (0, 0, 7, []),
        (0, 7, 7, []),
        (0, 0, 3, [3, 6]),
        (0, 0, 0, []),
    ],
)
def test_a_state_that_is_not_finite_is_never_saved(train, log, evaluate, save, good, monkeypatch):
    poison(monkeypatch, step=7)
    every = {"train.log_every": log, "train.eval_every": evaluate, "checkpoint.every": save}
    strict = "--train.max_skipped=1"
    line = train.refused(strict, *(f"--{key}={value}" for key, value in every.items()))
    last = f"the last good checkpoint is step {good[-1]}" if good else "there is no checkpoint"
    assert "loss is nan at step 7, the last of 1 in a row that were skipped (" in line
    assert last in line
    assert train.steps == good
    assert all(row["step"] < 7 for row in train.run_dir.metrics())


def test_the_last_step_is_looked_at_too(train, monkeypatch):
    poison(monkeypatch, step=STEPS)
    never = ("--train.log_every=0", "--train.eval_every=0", "--checkpoint.every=0")
    assert "parameter blocks." in train.refused(*never)
    again = ("--train.max_skipped=1", f"--train.run_dir={train.folder / 'again'}")
    assert f"loss is nan at step {STEPS}" in train.refused(*never, *again)


def test_parameters_that_are_no_numbers_are_not_saved_however_many_steps_may_be_skipped(
    train, monkeypatch
):
    poison(monkeypatch, step=7)
    line = train.refused("--train.eval_every=0")
    assert f" is not finite after step {STEPS}, which is not saved; start again in another" in line
    assert train.steps == [5]  # not 10: that is no time to replace an older one
    rows = train.run_dir.metrics()
    assert [row["skipped"] for row in rows] == [0] * 6 + [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows[6:]] == [None] * 6


def test_explosions_are_skipped_and_a_killed_run_remembers_them(train, whole, monkeypatch):
    limit = float(np.median([row["grad_norm"] for row in whole]))
    skip = f"--optimizer.skip_above={limit}"
    with monkeypatch.context() as patch:
        kill_after(9, patch)
        with pytest.raises(Killed):
            main([*train.options, skip])
    train(skip)
    rows = train.run_dir.metrics()
    steps = np.diff([0] + [row["skipped"] for row in rows])
    assert steps.tolist() == [int(row["grad_norm"] > limit) for row in rows]
    assert 0 < steps.sum() < STEPS
    other = f"--train.run_dir={train.folder / 'other'}"
    outcome = train(skip, other)
    assert f" {steps.sum()} skipped" in outcome.out
    assert numbers(RunDir(train.folder / "other").metrics()) == numbers(rows)


def test_a_learning_rate_that_is_too_large_says_so(train):
    options = ("--checkpoint.every=1", "--train.eval_every=0", "--train.max_skipped=4")
    line = train.refused("--optimizer.learning_rate=1e37", *options)
    assert " is nan at step 5, the last of 4 in a row " in line
    assert "the last good checkpoint is step 1; " in line
    assert "with a smaller optimizer.learning_rate" in line
    assert train.steps == [1]


# ---- in a process of its own ----------------------------------------------------------------

HURT = """
import os, resource, signal, sys, threading
from jaxptd.errors import run_command
from jaxptd.run.folder import RunDir
from jaxptd.train import main

log = RunDir.log

def hurt(self, row):
    log(self, row)
    if row["step"] == {step}:
        {what}

RunDir.log = hurt
run_command(main)
"""


# It writes nothing to the cache of programs: with a full disk JAX would warn of that.
NOT_CACHED = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


def hurt(train: Trainer, what: str, *, step: int, options=()) -> subprocess.CompletedProcess:
    """The command in a process to which `what` happens at the end of `step`."""
    script = textwrap.dedent(HURT).format(step=step, what=what)
    command = [sys.executable, "-c", script, *train.options, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), NOT_CACHED: "1e9"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(train, whole):
    size = 10_000  # of the largest file: metrics still fit, the arrays of a checkpoint do not
    full = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    saved = "[each.join() for each in threading.enumerate() if each.name == 'jaxptd-background']"
    ended = hurt(train, f"{saved}; {full}", step=7)
    assert ended.returncode == 2, ended
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "could not save step 10" in ended.stderr
    assert "File too large; the last good checkpoint is step 5; mend that" in ended.stderr
    assert train.steps == [5]
    assert "resuming at step 5" in train().out
    assert numbers(train.run_dir.metrics()) == whole


@pytest.mark.slow
def test_sigkill_and_the_same_command_again(train):
    options = ("--train.steps=30", "--layout.dp=2", "--layout.tp=2", SEQUENCE)
    other = RunDir(train.folder / "whole")
    assert main([*train.options, *options, f"--train.run_dir={other.path}"]) == 0
    killed = hurt(train, "os.kill(os.getpid(), signal.SIGKILL)", step=17, options=options)
    assert killed.returncode == -signal.SIGKILL
    assert [row["step"] for row in train.run_dir.metrics()] == list(range(1, 18))
    again = hurt(train, "pass", step=17, options=options)
    assert (again.returncode, again.stderr) == (0, "")
    assert "resuming at step 15" in again.stdout
    assert numbers(train.run_dir.metrics()) == numbers(other.metrics())


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_from_outside(train, number):
    ended = hurt(train, f"os.kill(os.getpid(), signal.{number})", step=7)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "stopped at step 8: saved; the same command goes on" in ended.stdout
    assert train.steps == [5, 8]


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_the_run(train):
    command = [sys.executable, "-m", "jaxptd.train", *train.options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0
    assert train.steps[-1] == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("config", ["test-tiny", "test-dp2-tp4"])
def test_the_configs_do_what_their_first_lines_say(config, tmp_path):
    path = ROOT / "configs" / f"{config}.yaml"
    head = dict(
        line.removeprefix("# ").split(": ", 1)
        for line in path.read_text().splitlines()
        if line.startswith("# ") and ": " in line
    )
    assert head["Command"] == f"python -m jaxptd.train --config configs/{config}.yaml"
    command = [sys.executable, *head["Command"].split()[1:], f"--train.run_dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert f"{load_config(path).layout.num_devices} (simulated)." == head["Devices"]
    expected, tolerance = (float(word) for word in head["Expected loss"].split()[0::5][:2])
    assert RunDir(tmp_path).metrics()[-1]["loss"] == pytest.approx(expected, abs=tolerance)
