"""Checkpoints that are damaged or from another run give one line, and no file changes."""

import shutil
from types import SimpleNamespace

import pytest
from bad_files import base, changed
from damage import DAMAGE, change_and_seal
from runs import TEXT

from jaxptd.data.tokenizers import with_vocabulary
from jaxptd.mesh import make_mesh
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir
from jaxptd.step import Program


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The run directory of a run that saved at steps 3 and 5."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "text.txt").write_text(TEXT)
    config = with_vocabulary(changed(base(), {"data.source": "text.txt", "train.steps": 9}))
    program = Program(config, make_mesh(config.layout))
    run = RunCheckpoints(program, RunDir(folder), lambda line: None)
    run.run_dir.open(config, step=0)
    state = program.init_state()
    for step in (3, 5):
        run.save(state | {"step": state["step"] + step}, step, None)
    run.store.wait()
    return SimpleNamespace(config=config, folder=folder)


def of_config(change):
    def damage(folder):
        change_and_seal(folder, lambda manifest: change(manifest["description"]))

    return damage


CONFIGS = {
    "no config": (lambda d: d.pop("config") and None, "does not say which run it belongs to"),
    "a list": (lambda d: d.update(config=[]), "does not say which run it belongs to"),
    "text": (lambda d: d.update(config="text"), "does not say which run it belongs to"),
    "a section": (lambda d: d["config"].update(model=3), "does not say which run it belongs to"),
    "more": (lambda d: d["config"].update(more={}), "does not say which run it belongs to"),
    "a field": (lambda d: d["config"]["model"].update(a=1), "does not say which run it belongs to"),
    "a type": (lambda d: d["config"]["model"].update(num_layers=[2]), ""),
    "a value": (
        lambda d: d["config"]["train"].update(steps=-1),
        "does not say which run it belongs to",
    ),
    "a seed": (
        lambda d: d["config"]["train"].update(seed=7),
        "belongs to another run: train.seed is 0",
    ),
}


@pytest.mark.parametrize(
    ("name", "resume"),
    [*((name, "path") for name in CONFIGS), ("no config", "auto"), ("a seed", "auto")],
)
def test_a_checkpoint_that_is_of_no_run_or_another_is_one_line(
    saved, tmp_path, refused, name, resume
):
    change, words = CONFIGS[name]
    shutil.copytree(saved.folder, tmp_path / "run")
    of_config(change)(tmp_path / "run" / "checkpoints" / "00000005")
    fields = {"train.run_dir": "run"}
    if resume == "path":
        fields = {"checkpoint.resume": "run/checkpoints/00000005"}
    assert words in refused(fields, saved.config)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_by_path_is_one_line(saved, tmp_path, refused, damage):
    folder = tmp_path / "run" / "checkpoints" / "00000005"
    shutil.copytree(saved.folder, tmp_path / "run")
    damage(folder)
    line = refused({"checkpoint.resume": str(folder)}, saved.config)
    assert f"checkpoint {folder} is damaged: " in line
    assert DAMAGE[damage] in line


def test_a_config_is_not_rewritten_before_a_refusal(saved, tmp_path, refused):
    """`refused` compares every byte; the config names more steps than before."""
    shutil.copytree(saved.folder, tmp_path / "run")
    fields = {"train.run_dir": "run", "train.steps": 99, "checkpoint.resume": "best"}
    assert "no good checkpoint in run/checkpoints has a validation_loss" in refused(
        fields, saved.config
    )
    (tmp_path / "text.txt").write_text("short")
    assert "one sequence takes" in refused(fields, saved.config)
