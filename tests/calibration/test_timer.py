"""Timed programs: each iteration of the timing loop computes the whole sample."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxptd.calibration import timer
from jaxptd.calibration.suite import KINDS, Attention, Exchange, Pass, Product, SmallKernels
from jaxptd.calibration.timer import Timer, Work, compiled, half, inputs_of
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxptd.hardware import Group

CPU = jax.devices()[0]


def results(work: Work, trips: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs and outputs of a loop."""
    inputs = inputs_of(work)
    outputs = jax.tree.leaves(compiled(work, trips)(*inputs))
    return [np.asarray(x, np.float32) for x in inputs], [np.asarray(x, np.float32) for x in outputs]


def test_a_loop_in_place_has_all_its_trips() -> None:
    (x,), (y,) = results(timer.pass_work(Pass(64), CPU), 3)
    assert x.shape == (32,)
    for _ in range(3):
        x = x + x * x
    np.testing.assert_allclose(y, x, rtol=0.03)


def test_a_trip_needs_a_value_of_the_one_before() -> None:
    (x, w), (y,) = results(timer.product_work(Product(4, 8, 16), CPU), 3)
    for _ in range(3):
        want = x @ w
        x[0, 0] = want[0, 0]
    np.testing.assert_allclose(y, want, rtol=0.05, atol=0.02)
    once = results(timer.product_work(Product(4, 8, 16), CPU), 1)[1][0]
    assert not np.array_equal(y[0], once[0])
    np.testing.assert_array_equal(y[1:], once[1:])


WANTED = {
    ALL_REDUCE: lambda x: np.broadcast_to(x.sum(1, keepdims=True), x.shape),
    ALL_GATHER: lambda x: np.broadcast_to(x.reshape(2, 1, -1), (2, 2, 2 * x.shape[-1])),
    REDUCE_SCATTER: lambda x: x.sum(1).reshape(2, 2, -1),
    PERMUTE: lambda x: x[:, ::-1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_goes_along_its_groups(kind: str) -> None:
    """Uses two groups of two: devices 0 and 1, devices 2 and 3."""
    work = timer.exchange_work(Exchange(kind, Group(2), 64), jax.devices()[:4])
    (x,), (y,) = results(work, 1)
    assert x.shape == (4, 16 if kind == ALL_GATHER else 32)
    want = WANTED[kind](x.reshape(2, 2, -1))
    np.testing.assert_allclose(y.reshape(want.shape), want, rtol=0.02, atol=0.01)
    assert compiled(work, 2).as_text().count(f" {kind}(") == 1


def test_groups_over_nodes_are_a_node_apart() -> None:
    work = timer.exchange_work(Exchange(PERMUTE, Group(2, 2), 8, crosses=True), jax.devices()[:4])
    (x,), (y,) = results(work, 1)
    np.testing.assert_array_equal(y, x[[2, 3, 0, 1]])


@pytest.mark.parametrize("backward", [False, True])
def test_attention_has_the_project_s_kernel(backward: bool) -> None:
    sample = Attention(16, 2, 8, backward=backward)
    assert timer.attention_model(sample, CPU).attention == "xla"
    inputs, outputs = results(timer.attention_work(sample, CPU), 1)
    assert {x.shape for x in inputs} == {(1, 16, 2, 8)} | ({(1, 16, 2)} if backward else set())
    shapes = [(1, 16, 2, 8)] * 3 if backward else [(1, 16, 2, 8), (1, 16, 2)]
    assert [x.shape for x in outputs] == shapes
    assert all(np.isfinite(x).all() and np.any(x) for x in outputs)
    if not backward:  # the first query sees only the first key
        np.testing.assert_array_equal(outputs[0][0, 0], inputs[2][0, 0])


def test_times_are_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes a clock that only iterations of the timed loop advance, by 0.25 s each."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def compiled_loop(work: Work, trips: int) -> object:
        def call(*inputs: jax.Array) -> None:
            now[0] += trips * 0.25

        return call

    monkeypatch.setattr("jaxptd.calibration.timer.compiled", compiled_loop)
    timer = Timer(jax.devices()[:2], repetitions=3, long_enough=2.0)
    assert timer(Product(4, 4, 4)) == (0.25,) * 3
    assert now[0] == 3 * 0.25 + 4 * 2.0  # three single iterations and four loops of eight
    assert timer(SmallKernels(5)) == (0.05,) * 3


def test_fp8_and_small_kernels_run() -> None:
    timer = Timer(jax.devices()[:1], repetitions=1, long_enough=0.0)
    for sample in (Product(16, 16, 16, fp8=True), SmallKernels(2)):
        (seconds,) = timer(sample)
        assert seconds > 0
    assert half(CPU) == jnp.bfloat16
