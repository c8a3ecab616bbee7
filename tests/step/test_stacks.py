"""Steps of a model with two stacks and common parameters equal one device's on every layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from one_device import case, hold
from toys.two_stacks import TWO_STACKS
from turns import slow

from jaxptd.analysis.compiled_step import CPU_OPTIONS
from jaxptd.analysis.count import count, count_compiled, formula
from jaxptd.costs.collective import subtract
from jaxptd.mesh import Layout
from jaxptd.models import families
from jaxptd.step import Program
from tests.pipeline.test_training import LAST_FIRST

# Five encoders and four decoders; the number of heads differs from that of other tests, which
# share a cache of one device's results with these.
SIZES = {"num_layers": 5, "num_heads": 2, "ffn_hidden_size": 20}
FIVE = {**SIZES, "dropout": 0.1}


@pytest.fixture(autouse=True)
def two_stacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the family gpt by a model with two stacks."""
    monkeypatch.setitem(families.FAMILIES, "gpt", TWO_STACKS)  # type: ignore[arg-type]
    yield


CASES = [
    case(FIVE | {"remat": "dots"}, 4, pp=2, dp=2, tp=2, zero=3, schedule="zb-v"),
    case(FIVE, 4, pp=2, dp=2, zero=3, schedule="interleaved"),
    case(FIVE, 4, pp=2, row=2, col=2),
    case(FIVE | {"remat": "full"}, 4, pp=2, cp=2, zero=2, schedule="interleaved"),
    case(FIVE | {"remat": "dots"}, 4, pp=2, tp=2, sequence_parallel=True, schedule="zb-h1"),
    case(FIVE | {"remat": "full", "remat_layers": 2}, 4, pp=2, cp=2, zero=3, schedule="zb-v"),
    case(FIVE | {"remat": "attention"}, 8, pp=4, tp=2, schedule="gpipe"),
    case(FIVE, 4, pp=4, dp=2, schedule="zb-h2", zero=1),
    case(FIVE, 4, pp=2, dp=2, stage_layers=(7, 2)),
    case(
        FIVE,
        4,
        pp=2,
        row=2,
        col=2,
        schedule="zb-v",
        attention2d="blocks",
        stage_layers=(1, 5, 0, 3),
    ),
    case(FIVE, 2, dp=2, tp=2, sequence_parallel=True, zero=3),
    case(FIVE | {"remat": "full"}, 2, row=2, col=2, zero=2),
    case(FIVE | {"scan_layers": False, "remat": "dots"}, 2, cp=2),
    case(FIVE | {"scan_layers": False}, 4, pp=2, schedule="interleaved"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), CASES)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


@pytest.mark.slow
def test_a_table_from_a_file_equals_one_device(tmp_path: Path) -> None:
    path = tmp_path / "last-first.csv"
    path.write_text(LAST_FIRST)
    hold(Layout(pp=2, schedule=str(path)), micro_batches=4, **FIVE)


# ---- what moves, and where parameters are -------------------------------------------------------

COUNTED = [
    slow(Layout(pp=2, dp=2, tp=2, sequence_parallel=True, zero=3, schedule="zb-v"), {}),
    slow(Layout(pp=2, cp=2, tp=2, schedule="1f1b"), {"remat": "full"}),
    slow(Layout(pp=2, dp=2, zero=3, schedule="zb-h1"), {"remat": "dots", "remat_layers": 1}),
    slow(Layout(dp=2, tp=2, sequence_parallel=True, zero=2), {}),
    (Layout(pp=2, dp=2), {"micro_batches": 2}),
]


def program(layout: Layout, **choice: Any) -> Program:
    return tiny.program(layout, **SIZES | {"micro_batches": 4} | choice)


@pytest.mark.parametrize(("layout", "choice"), COUNTED, ids=str)
def test_what_moves_is_what_the_formula_says(layout: Layout, choice: dict) -> None:
    """A hop carries two arrays, and common parameters move like those of embedding and head."""
    made = program(layout, **choice)
    assert subtract(count(made), formula(made)) == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "1f1b"])
def test_xla_moves_no_collective_out_of_a_loop_that_leaves_the_source_as_it_is(schedule) -> None:
    """A decoder's norm of the source all-reduces over col in every layer."""
    made = program(Layout(pp=2, row=2, col=2, matmul2d="gather", schedule=schedule))

    def moved(found: Any) -> tuple[int, int]:
        over = [each for each in found if each.axes == ("col",)]
        return sum(each.count for each in over), sum(each.bytes for each in over)

    assert moved(count_compiled(made, CPU_OPTIONS)) <= moved(count(made))


def test_common_parameters_are_sharded_over_stages_and_layers_are_in_rows_of_their_stack() -> None:
    infos = program(Layout(pp=2, schedule="zb-v")).infos
    norm = infos["common.norm.w"]
    assert (norm.stack, norm.stored_shape, norm.axes) == (None, (16,), {"pp"})
    up, other = infos["encoder.mlp.up.w"], infos["decoder.mlp.up.w"]
    assert (up.stack, up.stored_shape[0], up.rows) == ("encoder", 6, (0, 1, 2, 3, 4))
    assert (other.stack, other.stored_shape[0], other.rows) == ("decoder", 4, (2, 3, 0, 1))
    one_chunk = program(Layout(pp=2)).infos
    assert one_chunk["encoder.mlp.up.w"].stored_shape[0] == 10
    assert one_chunk["decoder.mlp.up.w"].stored_shape[0] == 8


@pytest.mark.slow
def test_an_evaluation_equals_one_device() -> None:
    found = []
    for layout in (Layout(), Layout(pp=2, tp=2, schedule="zb-v"), Layout(pp=2, zero=3, dp=2)):
        one = program(layout)
        sums = one.eval_step(one.init_state()["params"], one.place(tiny.batch()))
        found.append(float(jax.tree.leaves(sums["cross_entropy"]["sum"])[0]))
    np.testing.assert_allclose(found, found[0], rtol=1e-6)
