"""Rules for which checkpoints a run keeps, ranks and ignores."""

import logging
import os
import subprocess
import sys

import pytest
from checkpointing import ROOT, abstract, assert_same, make_mesh, make_state, newest, save
from damage import flip_a_bit, garble_the_manifest, remove_the_arrays

from jaxptd.checkpoint import CheckpointError, Checkpoints, read_description, restore_path


def test_nothing_is_created_before_the_first_save(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    assert checkpoints.steps() == []
    assert checkpoints.restore_newest(abstract(make_state()), report=pytest.fail) is None
    assert list(tmp_path.iterdir()) == []


def test_keeps_the_newest(tmp_path):
    checkpoints = save(tmp_path, 1, 20, 3, 100, keep=2)
    assert checkpoints.steps() == [20, 100]
    assert sorted(os.listdir(tmp_path)) == ["00000020", "00000100"]
    checkpoints.save(4, make_state(4), description={})  # just saved, so it stays
    assert checkpoints.steps() == [4, 100]


def save_losses(directory, losses, **settings):
    """Saves a checkpoint for each step of {step: validation loss, or None}."""
    checkpoints = Checkpoints(directory, **settings)
    for step, loss in losses.items():
        described = {} if loss is None else {"validation_loss": loss}
        checkpoints.save(step, make_state(step), description=described)
    return checkpoints


def test_keeps_the_best_beyond_the_newest(tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: None, 4: 4.0, 5: 3.5, 6: None}
    checkpoints = save_losses(tmp_path / "a", losses, keep=2, keep_best=1)
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 5, 6], 2)
    checkpoints = save_losses(tmp_path / "b", losses, keep=1, keep_best=3)
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 4, 5, 6], 2)
    checkpoints = save_losses(tmp_path / "c", losses, keep=2)
    assert (checkpoints.steps(), checkpoints.best()) == ([5, 6], 5)
    checkpoints = save_losses(tmp_path / "c", {7: 1.0, 8: 1.0, 9: 2.0}, keep=1, keep_best=1)
    assert (checkpoints.steps(), checkpoints.best()) == ([8, 9], 8)  # the newest of equals


@pytest.mark.parametrize(("metric", "highest", "best"), [("other/a", False, 2), ("x", True, 1)])
def test_any_metric_ranks_lowest_or_highest_first(tmp_path, metric, highest, best):
    settings = {"keep": 1, "keep_best": 1, "metric": metric, "highest": highest}
    checkpoints = Checkpoints(tmp_path, **settings)
    for step, (value, loss) in enumerate([(5.0, 1.0), (3.0, 2.0), (4.0, 0.5)], start=1):
        values = {metric: value, "validation_loss": loss}
        checkpoints.save(step, make_state(step), description=values)
    assert (checkpoints.steps(), checkpoints.best()) == ([best, 3], best)
    found = checkpoints.restore_best(abstract(make_state()), report=pytest.fail)
    assert found[0] == best


def test_without_a_validation_loss_there_is_no_best(tmp_path):
    checkpoints = save_losses(tmp_path, {1: None, 2: None}, keep=1, keep_best=1)
    assert (checkpoints.steps(), checkpoints.best()) == ([2], None)
    target = abstract(make_state())
    assert checkpoints.restore_best(target, report=pytest.fail) is None


def test_a_damaged_best_is_named_and_the_second_best_used(tmp_path):
    checkpoints = save_losses(tmp_path, {1: 3.0, 2: 2.0, 3: 1.0, 4: 4.0}, keep=9)
    flip_a_bit(tmp_path / "00000003")
    garble_the_manifest(tmp_path / "00000002")
    reports = []
    step, state = checkpoints.restore_best(abstract(make_state()), report=reports.append)
    assert step == 1
    assert_same(state, make_state(1))
    assert [("00000002 is damaged" in line, "00000003 is damaged" in line) for line in reports] == [
        (True, False),
        (False, True),
    ]
    assert checkpoints.best() == 1


def test_later_steps_are_set_aside_and_stay(tmp_path):
    checkpoints = save(tmp_path, 1, 2, 3)
    reports = []
    checkpoints.set_aside_after(1, report=reports.append)
    assert checkpoints.steps() == [1]
    assert [line.rpartition("/")[2] for line in reports] == ["00000002.aside", "00000003.aside"]
    save(tmp_path, 2)
    checkpoints.set_aside_after(1, report=reports.append)
    assert reports[-1].endswith("00000002.aside2")
    (tmp_path / "00000002.aside").rename(tmp_path / "00000002")  # a user may rename it back
    assert newest(tmp_path) == 2


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = save(tmp_path, 1, 2)
    checkpoints.save(2, make_state(99), description={"again": True})
    assert sorted(os.listdir(tmp_path)) == ["00000001", "00000002"]
    assert_same(checkpoints.restore(2, abstract(make_state())), make_state(99))
    assert checkpoints.description(2) == {"again": True}


def test_other_things_in_the_directory_are_left_alone(tmp_path):
    names = ["notes.txt", "5", "000000001x", ".cache", ".partial"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / "00000009").write_text("a file")
    assert save(tmp_path, 1, 2, keep=1).steps() == [2]
    assert newest(tmp_path) == 2
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "00000002", "00000009"])


def test_a_step_or_path_that_is_not_there(tmp_path):
    checkpoints = save(tmp_path / "c", 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 in .*it has steps 1"):
        checkpoints.restore(2, abstract(make_state()))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere"):
        read_description(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="c is not a checkpoint; name a folder such as"):
        restore_path(tmp_path / "c", abstract(make_state()))
    with pytest.raises(CheckpointError, match=r"checkpoint.keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_no_log_lines(tmp_path, capfd):
    level = logging.getLogger("absl").level
    checkpoints = save(tmp_path, 1, 2)
    checkpoints.restore(2, abstract(make_state(), make_mesh(8, 1)))
    remove_the_arrays(tmp_path / "00000002")
    assert newest(tmp_path, expect_reports=1) == 1
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert logging.getLogger("absl").level == level


@pytest.mark.slow
def test_importing_starts_no_device():
    """A run sets the number of simulated devices after its imports, before JAX starts any."""
    code = """if True:
        from jaxptd import checkpoint
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 5)
        assert len(jax.devices()) == 5
    """
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
