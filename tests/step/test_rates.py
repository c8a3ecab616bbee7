"""Factors of the learning rate by names of parameters, for every optimizer and on every layout."""

from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest
import tiny
from one_device import case, hold
from turns import by_turns

from jaxptd import comms, load_config
from jaxptd.config import OptimizerName
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.train import main

RATES = (("tokens.*", 0.25), ("*.up.?", 4.0))
LAYOUTS = [
    Layout(dp=2, tp=2, zero=1),
    Layout(pp=2, dp=2, zero=3),
    Layout(offload=("optimizer", "parameters")),
    Layout(tp=2),
    Layout(dp=2, zero=2),
]


def moves(layout: Layout, **choice: Any) -> dict[str, np.ndarray]:
    """What a step subtracts from each parameter; no bias of keys, whose gradient is noise."""
    program = tiny.program(layout, dtype="float64", linear_bias="none", **choice)
    state = program.init_state()
    before = jax.tree.map(np.asarray, program.canonical(state["params"]))
    after, _ = program.train_step(state, tiny.batch())
    return {n: before[n] - np.asarray(x) for n, x in program.canonical(after["params"]).items()}


@pytest.mark.parametrize(("layout", "optimizer"), by_turns(LAYOUTS, get_args(OptimizerName)))
def test_a_factor_scales_the_step_and_the_decay(layout: Layout, optimizer: OptimizerName) -> None:
    with jax.enable_x64(True):
        plain, found = (moves(layout, optimizer=optimizer, rates=x) for x in ((), RATES))
    factors = {"tokens.table": 0.25, "blocks.mlp.up.w": 4.0}
    assert factors.keys() <= plain.keys()
    for name, step in plain.items():
        expected = factors.get(name, 1.0) * step
        assert np.any(expected)
        np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-14, err_msg=name)


CHOICE = {"rates": RATES, "dropout": 0.1}


@pytest.mark.slow  # the test above holds by default
@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(CHOICE, 2, dp=2, tp=2, zero=2),
        case(CHOICE | {"optimizer": "muon"}, 2, pp=2, dp=2, zero=1),
        case(CHOICE | {"optimizer": "sgd"}, 1, row=2, col=2),
        case(CHOICE | {"ema_decay": 0.9}, 2, dp=2, zero=3, offload="optimizer"),
    ],
)
def test_steps_with_factors_equal_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


def test_factors_send_nothing() -> None:
    layout = Layout(dp=2, tp=2, zero=2)
    assert comms.count(tiny.program(layout, rates=RATES)) == comms.count(tiny.program(layout))


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"blocks.mpl.*": 2.0}, r"'blocks.mpl.\*' names no parameter that the optimizer updates"),
        ({"token.table": 2.0}, "'token.table' names no parameter .*did you mean tokens.table"),
        ({"*.w": 2.0, "blocks.*": 3.0}, r"'\*.w' and 'blocks.\*' both name blocks.attention.*w; l"),
        ({"*.load_bias": 2.0}, r"'\*.load_bias' names no parameter that the optimizer updates"),
    ],
)
def test_patterns_that_name_nothing_or_the_same_are_refused(rates: dict, message: str) -> None:
    sparse = {**tiny.MOE, "moe.bias_rate": 0.1}
    with pytest.raises(UserError, match=message):
        tiny.program(Layout(), rates=tuple(rates.items()), **sparse).init_state()


def test_a_run_says_its_factors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question. " * 99)
    options = ["--train.steps=1", "--train.eval_every=0", "--train.sample_tokens=0"]
    places = [f"--data.source={tmp_path}/text.txt", f"--train.run_dir={tmp_path}/run"]
    rates = "--optimizer.rates={tokens.*: 0.5, blocks.*.w: 2}"
    assert main(["--config", "test-tiny", *options, *places, rates]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "learning rate x 0.5: tokens.*; learning rate x 2: blocks.*.w; " in said
    found = load_config(tmp_path / "run" / "config.yaml").optimizer.rates
    assert found == {"tokens.*": 0.5, "blocks.*.w": 2.0}
