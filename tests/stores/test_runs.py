"""Runs whose directory is in an S3 store."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
from runs import EVERY, STEPS, Killed, Outcome, Trainer, kill_after

import jaxptd
from benchmarks.lib.s3_server import BUCKET, Faults
from jaxptd import generate
from jaxptd.checkpoint import Checkpoints
from jaxptd.commands import launch, train_options
from jaxptd.commands.run_options import read_run
from jaxptd.errors import UserError
from jaxptd.hf import convert
from jaxptd.run.holder import Holder
from jaxptd.run.store import StoreCopy, StoreLock
from jaxptd.stores import StorePath, place
from jaxptd.train import main

RUN = f"s3://{BUCKET}/runs/a"
ROW = ("step", "loss")


@pytest.fixture
def train(tmp_path: Path, capfd: pytest.CaptureFixture, s3: Faults) -> Trainer:
    return Trainer(tmp_path, capfd)


def at(name: str = "") -> StorePath:
    found = place(f"{RUN}/{name}")
    assert isinstance(found, StorePath)
    return found


def files() -> dict[str, bytes]:
    run = at()
    listed = run.store.listing(run.key)
    return {run.inside(k): run.store.read(k) for k in listed if "/checkpoints/" not in k}


def rows(data: bytes) -> list[tuple]:
    return [tuple(json.loads(line)[name] for name in ROW) for line in data.splitlines()]


def in_store(train: Trainer, *options: str) -> Outcome:
    return train(f"--train.run_dir={RUN}", *options)


def test_a_run_in_a_store_is_the_run_on_a_disk(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--train.loggers=[csv]", "--train.steps=7").code == 0
    assert in_store(train, "--train.loggers=[csv]", "--train.steps=7").code == 0
    assert Checkpoints(f"{RUN}/checkpoints", keep=1).steps() == [EVERY, 7]
    assert set(files()) == {"config.yaml", "metrics.jsonl", "metrics.csv"}
    resumed = in_store(train, "--train.loggers=[csv]")
    assert f"resuming at step 7 from {RUN}/checkpoints" in resumed.out
    assert resumed.code == 0
    assert not list(tmp_path.glob("s3*"))  # nothing was taken for a folder of that name

    same = rows((train.run_dir.path / "metrics.jsonl").read_bytes())
    stored = rows(files()["metrics.jsonl"])
    assert [step for step, _ in stored] == list(range(1, STEPS + 1))
    assert stored[:7] == same
    loaded = jaxptd.load(RUN)
    assert loaded.step == STEPS
    assert list(loaded.metrics["step"]) == list(range(1, STEPS + 1))
    assert RUN in repr(loaded)


def test_a_run_in_a_store_goes_on_from_memory(
    train: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the run's identity, and no state as new as the one on the host."""
    kept = ("--checkpoint.memory_every=2", f"--checkpoint.memory_dir={tmp_path}")
    options = (*kept, "--checkpoint.every=100", "--train.log_every=1", "--train.steps=7")
    with monkeypatch.context() as patched:
        kill_after(6, patched)
        with pytest.raises(Killed):
            main([*train.options, f"--train.run_dir={RUN}", *options])
    (folder,) = tmp_path.glob("jaxptd-*")
    assert files()["run_id"]
    resumed = in_store(train, *options)
    assert re.search(rf"resuming at step [46] from {folder}", resumed.out), resumed
    assert resumed.code == 0
    assert in_store(train, "--train.steps=8").code == 0  # keeps none in memory any more
    assert files()["run_id"] == b""


@pytest.mark.parametrize(
    ("step", "options"),
    [(EVERY, ()), (6, ("--checkpoint.memory_every=2", "--checkpoint.memory_dir={}"))],
)
def test_a_state_brings_the_rows_that_were_not_copied(
    train: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    options: tuple[str, ...],
) -> None:
    """A run is killed after it has saved a state, before its logs are copied."""
    words = ["--train.loggers=[csv]", *(each.format(tmp_path) for each in options)]
    publish = StoreCopy.publish

    def until_the_first_row(copy: StoreCopy) -> bool:
        return not (copy.folder / "metrics.jsonl").stat().st_size and publish(copy)

    with monkeypatch.context() as patched:
        patched.setattr(StoreCopy, "publish", until_the_first_row)
        kill_after(7, patched)
        with pytest.raises(Killed):
            main([*train.options, f"--train.run_dir={RUN}", *words])
    assert files()["metrics.jsonl"] == b""
    resumed = in_store(train, *words)
    assert f"resuming at step {step}" in resumed.out, resumed
    assert [each for each, _ in rows(files()["metrics.jsonl"])] == list(range(1, STEPS + 1))
    lines = files()["metrics.csv"].decode().splitlines()
    assert [line.partition(",")[0] for line in lines[1:]] == [*map(str, range(1, STEPS + 1))]


def test_a_run_ends_early_by_evaluations_that_only_its_checkpoint_has(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = ("--train.patience=1", "--train.min_improvement=10", "--train.eval_every=4")
    with monkeypatch.context() as patched:
        patched.setattr(StoreCopy, "publish", lambda copy: False)
        kill_after(7, patched)
        with pytest.raises(Killed):
            main([*train.options, f"--train.run_dir={RUN}", *early])
    assert "metrics.jsonl" not in files()
    assert "ended at step 8: validation_loss has not improved" in in_store(train, *early).out
    assert [each for each, _ in rows(files()["metrics.jsonl"])] == list(range(1, 9))
    assert "nothing left to do: validation_loss has not improved" in in_store(train, *early).out


def test_launch_starts_again_from_what_the_run_has_saved_in_its_store(train: Trainer) -> None:
    words = [*train.options, f"--train.run_dir={RUN}", "--checkpoint.resume=runs/other"]
    config = read_run(train_options.parser(), words, new=True)[0]
    assert launch._resume(config) == []
    assert in_store(train, "--train.steps=2", "--checkpoint.every=2").code == 0
    assert launch._resume(config) == ["--checkpoint.resume=auto"]


@pytest.mark.slow
def test_every_command_takes_the_url_of_a_run(
    train: Trainer, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert in_store(train, f"--train.steps={EVERY}").code == 0
    more = train("--train.steps=6", f"--checkpoint.resume={RUN}/checkpoints/0000000{EVERY}")
    assert f"resuming at step {EVERY} from {RUN}/checkpoints/0000000{EVERY}" in more.out
    other = f"--train.run_dir={tmp_path / 'other'}"
    started = train("--train.steps=2", f"--checkpoint.start={RUN}", other)
    assert f"starting from the weights of {RUN}" in started.out
    capfd.readouterr()
    assert generate.main(["--run-dir", RUN, "--prompt", "def", "--tokens", "3"]) == 0
    assert capfd.readouterr().out.startswith("def")
    with pytest.raises(UserError, match=f"{RUN}/nothing holds no checkpoint"):
        generate.main(["--run-dir", f"{RUN}/nothing", "--tokens", "3"])


@pytest.mark.slow
def test_a_run_in_a_store_is_exported(train: Trainer, tmp_path: Path) -> None:
    assert in_store(train, "--train.steps=2").code == 0
    convert.main(["--to-hf", RUN, "--out", str(tmp_path / "hf")])
    assert (tmp_path / "hf/config.json").exists()


@pytest.mark.slow
def test_run_dir_alone_goes_on(train: Trainer) -> None:
    assert in_store(train, "--train.steps=5").code == 0
    assert main(["--run-dir", RUN, "--train.steps=6"]) == 0
    assert Checkpoints(f"{RUN}/checkpoints", keep=1).steps()[-1] == 6


# ---- refused, in a line --------------------------------------------------------------------------


def test_what_cannot_be_is_one_line_and_writes_nothing(train: Trainer, s3: Faults) -> None:
    words = train.refused("--train.run_dir=quux://a/b")
    assert "no store has URLs with quux://" in words
    words = train.refused("--train.run_dir=s3://nobucket/run")
    assert "there is no such bucket" in words
    assert [key for key in s3.of("PUT") if not key.startswith("nobucket")] == []
    s3.times(99, "InvalidAccessKeyId")
    assert "the credential is missing or wrong" in train.refused(f"--train.run_dir={RUN}")
    s3.fault = lambda *_: None
    assert files() == {}
    assert not train.run_dir.path.exists()


@pytest.mark.slow
def test_another_run_is_refused(train: Trainer) -> None:
    assert in_store(train, "--train.steps=1").code == 0
    url = f"--train.run_dir={RUN}"
    assert f"{RUN} holds another run: train.seed is 1, was 0" in train.refused(
        url, "--train.seed=1"
    )
    assert "holds a run and checkpoint.resume is never" in train.refused(
        url, "--checkpoint.resume=never"
    )


def test_a_credential_that_ends_ends_the_run_in_a_line(train: Trainer, s3: Faults) -> None:
    def fault(method: str, key: str) -> str | None:
        return "ExpiredToken" if f"000000{10}" in key and method == "PUT" else None

    s3.fault = fault
    words = train.refused(f"--train.run_dir={RUN}")
    assert "could not save step 10" in words
    assert "the credential has expired (ExpiredToken); renew it" in words
    assert f"the last good checkpoint is step {EVERY}" in words
    assert Checkpoints(f"{RUN}/checkpoints", keep=1).steps() == [EVERY]


@pytest.mark.slow
def test_logs_that_cannot_be_copied_end_no_run(train: Trainer, s3: Faults) -> None:
    s3.fault = lambda method, key: (
        "AccessDenied" if method == "PUT" and key.endswith("metrics.jsonl") else None
    )
    ended = in_store(train, "--train.steps=6")
    assert ended.code == 0
    assert (ended.out + ended.err).count("warning: could not copy the logs to s3://") == 1


# ---- who writes ----------------------------------------------------------------------------------


def test_one_process_of_a_host_writes(s3: Faults) -> None:
    said: list[str] = []
    lock = StoreLock(at(), say=said.append)
    with lock.held():
        lock.require()
        other = StoreLock(at(), say=said.append)
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
            other.check()
    assert files() == {}
    other.check()
    assert said == []


def test_a_run_on_another_host_is_taken_over_and_notices(
    s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    name = socket.gethostname()
    first = StoreLock(at(), say=said.append)
    with first.held():
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        second = StoreLock(at(), say=said.append)
        second.check()
        with second.held():
            assert "took train.run_dir=s3://bucket/runs/a over from process" in said[0]
            second.require()
            with pytest.raises(UserError, match="another run has taken s3://bucket/runs/a over"):
                first.require()
            assert "owner.json" in files()
        with pytest.raises(UserError, match="over: it has ended since, or owner.json was deleted"):
            first.require()
        with second.held():
            first.release()
            assert "owner.json" in files()  # it is the second's
            first.require()  # holds nothing any more
    assert files() == {}
    assert Holder.this_process().host == "elsewhere" != name


@pytest.mark.slow
def test_a_run_that_was_taken_over_ends_before_its_next_checkpoint(
    train: Trainer, s3: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = json.dumps(json.loads(Holder.this_process().to_json()) | {"word": "x", "host": "b"})

    def take(method: str, key: str) -> str | None:
        if method == "PUT" and "00000010" in key:
            s3.fault = lambda *_: None
            at().store.write(at("owner.json").key, taken.encode())
        return None

    s3.fault = take
    words = train.refused(f"--train.run_dir={RUN}")
    assert f"another run has taken {RUN} over: process {os.getpid()} on b" in words
    assert Checkpoints(f"{RUN}/checkpoints", keep=1).steps() == [EVERY]
    resumed = in_store(train)
    assert "warning: took train.run_dir" in resumed.out + resumed.err
    assert resumed.code == 0


def test_an_owner_that_cannot_be_read_is_not_taken_for_none(s3: Faults) -> None:
    lock = StoreLock(at(), say=print)
    with lock.held():
        s3.fault = lambda method, key: "AccessDenied" if key.endswith("owner.json") else None
        for use in (lock.require, StoreLock(at(), say=print).check):
            with pytest.raises(UserError, match="could not read .*owner.json: the credential"):
                use()
        s3.fault = lambda *_: None


@pytest.mark.parametrize("damaged", [b"", b"[]", b"3", b'{"word": "x"}', b"\xff"])
def test_a_damaged_owner_is_none(s3: Faults, damaged: bytes) -> None:
    at().store.write(at("owner.json").key, damaged)
    lock = StoreLock(at(), say=print)
    lock.check()
    with lock.held():
        lock.require()
    assert files() == {}


def test_a_run_that_was_taken_over_copies_no_logs(s3: Faults) -> None:
    """They would replace those of the run that goes on."""
    said: list[str] = []
    lock = StoreLock(at(), say=said.append)
    copy = StoreCopy(at(), said.append, may_write=lock.require)
    with lock.held():
        (copy.folder / "metrics.jsonl").write_bytes(b"ours")
        copy.publish()
        at().store.write(at("owner.json").key, b'{"word": "other"}')
        at().store.write(at("metrics.jsonl").key, b"theirs")
        (copy.folder / "metrics.jsonl").write_bytes(b"ours, and more")
        copy.publish()
        copy.publish()
    assert files()["metrics.jsonl"] == b"theirs"
    assert len(said) == 1
    assert said[0].startswith(f"warning: could not copy the logs to {RUN}: another run has taken")


def test_logs_that_could_not_be_copied_are_copied_later(s3: Faults) -> None:
    said: list[str] = []
    copy = StoreCopy(at(), said.append)
    (copy.folder / "a").write_bytes(b"1")
    for _ in range(2):  # warns each time that copying begins to fail
        s3.fault = lambda *_: "AccessDenied"
        copy.publish()
        copy.publish()
        s3.fault = lambda *_: None
        copy.publish()
        assert files()["a"] == (copy.folder / "a").read_bytes()
        (copy.folder / "a").write_bytes(b"22")
    assert len(said) == 2
    s3.requests.clear()
    copy.publish()
    copy.publish()
    assert len(s3.of("PUT")) == 1
