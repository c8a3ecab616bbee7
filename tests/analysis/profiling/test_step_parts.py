"""Parts of a step: their kernels, their minimum times, and the rows and bars that show them."""

import pytest
import tiny

from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.hlo.kernels import COLLECTIVE, OTHER, PRODUCT, kernels
from jaxptd.analysis.jaxprs import executed, flops
from jaxptd.analysis.profiling import SCOPES, least, lines, scope_of
from jaxptd.analysis.step_picture import picture
from jaxptd.mesh import Layout


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(f)/while/body/transpose(jvp(layers))/mlp/dot_general", "mlp"),
        ("jit(f)/jvp(loss)/norm/reduce_sum", "norm"),
        ("jit(f)/transpose(jvp(embedding))/scatter-add", "embedding"),
        ("jit(f)/dot_product_attention_fwd", "rest"),
        ("", "rest"),
    ],
)
def test_the_innermost_scope_counts(name: str, scope: str) -> None:
    assert scope_of(name) == scope


@pytest.fixture(scope="module")
def step():
    program = tiny.program(Layout(tp=2), micro_batches=1)
    return program, compile_step(program).as_text()


def test_every_scope_is_in_a_step_and_all_its_products_are_in_one(step) -> None:
    program, text = step
    found = {scope_of(kernel.instruction.op_name) for kernel in kernels(text)}
    assert found == set(SCOPES)
    times = least(program, text)
    products = {scope: times[scope, PRODUCT] for scope in SCOPES}
    assert sum(products.values()) * PEAK_FLOPS["H200"] == pytest.approx(executed(program, flops))
    assert products["rest"] == products["norm"] == products["optimizer"] == 0
    # The MLP has two matmuls of 2 T D 4D FLOPs, each run once forward and twice backward.
    tokens, hidden, layers = 8 * 8, 16, program.config.model.num_layers
    one = 2 * tokens * hidden * 4 * hidden / 2
    assert products["mlp"] * PEAK_FLOPS["H200"] == pytest.approx(layers * 3 * 2 * one)
    others = sum(kernel.bytes for kernel in kernels(text) if kernel.kind == OTHER)
    assert sum(times[scope, OTHER] for scope in SCOPES) == pytest.approx(others / BANDWIDTH)


def test_lines_are_longest_first_with_their_shares() -> None:
    times = {("mlp", PRODUCT): 3e-3, ("loss", OTHER): 1e-3, ("norm", OTHER): 0.0}
    assert lines(times) == [["mlp", "products", "3", "75.0%"], ["loss", "other", "1", "25.0%"]]


def test_the_picture_has_a_bar_a_scope() -> None:
    figure = picture({"a step": {("mlp", PRODUCT): 3e-3, ("mlp", COLLECTIVE): 1e-3}}, "ms")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "a step:\n4 ms"
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width()]
    assert bars == [(0.0, 3.0), (3.0, 1.0)]
