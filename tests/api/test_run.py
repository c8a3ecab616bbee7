"""A run in Python: interrupted, inspected, evaluated, sampled, saved, loaded elsewhere."""

import math
import re
import signal
import threading

import jax
import numpy as np
import pytest

import jaxptd
from jaxptd import Layout, UserError
from jaxptd.api import ShownState
from jaxptd.distributed.stop import Stop


def test_an_interrupt_leaves_a_usable_run_and_no_handler(interrupted, capfd) -> None:
    run = interrupted.run
    assert (run.stopped, run.step) == (True, 4)
    assert interrupted.handlers == (signal.default_int_handler, signal.SIG_DFL)
    assert [row["step"] for row in interrupted.rows] == [1, 2, 3, 4]
    assert 0 < run.evaluate()["validation_loss"] < math.log(300)
    assert capfd.readouterr().out == ""  # runs are quiet


def test_steps_read_all_samples_in_their_order(interrupted) -> None:
    size, firsts = interrupted.run.config.train.global_batch_size, interrupted.firsts
    assert firsts == [size * i for i in range(len(firsts))]
    assert len(firsts) >= 3


def test_metrics_are_columns(interrupted) -> None:
    metrics, rows = interrupted.run.metrics, interrupted.rows
    assert metrics["step"].tolist() == [1, 2, 3, 4]
    assert metrics["step"].dtype == np.int64
    assert metrics["loss"].tolist() == [row["loss"] for row in rows]
    assert np.isnan(metrics["validation_loss"]).tolist() == [True, True, True, False]
    assert np.isnan(metrics["mfu"]).all()  # None in the file, since no peak is known


def test_a_sample_begins_with_its_prompt_and_repeats(interrupted) -> None:
    texts = [interrupted.run.sample("def ", tokens=5, seed=1) for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")
    with pytest.raises(UserError, match="temperature=-1.0 must be a number, 0 or more"):
        interrupted.run.sample(temperature=-1)


def test_a_stream_is_a_sample_in_pieces(interrupted) -> None:
    run, options = interrupted.run, {"tokens": 20, "seed": 1}
    text, pieces = run.sample("def ", **options), list(run.stream("def ", **options))
    assert "".join(pieces) == text
    assert pieces[0] == "def "
    assert len(pieces) > 2
    stop = text[9:11]
    assert "".join(run.stream("def ", **options, stop=[stop])) == (
        run.sample("def ", **options, stop=[stop])
    )
    for bad, message in (({"temperature": -1}, "must be a number"), ({"tokens": -1}, "use 0 to")):
        with pytest.raises(UserError, match=message):
            run.stream("def ", **bad)  # before a piece is asked for


def test_on_another_layout_it_is_the_same_run(interrupted) -> None:
    run = interrupted.run
    found = jaxptd.load(run.path, Layout(dp=2, tp=2))
    assert (found.step, str(found.config.layout)) == (4, "dp=2 tp=2")
    same = run.evaluate()["validation_loss"]
    assert found.evaluate()["validation_loss"] == pytest.approx(same, rel=1e-5)
    assert str(jaxptd.load(str(run.path)).config.layout) == "one device"


def test_a_step_in_python_is_a_step_of_the_run_and_can_be_saved(interrupted) -> None:
    run = jaxptd.load(interrupted.run.path)
    batch = run.read(run.data.train, 4 * run.config.train.global_batch_size)
    run.state, metrics = run.program.train_step(run.state, batch)
    assert run.step == 5
    assert math.isfinite(metrics["loss"])
    path = run.save()
    assert (path.name, path.is_dir()) == ("00000005", True)
    assert jaxptd.load(run.path).step == 5


def test_a_state_is_a_pytree_that_prints_as_a_line(interrupted) -> None:
    state = interrupted.run.state
    line = r"guard, optimizer, params, step: \d+ arrays, \d+ numbers, .* kB"
    assert re.fullmatch(line, str(state))
    assert repr(state["params"]).count("\n") == 0
    plain = jax.tree.map(lambda x: x, dict(state))
    assert jax.tree.leaves(state) == jax.tree.leaves(plain)
    doubled = jax.tree.map(lambda x: x + x, state["params"])
    assert isinstance(doubled, ShownState)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert paths == [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(plain)]


def test_another_thread_than_the_main_one_takes_no_signals() -> None:
    found = []

    def listen() -> None:
        with Stop().listening():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


@pytest.mark.parametrize("function", [jaxptd.train, jaxptd.verify, jaxptd.comms, jaxptd.memory])
def test_anything_but_a_config_is_refused(function) -> None:
    with pytest.raises(
        UserError, match=r"config is 'quickstart'; expected a Config: jaxptd.load_config\(name\)"
    ):
        function("quickstart")


def test_what_cannot_be_loaded_is_refused(interrupted, tmp_path) -> None:
    with pytest.raises(
        UserError, match="layout is 'tp=2'; expected a Layout or None: jaxptd.Layout"
    ):
        jaxptd.load(interrupted.run.path, "tp=2")
    with pytest.raises(UserError, match=r"holds no checkpoint; train with --train.run_dir"):
        jaxptd.load(tmp_path)
    with pytest.raises(UserError, match=r"needs 16 devices, .* jaxptd.simulate\(16\)"):
        jaxptd.load(interrupted.run.path, Layout(dp=4, tp=4))


@pytest.mark.parametrize("devices", [0, 513])
def test_a_number_of_devices_that_cannot_be_simulated_is_refused(devices: int) -> None:
    with pytest.raises(UserError, match=rf"simulate\({devices}\): use 1 to 512 devices"):
        jaxptd.simulate(devices)


def test_devices_that_are_fixed_already_are_named_with_the_remedy() -> None:
    jaxptd.simulate(2)  # fewer devices than exist
    line = r"simulate\(9\): JAX has started already, with 8 x cpu; restart Python .* kernel"
    with pytest.raises(UserError, match=line):
        jaxptd.simulate(9)
