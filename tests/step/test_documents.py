"""Rotary positions of separate documents act as if each document began at position 0."""

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
    """Scores depend only on differences of positions, so positions need not restart."""
    rope = {"family": "qwen3", "num_kv_heads": 2, "num_layers": 1, "dtype": "float64"}
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
        apart = tiny.program(layout, documents="apart", **rope)
        whole = tiny.program(Layout(), **rope)
        batch = {"tokens": fields["tokens"], "targets": kept, "segments": numbers}
        found = apart.eval_step(apart.init_state()["params"], apart.place(batch))
        want = whole.eval_step(whole.init_state()["params"], alone)
    assert int(found["cross_entropy"]["targets"]) == 8 * (8 - FIRST)
    assert float(found["cross_entropy"]["sum"]) == pytest.approx(
        float(want["cross_entropy"]["sum"]), rel=1e-12
    )
