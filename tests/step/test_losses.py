"""Terms of a step's loss: their weights, their metrics, and which are evaluated."""

import jax
import numpy as np
import pytest
import tiny

from jaxptd import UserError
from jaxptd.api.whole_batches import WholeBatches
from jaxptd.config import Config, ModelConfig
from jaxptd.mesh import Layout
from jaxptd.run.evaluation import mean_losses

WEIGHT = 0.25
ONE = {"num_layers": 1}


@pytest.mark.slow
def test_the_loss_has_the_mean_square_of_the_logsumexp() -> None:
    """Compares with the logits of a one-device program without the term."""
    targets = np.where(np.arange(8) < 3, -1, tiny.batch()["targets"])  # the first ones are ignored
    batch = {**tiny.batch(), "targets": targets}
    with jax.enable_x64(True):
        found = tiny.program(Layout(dp=2, tp=2), z_loss=WEIGHT, dtype="float64", **ONE)
        plain = tiny.program(Layout(), dtype="float64", **ONE)
        _, metrics = found.train_step(found.init_state(), batch)
        logits = WholeBatches(plain).logits(plain.init_state()["params"], batch)
    logsumexp, counted = np.log(np.exp(logits).sum(-1)), targets >= 0
    chosen = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    cross_entropy = (logsumexp - chosen)[counted].mean()
    squares = np.square(logsumexp[counted]).mean()
    assert metrics["cross_entropy"] == pytest.approx(cross_entropy, rel=1e-12)
    assert metrics["z_loss"] == pytest.approx(WEIGHT * squares, rel=1e-12)
    total = metrics["cross_entropy"] + metrics["z_loss"]
    assert metrics["loss"] == pytest.approx(float(total), rel=1e-12)


def test_an_evaluation_leaves_out_what_only_guides_the_training() -> None:
    program = tiny.program(Layout(), z_loss=WEIGHT, **ONE)
    params = program.init_state()["params"]
    sums = program.eval_step(params, tiny.batch())
    assert set(sums) == {"cross_entropy"}
    want = tiny.program(Layout(), **ONE).eval_step(params, tiny.batch())
    assert jax.tree.map(float, sums) == jax.tree.map(float, want)
    found = mean_losses(program.config.model, [sums, sums])
    mean = float(sums["cross_entropy"]["sum"]) / int(sums["cross_entropy"]["targets"])
    assert found == pytest.approx({"validation_loss": mean, "perplexity": np.exp(mean)}, rel=1e-6)


def test_one_term_is_the_loss_and_has_no_name_of_its_own() -> None:
    program = tiny.program(Layout(), **ONE)
    _, metrics = program.train_step(program.init_state(), tiny.batch())
    assert {"cross_entropy", "z_loss"}.isdisjoint(metrics)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"z_loss": -1}, "model.z_loss=-1.0 must be a number, 0 or more"),
        ({"logit_softcap": 0}, "model.logit_softcap=0.0 must be a number above 0"),
        ({"max_positions": 7}, "model.seq_length=8 is more than model.max_positions=7; use"),
        ({"max_positions": 9, "positions": "none"}, "model.max_positions has no effect with"),
    ],
    ids=str,
)
def test_options_that_cannot_be(fields: dict, line: str) -> None:
    with pytest.raises(UserError, match=line.replace(".", r"\.")):
        Config(ModelConfig(**{"seq_length": 8, **fields}))
