"""Faulty hardware and bad data, injected into a run and told apart by `train.check_steps`."""

import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from faults import with_a_flipped_bit
from runs import CONFIG, TEXT
from together import Together, trainer

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.distributed import coordination
from jaxptd.distributed.watchdog import Watchdog
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.run.recheck import Recheck
from jaxptd.step import Program

DP2_TP2 = ("--layout.dp=2", "--layout.tp=2")
HELPERS = Path(__file__).parents[1] / "helpers"
SKIPPED, REPLICAS = "--train.check_steps=skipped", "--train.check_steps=replicas"


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Changes what the train step of a run does: `change(healthy, state, batch)`."""

    def begin(change: Callable) -> None:
        original = Program.train_step.func

        def train_step(program: Program) -> Callable:
            healthy = original(program)
            return lambda state, batch: change(healthy, state, batch)

        changed = functools.cached_property(train_step)
        changed.__set_name__(Program, "train_step")
        monkeypatch.setattr(Program, "train_step", changed)

    return begin


def skip(healthy, state, batch):
    """The result of a step whose gradients are not finite: all stays, but for the counters."""
    _, metrics = healthy(jax.tree.map(jax.numpy.copy, state), batch)
    guard = state["guard"]
    counted = {name: guard[name] + 1 for name in ("skipped", "in_row")}
    state = {**state, "step": state["step"] + 1, "guard": {**guard, **counted}}
    nan = jax.numpy.float32(math.nan)
    return state, {**metrics, "loss": nan, "grad_norm": nan} | {
        "skipped": guard["skipped"] + 1,
        "skipped_in_row": guard["in_row"] + 1,
    }


def transient(at: int, times: int = 1) -> Callable:
    """Skips a step at first, and computes it right later."""
    left = [times]

    def change(healthy, state, batch):
        if int(state["step"]) + 1 == at and left[0]:
            left[0] -= 1
            return skip(healthy, state, batch)
        return healthy(state, batch)

    return change


def test_a_step_that_is_right_the_second_time_is_the_hardware_s_fault(train, inject) -> None:
    inject(transient(7))
    line = train.refused(*DP2_TP2, SKIPPED)
    assert "step 7 was skipped with loss nan, grad_norm nan; run again on the same batch" in line
    assert "one of the 4 devices computed wrong" in line
    assert "The state of step 6, before it, is saved" in line
    assert train.steps == [5, 6]


@pytest.mark.slow
def test_the_run_resumes_as_if_nothing_had_happened(train, inject, monkeypatch) -> None:
    with monkeypatch.context():
        inject(transient(7))
        train.refused(*DP2_TP2, SKIPPED)
    monkeypatch.undo()
    assert train(*DP2_TP2, SKIPPED).code == 0
    rows = train.run_dir.metrics()
    assert train(*DP2_TP2, f"--train.run_dir={train.folder / 'whole'}").code == 0
    whole = type(train.run_dir)(train.folder / "whole").metrics()
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    assert rows[-1]["skipped"] == 0


@pytest.mark.slow
def test_without_the_option_such_a_step_is_only_counted(train, inject) -> None:
    inject(transient(7))
    assert train(*DP2_TP2).code == 0
    assert train.run_dir.metrics()[-1]["skipped"] == 1


@pytest.mark.slow
def test_a_step_that_is_skipped_again_is_the_data_s_fault(train, inject) -> None:
    """Its gradient norm is above the limit whenever it is computed; the run goes on."""
    options = ("--optimizer.skip_above=1e-9", "--train.steps=2", "--checkpoint.every=0")
    ended = train(*DP2_TP2, SKIPPED, *options)
    assert ended.code == 0
    lines = [line for line in ended.out.splitlines() if "was skipped with" in line]
    assert [line.split(" with ")[0] for line in lines] == [
        "warning: step 1 was skipped",
        "warning: step 2 was skipped",
    ]
    assert "samples 0 to 7 or the parameters are the cause" in lines[0]
    assert "samples 8 to 15 or" in lines[1]
    assert train.run_dir.metrics()[-1]["skipped"] == 2


@pytest.mark.slow
def test_two_programs_that_differ_are_not_the_hardware_s_fault(train, inject) -> None:
    """The program of the metrics finds nothing wrong, but the step itself is skipped again."""
    inject(transient(7, times=2))
    ended = train(*DP2_TP2, SKIPPED)
    assert ended.code == 0, ended.err
    assert ended.out.count("warning: step 7 was skipped with") == 1
    assert train.run_dir.metrics()[-1]["skipped"] == 1


@pytest.mark.parametrize("known", [True, False])
def test_all_processes_save_if_the_first_one_does(known, monkeypatch) -> None:
    """A network's folder may look older in this process than in the first one."""
    saved: list[int] = []
    good = [] if known else [6]
    recheck = Recheck(
        SimpleNamespace(config=Config()),
        None,
        Watchdog(),
        save=lambda state, step: saved.append(step),
        good_steps=lambda: good,
        say=print,
    )
    monkeypatch.setattr(coordination, "share", lambda name, value: [str(known), value])
    assert recheck._saved({}, 6) == "The state of step 6, before it, is saved"
    assert saved == ([] if known else [6])


def test_a_device_whose_copy_differs_is_named_and_nothing_is_saved(train, inject) -> None:
    def change(healthy, state, batch):
        state, metrics = healthy(state, batch)
        if int(state["step"]) == 7:
            name = sorted(state["params"])[-1]
            params = {**state["params"], name: with_a_flipped_bit(state["params"][name], 2)}
            state = {**state, "params": params}
        return state, metrics

    inject(change)
    line = train.refused("--layout.dp=4", REPLICAS)
    assert "after step 7 copies of the same parameters or moments differ: on device 2 of" in line
    assert "unlike 3 others with the same copy" in line
    assert "the last good checkpoint is step 5" in line
    assert train.steps == [5]


@pytest.mark.slow
@pytest.mark.parametrize("how", [SKIPPED, REPLICAS])
def test_a_healthy_run_is_the_same_with_checks(train, how) -> None:
    assert train(*DP2_TP2, how).code == 0
    checked = [row["loss"] for row in train.run_dir.metrics()]
    assert train(*DP2_TP2, f"--train.run_dir={train.folder / 'other'}").code == 0
    plain = type(train.run_dir)(train.folder / "other").metrics()
    assert checked == [row["loss"] for row in plain]


# A bit of a parameter flips on a device of the second process, after step 3.
FLIP = """
import contextlib
from faults import with_a_flipped_bit
from jaxptd.step.program import Programs

ready = Programs.ready
@contextlib.contextmanager
def changed(self, name, program, *args):
    with ready(self, name, program, *args) as run:
        def flipped(state, batch):
            state, metrics = run(state, batch)
            if int(state["step"]) == 3:
                name = sorted(state["params"])[0]
                x = with_a_flipped_bit(state["params"][name], jax.local_devices()[1].id)
                state = {**state, "params": {**state["params"], name: x}}
            return state, metrics
        yield flipped if name == "train_step" and RANK else run
Programs.ready = changed
"""


@pytest.mark.slow
def test_a_device_of_another_process_is_named(tmp_path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = {"data.source": tmp_path / "text.txt", "train.run_dir": tmp_path / "run"}
    options |= {"train.steps": 6, "train.sample_tokens": 0, "layout.dp": 8}
    options |= {"train.micro_batches": 1}
    argv = ["--config", str(CONFIG), REPLICAS, *(f"--{k}={v}" for k, v in options.items())]
    helpers = f"import sys; sys.path.append({str(HELPERS)!r})\n"
    ended = Together(trainer(helpers + FLIP), argv, tmp_path).ended()
    for each in ended:
        assert each.code == 2, each.err
        assert "after step 3 copies of the same parameters or moments differ" in each.err
        assert re.search(r"on device \d+ of process 1, unlike 7 others", each.err)


def test_training_warns_of_versions_that_are_bad_on_its_devices(train, monkeypatch) -> None:
    def found(versions: dict[str, str], kinds: set[str], *, on_gpus: bool) -> list[str]:
        assert versions["jax"] == jax.__version__
        return [f"a bad version on {kinds}, {on_gpus}"]

    monkeypatch.setattr(sys.modules["jaxptd.train"], "dangerous", found)
    ended = train("--train.steps=1", "--checkpoint.every=0")
    assert "warning: a bad version on {'cpu'}, False" in ended.out.splitlines()


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["skipped", "replicas"])
def test_what_cannot_be_checked_is_refused(how) -> None:
    train = TrainConfig(check_steps=how)
    with pytest.raises(UserError, match=f"train.check_steps={how} with model.dtype=float16"):
        Config(ModelConfig(dtype="float16"), train=train)
    offload = Layout(offload="optimizer")
    if how == "skipped":
        Config(layout=offload, train=train)
    else:
        with pytest.raises(UserError, match=r"layout.offload=optimizer.*check_steps=skipped"):
            Config(layout=offload, train=train)
