"""A run with a moving average of its parameters: evaluated, saved, read, on any layout."""

import json

import numpy as np
import pytest
from runs import CONTEXT, DP2_TP2, EVALUATION, Killed, kill_after, numbers

import jaxptd
from jaxptd import generate
from jaxptd.errors import UserError
from jaxptd.hf import convert
from jaxptd.run.saved import SavedParams
from jaxptd.train import main

AVERAGED, EXACT = "--optimizer.ema_decay=0.8", "--model.dropout=0"
NAMES = [*EVALUATION, *(f"{name}_ema" for name in EVALUATION)]


@pytest.mark.slow
def test_a_killed_run_has_the_same_average_on_another_layout(train, monkeypatch) -> None:
    other = train.folder / "other"
    out = train(AVERAGED, EXACT, *DP2_TP2, f"--train.run_dir={other}").out
    assert "validation ema " in out
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(9, patch)
        main([*train.options, AVERAGED, EXACT, *DP2_TP2, "--layout.zero=2"])
    assert "resuming at step 5" in train(AVERAGED, EXACT, *CONTEXT).out
    rows, expected = (
        numbers(jaxptd.load(folder).run_dir.metrics()) for folder in (train.run_dir.path, other)
    )
    assert [name for name in rows[-1] if "validation" in name or "perplexity" in name] == NAMES
    assert rows[-1]["validation_loss_ema"] != rows[-1]["validation_loss"]
    for row, want in zip(rows, expected, strict=True):
        assert row == pytest.approx(want, rel=1e-5)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """The directory of a run of six steps with an average."""
    folder = tmp_path_factory.mktemp("averaged")
    (folder / "text.txt").write_text("To be, or not to be, that is the question. " * 200)
    options = [AVERAGED, "--train.steps=6", "--train.eval_every=0", "--checkpoint.every=6"]
    options += [f"--data.source={folder}/text.txt", f"--train.run_dir={folder}/run"]
    jaxptd.train(jaxptd.load_config("test-tiny", options), quiet=True)
    return folder / "run"


def average_of(folder) -> dict:
    """The average in a run's checkpoint, which has one layer of parameters and averages."""
    run = jaxptd.load(folder)
    return {n: np.asarray(x) for n, x in run.program.states.averaged(run.state).items()}


def test_the_average_is_read_without_the_run(averaged) -> None:
    found, plain, expected = SavedParams(averaged, ema=True), SavedParams(averaged), {}
    expected = average_of(averaged)
    assert list(found.shapes) == list(plain.shapes)
    for name, x in expected.items():
        np.testing.assert_array_equal(found.read(name), x)
        assert np.any(plain.read(name) != x)


@pytest.mark.slow
def test_the_average_generates_and_is_exported(averaged, tmp_path, capsys) -> None:
    given = ["--run-dir", str(averaged), "--prompt", "To be", "--tokens", "30"]
    texts = []
    for options in ([], ["--ema"], ["--ema", "--tp", "2"]):
        assert generate.main([*given, *options, "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    run = jaxptd.load(averaged)
    run.state = {**run.state, "params": run.program.states.averaged(run.state)}
    expected = run.sample("To be", tokens=30)
    assert texts[1] == texts[2] == expected != texts[0]
    convert.main(["--to-hf", str(averaged), "--out", str(tmp_path / "out"), "--ema", "--quiet"])
    assert jaxptd.generate(tmp_path / "out", "To be", tokens=30) == expected


def test_an_average_that_is_not_there_is_refused(train) -> None:
    few = ("--train.steps=2", "--train.eval_every=0")
    train(*few)
    message = r"run keeps no moving average of its parameters \(optimizer.ema_decay=0.0\); leave"
    for read in (SavedParams, jaxptd.generate):
        with pytest.raises(UserError, match=message):
            read(train.run_dir.path, ema=True)
    (train.folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no run, and keeps no moving average; leave ema out"):
        jaxptd.generate(train.folder, ema=True)
    err = train.refused("--train.steps=3", "--train.eval_every=0", AVERAGED)
    assert "holds another run: optimizer.ema_decay is 0.8, was 0.0; use another directory" in err
