"""Every layer on every layout against the same layer on one device."""

import dataclasses

import jax
import pytest
from contract import Case, hold
from turns import by_turns, slow

from jaxptd.mesh import Layout
from tests.layers.attention_cases import LATENTS
from tests.layers.cases import CASES
from tests.layers.expert_cases import EXPERTS

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
EXPERT_LAYOUTS = [
    Layout(ep=2, tp=2),
    Layout(ep=2, cp=2, tp=2, sequence_parallel=True),
    Layout(dp=2, ep=2, tp=2, sequence_parallel=True, collective_matmul=True),
]
MORE_EXPERT_LAYOUTS = [
    Layout(ep=2, tp=4, sequence_parallel=True),
    Layout(ep=4, cp=2, ring="blockwise"),
    Layout(dp=2, cp=2, tp=2, sequence_parallel=True),
]
GRIDS = [
    Layout(row=2, col=4, ring="blockwise"),
    Layout(row=4, col=2, ring="blockwise"),
    Layout(row=2, col=2, cp=2, ring="blockwise"),
    Layout(dp=2, row=2, col=2, ring="blockwise", matmul2d_slices=3),  # every size is padded
]
ALGORITHMS = [
    Layout(row=2, col=2, ring="blockwise", matmul2d="summa"),
    Layout(row=2, col=2, attention2d="blocks", matmul2d="fox"),
    Layout(dp=2, row=2, col=2, attention2d="blocks", matmul2d="cannon"),
]
MORE_ALGORITHMS = [
    Layout(row=2, col=2, ring="blockwise", matmul2d="fox"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d="summa"),
    Layout(row=2, col=4, attention2d="blocks", matmul2d_slices=2),  # H is padded
]
BY_NAME = {case.name: case for case in CASES}
CORE = [BY_NAME["attention, dropout 0.3"], BY_NAME["block, dropout 0.3"]]
ON_GRIDS = [
    BY_NAME["attention in groups, dropout 0.0"],
    BY_NAME["cross-attention, dropout 0.3"],
    BY_NAME["attention to all tokens, biased"],
    BY_NAME["attention in groups, dropout 0.3"],
    BY_NAME["attention in groups, all heads normalised"],
    *CORE,
]
# The layouts of the default tests: one axis of tensor parallelism, and one grid, for every layer.
# Cases that differ only in options alternate; those of attention on grids are below.
ONE_AXIS, RING_STEPS, CONTEXT = LAYOUTS[8], LAYOUTS[6], LAYOUTS[5]
PADDED = GRIDS[3]
DEFAULT = {
    "column": [ONE_AXIS],
    "column, gathered, no bias": [PADDED],
    "row": [PADDED],
    "row, whole input, no bias": [ONE_AXIS],
    "square": [PADDED],
    "norm": [ONE_AXIS, PADDED],
    "rms norm": [PADDED],
    "mlp": [ONE_AXIS],
    "mlp, gated": [PADDED],
    "cross-attention, dropout 0.3": [LAYOUTS[2]],
    "attention in groups, dropout 0.0": [LAYOUTS[1]],
    "attention in groups, all heads normalised": [LAYOUTS[1]],
    "block, dropout 0.3": [RING_STEPS],
    "embedding": [CONTEXT],
    "positions": [PADDED],
    "output layer and loss": [CONTEXT, PADDED],
}
PAIRS = [
    pytest.param(
        case,
        layout,
        id=f"{case.name}-{layout}",
        marks=[] if layout in DEFAULT.get(case.name, ()) else [pytest.mark.slow],
    )
    for i, case in enumerate(CASES)
    for j, layout in enumerate((*LAYOUTS, *GRIDS))
    if layout in DEFAULT.get(case.name, ()) or (i + j) % 4 == 0
]


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_layer_is_the_layer_on_one_device(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *by_turns(ALGORITHMS, ON_GRIDS),
        *(slow(MORE_ALGORITHMS[i % 3], case) for i, case in enumerate(ON_GRIDS)),
    ],
    ids=str,
)
def test_with_every_algorithm_and_attention_in_blocks(case: Case, layout: Layout) -> None:
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *by_turns(EXPERT_LAYOUTS, EXPERTS),
        *(slow(MORE_EXPERT_LAYOUTS[i % 3], case) for i, case in enumerate(EXPERTS)),
    ],
    ids=str,
)
def test_experts_are_those_of_one_device(case: Case, layout: Layout) -> None:
    """Router losses are on; the last positions only pad the sequence."""
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


ABSORBED = [dataclasses.replace(each, latent_products="absorbed") for each in LAYOUTS[:9]]


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *by_turns([LAYOUTS[i] for i in (0, 5, 6, 8)], LATENTS),
        *(slow(LAYOUTS[1 + i % 4], case) for i, case in enumerate(LATENTS)),
        *by_turns([ABSORBED[i] for i in (1, 4, 6, 8)], LATENTS),
        *(slow(ABSORBED[(2, 3, 5, 7)[i % 4]], case) for i, case in enumerate(LATENTS)),
    ],
    ids=str,
)
def test_latent_attention_is_that_of_one_device(case: Case, layout: Layout) -> None:
    """Every device's gradient of the key that all heads share is added up."""
    with jax.enable_x64(True):
        hold(case, layout, dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer_is_the_layer_on_one_device_in_float32(case: Case) -> None:
    hold(case, LAYOUTS[-1], dtype="float32")


@pytest.mark.parametrize(
    "case",
    [BY_NAME["row"], *map(slow, (BY_NAME["mlp"], *CORE))],
    ids=lambda case: case.name,
)
def test_on_a_grid_in_float32_too(case: Case) -> None:
    hold(case, GRIDS[-1], dtype="float32")
