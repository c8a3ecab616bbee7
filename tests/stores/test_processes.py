"""Checkpoints of two real processes in a store, without a folder that both see; and real kills."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpointing import ROOT, START, abstract, assert_same, make_state, newest, save
from two_processes import RESTORES_ONE_AND_SAVES_TWO, two_processes

from benchmarks.lib.s3_server import BUCKET, Faults
from jaxptd.checkpoint import Checkpoints
from jaxptd.stores import StorePath, place

RUN = f"s3://{BUCKET}/run/checkpoints"


@pytest.mark.slow
def test_two_processes_save_and_restore_what_they_hold(s3: Faults) -> None:
    """A store that refuses one process fails the save on both; afterwards both save again."""
    save(RUN, 1)
    code = """
        from jaxptd.stores import Store, StoreError
        def refused(self, key, data):
            raise StoreError("refused")
        for bad in (0, 1):
            before = Store.write
            if process == bad:
                Store.write = refused
            try:
                checkpoints.save(3, make_state(3, 2, 2), description={})
            except CheckpointError as error:
                print(error)
            Store.write = before
            assert checkpoints.steps() == [1, 2]
        checkpoints.save(4, make_state(4, 2, 2), description={})

        jax.experimental.multihost_utils.sync_global_devices("saved")
        if process == 1:
            step = folder / "00000004"
            key = max(k for k in folder.store.listing(step.key) if k.endswith("process_1.0.bin"))
            data = folder.store.read(key)
            folder.store.write(key, bytes(len(data)))
        jax.experimental.multihost_utils.sync_global_devices("damaged")
        step, state = checkpoints.restore_newest(target, report=print)
        assert step == 2
        assert_same_shards(state, make_state(2, 2, 2))
    """
    outputs, errors = two_processes(RESTORES_ONE_AND_SAVES_TWO, code, folder=RUN)
    line, last = f"could not save step 3 in {RUN}: refused", "; the last good checkpoint is step 2"
    assert outputs[0][:2] == [line + last, f"{line} (process 1){last}"]
    assert outputs[1][:2] == [f"{line} (process 0){last}", line + last]
    assert "process_1.0.bin was changed (its CRC-32 differs); skipped" in outputs[0][2]
    assert (len(outputs[0]), len(outputs[1])) == (3, 2)
    assert errors == [[], []]
    checkpoints = Checkpoints(RUN, keep=9)
    assert_same(checkpoints.restore(2, abstract(make_state())), make_state(2))
    where = place(f"{RUN}/00000002")
    assert isinstance(where, StorePath)
    names = [key.rpartition("/")[2] for key in where.store.listing(where.key)]
    assert sorted(names) == [
        "manifest.json",
        *(f"process_{n}.{end}" for n in (0, 1) for end in ("0.bin", "json")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("key", [r"\.bin", r"process_0\.json", "manifest", "newest"])
def test_a_killed_save_is_invisible_and_swept(s3: Faults, key: str, tmp_path: Path) -> None:
    """SIGKILL while the server holds a request."""
    save(RUN, 1)
    if key == r"\.bin":
        s3.fault = lambda method, what: "hang" if method == "PUT" and ".bin" in what else None
    else:
        s3.times(1, "hang", method="PUT", key=key)
    s3.requests.clear()
    code = START.replace("Path(sys.argv[1])", "sys.argv[1]") + "\nsave(directory, 2, keep=9)"
    process = subprocess.Popen([sys.executable, "-c", code, RUN], cwd=tmp_path)
    end = time.monotonic() + 120
    while not s3.of("PUT", key) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    s3.fault = lambda *_: None
    s3.release.set()
    assert newest(RUN) == (2 if key == "newest" else 1)
    after = save(RUN, 3)
    assert after.steps() == ([1, 2, 3] if key == "newest" else [1, 3])
    where = place(RUN)
    assert isinstance(where, StorePath)
    steps = {where.inside(each).partition("/")[0] for each in where.store.listing(where.key)}
    assert steps == {f"{step:08d}" for step in after.steps()} | {"newest.json"}


@pytest.mark.slow
def test_two_processes_train_without_a_folder_that_both_see(s3: Faults, tmp_path: Path) -> None:
    from together import TRAIN, Together

    from jaxptd.run.metrics import Metrics

    text = tmp_path / "text.txt"
    text.write_text("".join(f"def function_{n}(a, b): return a + b * {n}\n" for n in range(400)))
    common = [
        "--config",
        str(ROOT / "configs" / "test-tiny.yaml"),
        f"--data.source={text}",
        "--layout.dp=2",
        "--train.sample_tokens=0",
        "--train.steps=8",
        "--checkpoint.every=4",
    ]
    argv = [*common, f"--train.run_dir=s3://{BUCKET}/run"]
    for _ in range(2):  # trains, then finds nothing left to do
        ended = Together(TRAIN.format(patches=""), argv, tmp_path, count=2).ended()
        assert [each.code for each in ended] == [0, 0], ended
    assert Checkpoints(RUN, keep=1).steps() == [4, 8]
    where = place(f"s3://{BUCKET}/run/metrics.jsonl")
    assert isinstance(where, StorePath)
    (tmp_path / "m.jsonl").write_bytes(where.store.read(where.key))
    assert [row["step"] for row in Metrics(tmp_path / "m.jsonl").rows()] == list(range(1, 9))
    assert not any("s3" in name for name in os.listdir(tmp_path))
