"""The loss of pairs of answers: its value, and every layout computes what one device does."""

from typing import Any

import jax
import numpy as np
import pytest
import tiny
from one_device import case, hold, verified
from turns import slow

from jaxptd import comms
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.mesh import Layout
from jaxptd.models.decoder import pair_numbers

PAIRS = {"documents": "whole", "positions": "rope", "seq_length": 16, "batch": 12}
DPO = PAIRS | {"preference.loss": "sigmoid"}
IPO = PAIRS | {"preference.loss": "ipo", "preference.beta": 0.3}
LEARNED = {"positions": None}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(IPO, 2, dp=2, tp=2, sequence_parallel=True, zero=3),
        case(DPO | LEARNED, 2, pp=2, cp=2),
        *(
            slow(*each.values)
            for each in (
                case(DPO, 2, dp=2, ulysses=2),
                case(IPO, 1, row=2, col=2),
                case(DPO | {"batch": 8}, 4, pp=2, tp=2, schedule="zb-h1"),
                case(IPO | LEARNED, 2, dp=2, cp=2, ring="gather", balance="tokens"),
                case(DPO, 2, dp=2, balance="samples", zero=2),
                case(DPO | tiny.MOE | {"moe.balance_loss": 0.5, "batch": 8}, 2, dp=2, ep=2),
                case(IPO | tiny.LATENT, 2, cp=2, tp=2),
                case(DPO | {"lora.rank": 2}, 2, tp=2, cp=2, sequence_parallel=True),
                case(IPO | {"frozen": ("*table",), "batch": 8}, 2, replicas=2, dp=2, zero=3),
                case(DPO | {"dropout": 0.1, "scan_layers": False}, 2, dp=2, zero=1),
            )
        ),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_verified(dtype: str) -> None:
    assert verified(Layout(dp=2, cp=2, tp=2), dtype, **DPO | {"batch": 8}).wrong == []


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(pp=2, cp=2), DPO),
        (Layout(row=2, col=2), IPO),
        slow(Layout(dp=2, ulysses=2, tp=2, sequence_parallel=True), DPO | {"batch": 8}),
    ],
    ids=str,
)
def test_the_jaxpr_sends_what_the_formula_says(layout: Layout, choice: dict) -> None:
    program = tiny.program(layout, **choice)
    assert comms.subtract(comms.count(program), comms.formula(program)) == []


# ---- what it computes ----------------------------------------------------------------------------


def log_probabilities(layout: Layout, **choice: Any) -> np.ndarray:
    program = tiny.program(layout, dtype="float64", **choice)
    params = program.init_state()["params"]
    return np.asarray(program.log_probabilities(params, random_batch(program.config)))


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(pp=2, cp=2), DPO | LEARNED),
        slow(Layout(dp=2, balance="samples", tp=2), DPO | LEARNED),
        slow(Layout(row=2, col=2), DPO),
    ],
    ids=str,
)
def test_log_probabilities_of_documents_are_one_device_s(layout: Layout, choice: dict) -> None:
    with jax.enable_x64(True):
        expected = log_probabilities(Layout(), **choice)
        found = log_probabilities(layout, **choice)
    assert expected.shape == (12, 10)
    np.testing.assert_allclose(found, expected, rtol=1e-13)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("choice", [DPO, IPO])
def test_the_loss_and_the_scores_are_those_of_the_papers(choice: dict) -> None:
    """From sums of log-probabilities of each document, which are the logits' softmax."""
    with jax.enable_x64(True):
        program = tiny.program(Layout(), dtype="float64", **choice)
        state = program.init_state()
        batch = random_batch(program.config)
        sums_BK = np.asarray(program.log_probabilities(state["params"], batch))
        loss = float(program.gradients(state, batch)[0])
        found = jax.device_get(program.eval_step(state["params"], batch))
    beta = program.config.model.preference.beta
    losses, better, gains = [], [], []
    for row in range(len(sums_BK)):
        counted_T = batch["targets"][row] >= 0
        for pair in range(sums_BK.shape[1] // 2):
            gain, size = [], []
            for document in (2 * pair, 2 * pair + 1):
                inside_T = batch["segments"][row] == document
                gain.append(sums_BK[row, document] - batch["reference"][row][inside_T].sum())
                size.append((inside_T & counted_T).sum())
            if not size[0]:
                continue
            if choice["preference.loss"] == "ipo":
                means = [x / max(n, 1) for x, n in zip(gain, size, strict=True)]
                losses.append((means[0] - means[1] - 1 / (2 * beta)) ** 2)
            else:
                losses.append(-np.log(sigmoid(beta * (gain[0] - gain[1]))))
            better.append(gain[0] > gain[1])
            gains.append(gain)
    assert loss == pytest.approx(np.mean(losses), rel=1e-12)
    assert len(losses) > 12
    assert 0 < sum(better) < len(better)
    expected = {
        "preference_loss": np.sum(losses),
        "accuracy": np.sum(better),
        "chosen_reward": beta * np.sum(gains, 0)[0],
        "rejected_reward": beta * np.sum(gains, 0)[1],
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name]["targets"] == len(losses)
        assert float(found[name]["sum"]) == pytest.approx(value, rel=1e-12)


def test_a_document_s_log_probability_is_that_of_the_text_alone() -> None:
    with jax.enable_x64(True):
        program = tiny.program(Layout(), dtype="float64", **DPO)
        params = program.init_state()["params"]
        batch = random_batch(program.config)
        sums_BK = np.asarray(program.log_probabilities(params, batch))
        row, segment_T = 0, batch["segments"][0]
        document = segment_T.max()
        inside_T = segment_T == document
        alone = {name: np.zeros_like(x) for name, x in batch.items()}
        for name in ("targets", "segments"):
            alone[name] -= 1
        size = int(inside_T.sum())
        for name in ("tokens", "targets"):
            alone[name][0, :size] = batch[name][row][inside_T]
        alone["segments"][0, :size] = 0
        found = np.asarray(program.log_probabilities(params, alone))
    assert document > 0
    assert found[0, 0] == pytest.approx(sums_BK[row, document], rel=1e-13)
    assert not found[1:].any()


def test_a_pair_is_numbered_at_the_first_target_of_its_chosen_text() -> None:
    target = np.array([[-1, 5, 6, -1, 7, -1, -1, 3, 2, 4]])
    segment = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 3, -1]])
    assert pair_numbers(target, segment).tolist() == [[-1, 0, -1, -1, -1, -1, -1, 1, -1, -1]]
