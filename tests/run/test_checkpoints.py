"""A run's checkpoints: how they are saved, described and chosen for resuming."""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from turns import slow

from jaxptd.commands.command_line import load_config
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
from jaxptd.run.checkpoints import RunCheckpoints, require_metric, without_best
from jaxptd.run.evaluation import rises
from jaxptd.run.folder import RunDir
from jaxptd.step import Program

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"
LAW, NOTHING = "--data.validation={law: law.txt}", "--data.validation_fraction=0"
LOSSES = {5: 3.0, 10: 2.0, 15: 2.5, 20: None}


def config_with(*overrides):
    return load_config(CONFIG, ["--model.vocab_size=13", *overrides])


@pytest.fixture(scope="module")
def state():
    return program().init_state()


def program(*overrides):
    config = config_with(*overrides)
    return Program(config, make_mesh(config.layout))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, state):
    """The directory of a run that saved at the steps of LOSSES."""
    path = tmp_path_factory.mktemp("saved")
    first = RunCheckpoints(program("--checkpoint.keep=9"), RunDir(path), pytest.fail)
    for step, loss in LOSSES.items():
        row = {"step": step} if loss is None else {"step": step, "validation_loss": loss}
        first.save(state | {"step": state["step"] + step}, step, row)
    first.store.wait()
    return path


@pytest.fixture
def saved(tmp_path, folder):
    """Opens the checkpoints of a copy of that run; `lines` collects the output."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)

    def opened(*overrides):
        lines = []
        each = RunCheckpoints(program(*overrides), RunDir(tmp_path), lines.append)
        return SimpleNamespace(checkpoints=each, store=each.store, lines=lines)

    return opened


def test_the_validation_loss_is_saved_with_the_step(saved):
    store = saved().store
    assert [store.description(step).get("validation_loss") for step in LOSSES] == [*LOSSES.values()]
    assert store.best() == 10


def test_best_goes_on_from_the_lowest_validation_loss(saved, tmp_path, state):
    run = saved("--checkpoint.resume=best")
    best = run.checkpoints.start()
    assert int(best["step"]) == 10
    jax.tree.map(np.testing.assert_array_equal, best["params"], state["params"])
    assert run.lines == [f"resuming at step 10 from {tmp_path}/checkpoints"]
    assert run.store.steps() == [5, 10, 15, 20]  # nothing changes before the run begins
    run.checkpoints.begin(10)
    assert run.lines[1:] == [
        f"warning: step {step} is later than step 10: moved to "
        f"{tmp_path}/checkpoints/{step:08d}.aside"
        for step in (15, 20)
    ]
    assert run.store.steps() == [5, 10]
    assert int(saved().checkpoints.start()["step"]) == 10


def test_auto_goes_on_from_the_newest(saved):
    assert int(saved().checkpoints.start()["step"]) == 20


def test_without_an_evaluated_checkpoint_there_is_no_best(tmp_path):
    run = RunCheckpoints(program("--checkpoint.resume=best"), RunDir(tmp_path), pytest.fail)
    with pytest.raises(UserError, match=r"no good checkpoint in .* has a validation_loss; use"):
        run.start()


def test_best_of_another_run_is_refused_and_nothing_is_moved(saved):
    run = saved("--checkpoint.resume=best", "--train.seed=7")
    with pytest.raises(UserError, match="belongs to another run: train.seed is 7, was 0"):
        run.checkpoints.start()
    assert run.store.steps() == [*LOSSES]


@pytest.mark.parametrize("behind", [True, False])
def test_saving_behind_the_step_or_not(saved, state, behind, monkeypatch):
    run = saved(f"--checkpoint.asynchronous={str(behind).lower()}", "--checkpoint.keep=9")
    called = []
    for name in ("save", "save_async"):
        monkeypatch.setattr(run.store, name, lambda *_, name=name, **__: called.append(name))
    run.checkpoints.save(state, 25, None)
    assert called == ["save_async" if behind else "save"]


@pytest.mark.parametrize(
    ("every", "evaluated", "keep_best", "warned"),
    [
        (5, 10, 1, False),
        (7, 4, 1, True),  # they coincide only at step 28, the last
        (7, 4, 0, False),
        (0, 4, 1, False),
        (7, 0, 1, False),  # no evaluations requested
        (28, 5, 1, False),  # only the last step is saved, and evaluated
        (3, 9, 1, False),
        (9, 7, 1, True),
    ],
)
def test_a_best_that_cannot_be_is_warned_of(every, evaluated, keep_best, warned):
    line = without_best(
        config_with(
            f"--checkpoint.every={every}",
            f"--train.eval_every={evaluated}",
            f"--checkpoint.keep_best={keep_best}",
            "--train.steps=28",
        )
    )
    assert bool(line) == warned
    if line:
        assert f"make checkpoint.every={every} a multiple of train.eval_every={evaluated}" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--checkpoint.best_metric=perplexity"], None),
        ([LAW, "--checkpoint.best_metric=validation_loss/law"], None),
        ([NOTHING], None),  # the default may be missing
        (
            ["--checkpoint.best_metric=validation_loss/law"],
            "checkpoint.best_metric=validation_loss/law: no evaluation measures it; use one of "
            "validation_loss, perplexity",
        ),
        ([NOTHING, "--checkpoint.best_metric=perplexity"], "measures it; set data.validation"),
        (
            ["--checkpoint.best_metric=perplexity", "--train.eval_every=0"],
            "checkpoint.best_metric=perplexity with train.eval_every=0: nothing is evaluated; "
            "leave one of them out",
        ),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(options, words):
    with pytest.raises(UserError) if words else contextlib.nullcontext() as found:
        require_metric(config_with(*options))
    assert words is None or words in str(found.value)


def test_a_default_that_only_sets_could_replace_is_warned_of():
    line = without_best(config_with(LAW, NOTHING))
    assert line == (
        "warning: checkpoint.keep_best=1 finds no checkpoint: nothing is held out for "
        "validation_loss; use checkpoint.best_metric=validation_loss/law, or checkpoint.keep_best=0"
    )
    every = ("--train.eval_every=10", "--checkpoint.every=10")
    metric = "--checkpoint.best_metric=validation_loss/law"
    assert without_best(config_with(LAW, NOTHING, metric, *every)) is None


@pytest.mark.parametrize(
    ("metric", "highest"),
    [
        ("validation_loss", False),
        ("validation_dice_loss", False),
        ("validation_hd95", False),
        ("validation_dice", True),
        ("validation_dice_2", True),
        ("validation_accuracy", True),
        ("validation_chosen_reward", True),
        ("validation_rejected_reward", False),
    ],
)
def test_of_scores_the_highest_is_the_best(metric, highest):
    assert rises(metric) == highest


# ---- states in memory ------------------------------------------------------------------------

OFFLOADED = "--layout.dp=2 --layout.zero=3 --layout.offload=[optimizer,parameters]"
LAYOUTS = [
    OFFLOADED,
    "--layout.pp=2 --layout.tp=2",
    slow("--layout.dp=2 --layout.zero=1 --model.dtype=bfloat16"),
    slow("--layout.row=2 --layout.col=2"),
    slow("--layout.cp=2 --layout.zero=2"),
    slow("--layout.replicas=2 --layout.dp=2 --layout.zero=3"),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_in_memory_is_that_of_every_layout(tmp_path, layout):
    memory = ("--checkpoint.memory_every=1", f"--checkpoint.memory_dir={tmp_path}")
    made = program(*layout.split(), *memory)
    state = made.init_state()
    first = RunCheckpoints(made, RunDir(tmp_path), pytest.fail)
    first.begin(0)
    first.keep(state | {"step": state["step"] + 7}, 7)
    first.memory.wait()
    same = RunCheckpoints(made, RunDir(tmp_path), lambda line: None).start()
    assert int(same.pop("step")) == 7
    del state["step"]
    jax.tree.map(np.testing.assert_array_equal, same, state)
    for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, y.ndim)
        assert x.sharding.memory_kind == y.sharding.memory_kind
    dtype = [each for each in layout.split() if "dtype" in each]
    alone = RunCheckpoints(program(*dtype, *memory), RunDir(tmp_path), lambda line: None).start()
    assert int(alone["step"]) == 7


def test_the_newer_of_store_and_memory_is_resumed_from(saved, tmp_path, state):
    """The store has steps up to 20."""
    memory = ("--checkpoint.memory_every=1", f"--checkpoint.memory_dir={tmp_path}")
    for step, newest in ((18, 20), (20, 20), (22, 22)):
        run = saved(*memory)
        run.checkpoints.begin(0)
        run.checkpoints.keep(state | {"step": state["step"] + step}, step)
        run.checkpoints.memory.wait()
        assert int(saved(*memory).checkpoints.start()["step"]) == newest
    run = saved(*memory)
    shutil.rmtree(run.store._folders.folder(20) / "arrays")
    run.checkpoints.begin(0)
    run.checkpoints.keep(state | {"step": state["step"] + 18}, 18)
    run.checkpoints.memory.wait()
    again = saved(*memory)
    assert int(again.checkpoints.start()["step"]) == 18  # 20 is damaged, and 15 older
    assert "is damaged" in again.lines[0]


def test_another_runs_state_in_memory_is_refused(tmp_path, state):
    memory = ("--checkpoint.memory_every=1", f"--checkpoint.memory_dir={tmp_path}")
    first = RunCheckpoints(program(*memory), RunDir(tmp_path), pytest.fail)
    first.begin(0)
    first.keep(state, 7)
    first.memory.wait()
    other = RunCheckpoints(program(*memory, "--train.seed=7"), RunDir(tmp_path), pytest.fail)
    with pytest.raises(UserError, match="belongs to another run: train.seed is 7, was 0"):
        other.start()


def test_a_run_that_ends_without_memory_forgets_it(tmp_path, state):
    memory = ("--checkpoint.memory_every=1", f"--checkpoint.memory_dir={tmp_path}")
    first = RunCheckpoints(program(*memory), RunDir(tmp_path), pytest.fail)
    first.begin(0)
    first.keep(state | {"step": state["step"] + 7}, 7)
    first.memory.wait()
    RunCheckpoints(program(), RunDir(tmp_path), pytest.fail).begin(0)
    again = RunCheckpoints(program(*memory), RunDir(tmp_path), pytest.fail)
    assert int(again.start()["step"]) == 0


def test_the_only_state_stays_when_a_run_ends_without_saving(tmp_path, state):
    """With `checkpoint.every=0` a run may be stopped before it keeps another one."""
    memory = ("--checkpoint.memory_every=5", f"--checkpoint.memory_dir={tmp_path}")
    memory = (*memory, "--checkpoint.every=0")
    first = RunCheckpoints(program(*memory), RunDir(tmp_path), pytest.fail)
    first.begin(0)
    first.keep(state | {"step": state["step"] + 5}, 5)
    first.memory.wait()
    second = RunCheckpoints(program(*memory), RunDir(tmp_path), lambda line: None)
    restored = second.start()
    second.begin(5)
    with second.keeping(restored, 5):
        pass
    third = RunCheckpoints(program(*memory), RunDir(tmp_path), lambda line: None)
    assert int(third.start()["step"]) == 5
