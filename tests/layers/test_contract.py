"""Every layer on every layout against the same layer on one device."""

import jax
import pytest
from contract import Case, hold
from turns import by_turns, slow

from jaxptd.mesh import Layout
from tests.layers.cases import CASES

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=4, sequence_parallel=True),
    Layout(dp=2, tp=2),
    Layout(dp=2, cp=4, ring="blockwise"),
    Layout(cp=2, tp=4, sequence_parallel=True, ring="blockwise"),
    Layout(tp=2, cp=2, sequence_parallel=True, collective_matmul=True, ring="blockwise"),
    Layout(dp=2, tp=4, sequence_parallel=True, collective_matmul=True),
    Layout(dp=2, tp=4, sequence_parallel=True),
]
GRIDS = [
    Layout(row=2, col=4, ring="blockwise"),
    Layout(row=4, col=2, ring="blockwise"),
    Layout(row=2, col=2, cp=2, ring="blockwise"),
    Layout(dp=2, row=2, col=2, ring="blockwise", matmul2d_slices=3),  # every size is padded
]
ALGORITHMS = [
    Layout(row=2, col=2, ring="blockwise", matmul2d="summa"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d="summa"),
    Layout(row=2, col=2, ring="blockwise", matmul2d="fox"),
    Layout(row=2, col=2, attention2d="blocks", matmul2d="fox"),
    Layout(dp=2, row=2, col=2, attention2d="blocks", matmul2d="cannon"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d_slices=2),  # H is padded
]
BY_NAME = {case.name: case for case in CASES}
CORE = [BY_NAME["attention, dropout 0.3"], BY_NAME["block, dropout 0.3"]]
BIASED = "attention to all tokens, biased"
CROSS = ("cross-attention, dropout 0.0", "cross-attention, dropout 0.3")
ON_GRIDS = [
    CORE[0],
    BY_NAME[BIASED],
    CORE[1],
    BY_NAME[CROSS[1]],
    BY_NAME["attention in groups, dropout 0.3"],
]


# Layouts that can tell a layer apart which treats each token by itself: sequences of a batch and
# blocks of a sequence are alike to it. A block has an attention inside; of the pairs with and
# without dropout one is held on every layout.
BY_TOKEN = {
    "column",
    "column, gathered, no bias",
    "row",
    "row, whole input, no bias",
    "square",
    "norm",
    "rms norm",
    "mlp",
    "mlp, gated",
}
GROUPS = {"attention in groups, dropout 0.0", "attention in groups, dropout 0.3"}
REPEATED = {"attention, dropout 0.3", "block, dropout 0.0", "block, norms of sums"}
IN_BLOCK = "attention, dropout 0.0"  # which the block with dropout has, too
TELLING = [LAYOUTS[-1], GRIDS[-1]]
DIFFERENT = [*LAYOUTS[5:8], *GRIDS[2:]]  # rings of every kind, and what others have one by one


def by_default(case: Case, layout: Layout) -> bool:
    if case.name in GROUPS:
        return case.name.endswith("0.3") and layout in (LAYOUTS[1], GRIDS[2])
    if case.name in REPEATED:
        return layout == GRIDS[0]
    if case.name == IN_BLOCK:
        return layout in (DIFFERENT[0], DIFFERENT[-1])
    if case == CORE[1]:
        return layout in (LAYOUTS[1], LAYOUTS[6], GRIDS[2])
    if case.name == BIASED:
        return layout == LAYOUTS[5]
    if case.name in CROSS:
        return case.name == CROSS[1] and layout == GRIDS[2]
    if case.name == "mlp, gated":
        return layout in (TELLING[0], TELLING[-1])
    return layout in (TELLING if case.name in BY_TOKEN else DIFFERENT)


PAIRS = [
    pytest.param(
        case,
        layout,
        id=f"{case.name}-{layout}",
        marks=[] if by_default(case, layout) else [pytest.mark.slow],
    )
    for case in CASES
    for layout in (*LAYOUTS, *GRIDS)
]


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_layer_is_the_layer_on_one_device(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.parametrize(("layout", "case"), by_turns(ALGORITHMS, ON_GRIDS), ids=str)
def test_with_every_algorithm_and_attention_in_blocks(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_is_the_layer_on_one_device_in_float32(case: Case) -> None:
    hold(case, LAYOUTS[-1], dtype="float32")


@pytest.mark.parametrize(
    "case", [BY_NAME["mlp"], slow(CORE[0]), slow(CORE[1])], ids=lambda case: case.name
)
def test_on_a_grid_in_float32_too(case: Case) -> None:
    hold(case, GRIDS[-1], dtype="float32")
