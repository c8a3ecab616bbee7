"""Cross-entropy over a sharded vocabulary against the dense formula in numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from turns import slow

from jaxptd.analysis.jaxprs import equations
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.loss import soft_cap, vocab_parallel_cross_entropy
from jaxptd.mesh import Axis, Layout, make_mesh

B, T = 2, 3


def dense(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, squares: float = 0):
    """Each token's loss and the gradient of the weighted sum; see `run`."""
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    sums = np.exp(wide - top).sum(-1, keepdims=True)
    softmax, logsumexp = np.exp(wide - top) / sums, top + np.log(sums)
    one_hot = np.eye(logits.shape[-1])[targets]
    gradient = softmax - one_hot + squares * 2 * logsumexp * softmax
    return -np.log((softmax * one_hot).sum(-1)), gradient * weights[..., None]


def specs(layout: Layout) -> tuple[P, P]:
    """Specs of logits and of losses."""
    if layout.has_grid:
        return P(None, Axis.ROW, Axis.COL), P(None, Axis.ROW)
    return P(None, None, Axis.TP), P()


def run(
    logits: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    *,
    layout: Layout,
    vocab_size: int,
    squares: float = 0,
    traced: bool = False,
):
    """Losses, and the gradient of their weighted sum plus `squares` times the squared logsumexp.

    traced: return only the jaxpr.
    """
    tensor_parallel, (spec, token_spec) = make_tensor_parallel(layout), specs(layout)

    def body(logits, targets, weights):
        def total(x):
            loss, logsumexp = vocab_parallel_cross_entropy(
                x, targets, tensor_parallel.axes, vocab_size
            )
            terms = loss + squares * logsumexp**2 if squares else loss
            return jnp.sum(terms * weights), loss

        back, loss = jax.grad(total, has_aux=True)(logits)
        return loss, back

    mapped = jax.shard_map(
        body,
        mesh=make_mesh(layout),
        in_specs=(spec, token_spec, token_spec),
        out_specs=(token_spec, spec),
        check_vma=True,
    )
    if traced:
        return jax.make_jaxpr(mapped)(logits, targets, weights)
    return [np.asarray(x) for x in jax.jit(mapped)(logits, targets, weights)]


@pytest.mark.parametrize(
    ("layout", "vocab_size", "padded"),
    [
        slow(Layout(), 13, 13),
        slow(Layout(tp=4), 16, 16),
        slow(Layout(tp=4), 13, 16),
        (Layout(tp=8), 13, 24),
        (Layout(row=3, col=2), 13, 18),
        slow(Layout(row=1, col=4), 16, 16),
        slow(Layout(row=1, col=8), 13, 24),
    ],
    ids=str,
)
def test_value_and_gradient_are_the_dense_ones(
    layout: Layout, vocab_size: int, padded: int
) -> None:
    rng = np.random.default_rng(0)
    logits = 20 * rng.standard_normal((B, T, padded)).astype(np.float32)
    logits[..., vocab_size:] = 1e4  # padding that would win every softmax if included
    targets = rng.integers(0, vocab_size, (B, T)).astype(np.int32)
    weights = rng.standard_normal((B, T)).astype(np.float32)
    for squares in (0, 1e-3):
        loss, d_logits = run(
            logits, targets, weights, layout=layout, vocab_size=vocab_size, squares=squares
        )
        want, d_want = dense(logits[..., :vocab_size], targets, weights, squares)
        np.testing.assert_allclose(loss, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_logits[..., :vocab_size], d_want, atol=2e-6)
        assert (d_logits[..., vocab_size:] == 0).all()


def test_capped_logits_and_their_gradient() -> None:
    x = np.linspace(-90, 90, 7)
    with jax.enable_x64(True):
        y, back = jax.vjp(lambda x: soft_cap(x, 30.0), jnp.asarray(x))
        np.testing.assert_allclose(y, 30 * np.tanh(x / 30), rtol=1e-14)
        np.testing.assert_allclose(back(jnp.ones(7))[0], 1 / np.cosh(x / 30) ** 2, rtol=1e-12)
    assert soft_cap(jnp.ones(3, jnp.bfloat16), 30.0).dtype == jnp.bfloat16


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), slow(Layout(row=1, col=4))], ids=str)
def test_a_target_that_is_no_token_gives_the_logsumexp(layout: Layout) -> None:
    """Targets are below 0, in the padding and beyond it; the gradient is the softmax."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((B, T, 16)).astype(np.float32)
    targets = np.array([[-1, 13, 15], [-100, 16, 99]], np.int32)
    weights = rng.standard_normal((B, T)).astype(np.float32)
    loss, d_logits = run(logits, targets, weights, layout=layout, vocab_size=13)
    exp = np.exp(logits[..., :13].astype(np.float64))
    np.testing.assert_allclose(loss, np.log(exp.sum(-1)), rtol=1e-6)
    want = exp / exp.sum(-1, keepdims=True) * weights[..., None]
    np.testing.assert_allclose(d_logits[..., :13], want, atol=1e-6)
    assert (d_logits[..., 13:] == 0).all()


def test_bfloat16_logits_get_float32_losses_and_bfloat16_gradients() -> None:
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, 8)), jnp.bfloat16)
    targets, weights = np.zeros((B, T), np.int32), np.ones((B, T), np.float32)
    loss, d_logits = run(logits, targets, weights, layout=Layout(tp=2), vocab_size=8)
    want, d_want = dense(np.asarray(logits, np.float32), targets, weights)
    assert loss.dtype == np.float32
    assert d_logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(d_logits.astype(np.float32), d_want, atol=2**-8)


def test_an_ignored_target_leaves_the_gradient_to_the_weights() -> None:
    logits = np.zeros((1, 2, 8), np.float32)
    targets, weights = np.array([[-1, 3]], np.int32), np.array([[0, 1]], np.float32)
    _, d_logits = run(logits, targets, weights, layout=Layout(tp=2), vocab_size=8)
    assert (d_logits[0, 0] == 0).all()
    assert d_logits[0, 1, 3] == pytest.approx(1 / 8 - 1)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=8), Layout(row=3, col=2)], ids=str)
def test_no_device_makes_the_whole_vocabulary_and_nothing_is_scattered(layout: Layout) -> None:
    vocab, shards = 64, layout.tp * layout.col
    tensor_parallel, (spec, token_spec) = make_tensor_parallel(layout), specs(layout)
    back = jax.grad(
        lambda x, t: jnp.sum(vocab_parallel_cross_entropy(x, t, tensor_parallel.axes, vocab)[0]),
    )
    mapped = jax.shard_map(
        back,
        mesh=make_mesh(layout),
        in_specs=(spec, token_spec),
        out_specs=spec,
        check_vma=True,
    )
    logits, targets = np.zeros((B, T, vocab), np.float32), np.zeros((B, T), np.int32)
    (on_mesh,) = jax.make_jaxpr(mapped)(logits, targets).eqns
    made = list(equations(on_mesh.params["jaxpr"]))
    shapes = {v.aval.shape for equation in made for v in equation.outvars}
    assert (B, T // layout.row, vocab // shards) in shapes
    assert not {shape for shape in shapes if vocab in shape}
    assert not [equation for equation in made if "scatter" in equation.primitive.name]


def test_an_odd_number_of_tokens() -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((1, 3, 8)).astype(np.float32)
    targets, weights = np.array([[5, 0, 7]], np.int32), np.ones((1, 3), np.float32)
    loss, d_logits = run(logits, targets, weights, layout=Layout(), vocab_size=8)
    want, d_want = dense(logits, targets, weights)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(d_logits, d_want, atol=1e-6)


def test_a_loop_writes_the_gradient_over_the_logits() -> None:
    """Uses two iterations, since XLA removes a loop of one."""
    logits, targets = np.zeros((B, T, 8), np.float32), np.zeros((B, T), np.int32)
    step = partial(run, layout=Layout(), vocab_size=8, traced=True)
    made = list(equations(step(logits, targets, np.ones((B, T), np.float32))))
    (loop,) = (each for each in made if each.primitive.name == "scan")
    assert loop.params["length"] == 2
    assert (B * T, 8) in {v.aval.shape for v in loop.outvars}
