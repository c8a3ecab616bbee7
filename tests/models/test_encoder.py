"""BERT: its counts, layouts, and that it ignores padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd import Layout
from jaxptd.models.families import family_of


@pytest.mark.parametrize("layout", [Layout(), slow(Layout(cp=2, tp=2, ring="blockwise"))], ids=str)
def test_losses_are_means_over_their_own_targets_and_see_no_padding(layout: Layout) -> None:
    program = tiny.program(layout, family="bert", dtype="float32")
    drawn = family_of(program.config.model).draw(program.config, np.random.default_rng(0))
    params = program.init_state()["params"]
    sums = program.eval_step(params, program.place(drawn))
    assert int(sums["mlm"]["targets"]) == (drawn["targets"] >= 0).sum()
    assert int(sums["nsp"]["targets"]) == 8
    others = np.where(drawn["mask"] == 0, (drawn["tokens"] + 1) % tiny.VOCAB, drawn["tokens"])
    assert (others != drawn["tokens"]).any()
    again = program.eval_step(params, program.place({**drawn, "tokens": others}))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, sums, again))
    _, metrics = program.train_step(program.init_state(), program.place(drawn))
    for name in ("mlm", "nsp"):
        mean = float(sums[name]["sum"]) / int(sums[name]["targets"])
        assert float(metrics[name]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["loss"]) == pytest.approx(
        float(metrics["mlm"]) + float(metrics["nsp"]), rel=1e-6
    )


BERT = {"family": "bert", "dropout": 0.1}
FOUR = {"num_layers": 4, "micro_batches": 4}
UNEVEN = {"hidden_size": 15, "num_heads": 3, "ffn_hidden_size": 23}  # not divisible by any grid


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(dp=2, cp=2, tp=2, ring="blockwise", zero=3), {}),
        slow(Layout(pp=2, row=2, col=2, schedule="zb-v"), FOUR),
        slow(Layout(pp=2, tp=2), FOUR | {"head_sizes": (2, 6)}),
        slow(tiny.SEQUENCE_PARALLEL, {"remat": "full"}),
        slow(Layout(cp=4), {"remat": "dots"}),
        slow(Layout(cp=4, ring="rsa"), {}),
        slow(Layout(dp=2, cp=4, ring="gather", zero=2), {}),
        slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="fox"), UNEVEN),
        slow(Layout(cp=2, row=2, col=2, attention2d="blocks", ring="blockwise"), UNEVEN),
        slow(Layout(pp=2, dp=2, tp=2, schedule="interleaved", zero=2), FOUR),
        slow(Layout(tp=2, offload="activations"), {"remat": "dots"}),
    ],
    ids=str,
)
def test_an_encoder_with_two_losses_is_equal_to_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **BERT, **choice)
