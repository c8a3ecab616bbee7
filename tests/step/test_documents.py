"""Positions of separate documents act as if each document began at position 0."""

import jax
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd.mesh import Layout

LAYOUTS = [Layout(cp=2), slow(Layout(cp=2, tp=2)), slow(Layout(row=2, col=2))]
FIRST = 5  # tokens of the first document; the second has 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_document_has_the_loss_that_it_has_alone(layout: Layout) -> None:
    """Scores depend only on differences of positions, so rotary positions need not restart."""
    rope = {"family": "qwen3", "num_kv_heads": 2, "num_layers": 1, "dtype": "float64"}
    found, want = both_losses(layout, rope)
    assert found == pytest.approx(want, rel=1e-12)


PLACED = Layout(cp=2, ring="gather", balance="tokens")


@pytest.mark.parametrize("layout", [slow(Layout()), Layout(cp=2, tp=2), slow(PLACED)], ids=str)
def test_learned_positions_restart_if_they_are_told_to(layout: Layout) -> None:
    learned = {"num_layers": 1, "dtype": "float64"}
    found, want = both_losses(layout, learned, restart_positions=True)
    assert found == pytest.approx(want, rel=1e-12)
    found, want = both_losses(layout, learned)
    assert found != pytest.approx(want, rel=1e-6)


def both_losses(layout: Layout, model: dict, **data: bool) -> tuple[float, float]:
    """The loss of the second documents of packed sequences, and of the same ones alone."""
    fields = tiny.batch()
    second = fields["tokens"][:, FIRST:], fields["targets"][:, FIRST:]
    rest = np.zeros((8, FIRST), np.int32)
    alone = {
        "tokens": np.hstack([second[0], rest]),
        "targets": np.hstack([second[1], rest - 1]),  # the padding is ignored
    }
    numbers = np.tile((np.arange(8) >= FIRST).astype(np.int32), (8, 1))
    kept = np.where(numbers == 1, fields["targets"], -1)
    with jax.enable_x64(True):
        apart = tiny.program(layout, documents="apart", **data, **model)
        whole = tiny.program(Layout(), **model)
        batch = {"tokens": fields["tokens"], "targets": kept, "segments": numbers}
        found = apart.eval_step(apart.init_state()["params"], apart.place(batch))
        want = whole.eval_step(whole.init_state()["params"], alone)
    assert int(found["cross_entropy"]["targets"]) == 8 * (8 - FIRST)
    return tuple(float(each["cross_entropy"]["sum"]) for each in (found, want))
