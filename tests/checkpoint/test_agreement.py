"""Checkpoints of two real processes: gloo on loopback, two simulated devices each."""

import os

import pytest
from checkpointing import abstract, assert_same, make_state, save
from two_processes import RESTORES_ONE_AND_SAVES_TWO, two_processes

from jaxptd.checkpoint import Checkpoints


def test_any_number_of_processes_restores_what_any_number_saved(tmp_path):
    """A full disk on one process fails the save on both; afterwards both can save again."""
    save(tmp_path, 1)
    code = """
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        for full in (0, 1):
            if process == full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
            checkpoints.save_async(3, make_state(3, 2, 2), description={})
            try:
                checkpoints.wait()
            except CheckpointError as error:
                print(error)
            assert checkpoints.steps() == [1, 2]
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        checkpoints.save(4, make_state(4, 2, 2), description={})
        assert checkpoints.steps() == [1, 2, 4]

        largest = max((folder / "00000004").rglob("d/*"), key=lambda path: path.stat().st_size)
        jax.experimental.multihost_utils.sync_global_devices("looked")
        if process == 1:
            os.truncate(largest, 10)
        jax.experimental.multihost_utils.sync_global_devices("damaged")
        step, state = checkpoints.restore_newest(target, report=lambda line: print("damaged"))
        assert step == 2
        assert_same_shards(state, make_state(2, 2, 2))
        try:
            checkpoints.restore(4, target)
        except CheckpointError as error:
            print(" ".join(str(error).split()[2:]))
    """
    outputs, errors = two_processes(RESTORES_ONE_AND_SAVES_TWO, code, folder=tmp_path)
    line = f"could not save step 3 in {tmp_path}: File too large"
    last = "; the last good checkpoint is step 2"
    damaged = outputs[0][3]
    assert damaged.startswith("is damaged: arrays/")
    assert damaged.count("has 10 bytes, not") == 1
    assert outputs == [
        [line + last, f"{line} (process 1){last}", "damaged", damaged],  # the first one names it
        [f"{line} (process 0){last}", line + last, f"{damaged} (process 0)"],
    ]
    assert errors == [[], []]
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert_same(checkpoints.restore(2, abstract(make_state())), make_state(2))
    assert checkpoints.description(2) == {"by": 2}
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002", "00000004"]


@pytest.mark.slow
def test_a_directory_that_not_all_processes_see(tmp_path):
    code = """
        checkpoints = Checkpoints(folder / str(process), keep=9)
        try:
            checkpoints.save(1, make_state(1, 2, 2), description={})
        except CheckpointError as error:
            print(error)
    """
    outputs, errors = two_processes(code, folder=tmp_path)
    for output in outputs:
        assert len(output) == 1
        assert "train.run_dir must be on a file system that all processes see" in output[0]
    assert errors == [[], []]
