"""Layers on one device against their formulas in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import Case, Outcome, random_weights, run, starting_params
from flax import nnx
from moves import SCALE, WINDOW
from turns import slow

from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.mesh import Layout
from tests.layers.cases import CASES


@functools.cache
def outcome(name: str) -> tuple[Case, Outcome]:
    (case,) = (case for case in CASES if case.name == name)
    with jax.enable_x64(True):
        return case, run(case, Layout(), "float64")


def parameters(name: str) -> dict[str, np.ndarray]:
    """The parameters that `run` uses."""
    (case,) = (case for case in CASES if case.name == name)
    with jax.enable_x64(True):
        return {k: np.asarray(v) for k, v in starting_params(case, Layout(), "float64").items()}


def norm(x, p, prefix=""):
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p[prefix + "w"]
        + p[prefix + "b"]
    )


def rms_norm(x, p, prefix="", eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p[prefix + "w"]


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(x, p, prefix="", seen=np.tril, bias=0.0):
    q, k, v = (
        np.einsum("BTD,DcNH->cBTNH", x, p[prefix + "qkv.w"]) + p[prefix + "qkv.b"][:, None, None]
    )
    o = weighted_values(q, k, v, scale=q.shape[-1] ** -0.5, seen=seen, bias=bias)
    return np.einsum("BTNH,NHD->BTD", o, p[prefix + "out.w"]) + p[prefix + "out.b"]


def in_window(ones):
    """Each token sees itself and the WINDOW - 1 before it."""
    return np.tril(ones) - np.tril(ones, -WINDOW)


def weighted_values(q, k, v, *, scale, seen, bias=0.0):
    s = scale * np.einsum("BTNH,BSNH->BNTS", q, k) + bias
    e = np.where(seen(np.ones(s.shape[-2:])), np.exp(s), 0)
    total = e.sum(-1, keepdims=True)
    return np.einsum("BNTS,BSNH->BTNH", e / np.where(total, total, 1), v)


def biased_attention(x, p):
    """Entry T - 1 of the table is a token's bias for itself, the next for the token after it."""
    place = np.arange(x.shape[1])
    bias = np.moveaxis(p["table"][place - place[:, None] + len(place) - 1], -1, 0)
    return attention(x, p, "attention.", seen=np.ones_like, bias=bias)


def cross_attention(x, source, segments, p):
    """Attends to all source tokens except padding; to nothing if the source is all padding."""
    q = np.einsum("BTD,DNH->BTNH", x, p["q.w"]) + p["q.b"]
    k, v = np.einsum("BSD,DcKH->cBSKH", source, p["kv.w"]) + p["kv.b"][:, None, None]
    known = (segments >= 0)[:, None, None]
    o = weighted_values(q, k, v, scale=q.shape[-1] ** -0.5, seen=lambda ones: ones * known)
    return np.einsum("BTNH,NHD->BTD", o, p["out.w"]) + p["out.b"]


def turned(x, theta):
    """Rotates pairs, as complex numbers, by position times theta**(-2i/H)."""
    pairs = x[..., ::2] + 1j * x[..., 1::2]
    angles = np.arange(x.shape[1])[:, None] * theta ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
    pairs = pairs * np.exp(1j * angles)[:, None]
    return np.stack((pairs.real, pairs.imag), -1).reshape(x.shape)


def norm_of_all_heads(x, p, prefix):
    """All heads of a token share one mean of squares."""
    flat = {"w": p[prefix + "w"].reshape(-1)}
    return rms_norm(x.reshape(*x.shape[:2], -1), flat).reshape(x.shape)


def attention_in_groups(x, p, normed=rms_norm):
    q = np.einsum("BTD,DNH->BTNH", x, p["q.w"]) + p["q.b"]
    k, v = np.einsum("BTD,DcKH->cBTKH", x, p["kv.w"]) + p["kv.b"][:, None, None]
    q, k = (turned(normed(y, p, f"{n}_norm."), theta=1e6) for y, n in ((q, "q"), (k, "k")))
    k, v = (np.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    o = weighted_values(q, k, v, scale=SCALE, seen=in_window)
    return np.einsum("BTNH,NHD->BTD", o, p["out.w"])


def gated_mlp(x, p):
    gate, up = np.einsum("BTD,DcF->cBTF", x, p["up.w"])
    return (gate / (1 + np.exp(-gate)) * up) @ p["down.w"]


def mlp(x, p, prefix=""):
    h = gelu(x @ p[prefix + "up.w"] + p[prefix + "up.b"])
    return h @ p[prefix + "down.w"] + p[prefix + "down.b"]


def block(x, p):
    x = x + attention(norm(x, p, "attention_norm."), p, "attention.")
    return x + mlp(norm(x, p, "mlp_norm."), p, "mlp.")


def block_of_sums(x, p):
    x = norm(x + attention(x, p, "attention."), p, "attention_norm.")
    return norm(x + mlp(x, p, "mlp."), p, "mlp_norm.")


def cross_entropy(logits, targets):
    target = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return np.log(np.exp(logits).sum(-1)) - target


FORMULAS = {
    "column": lambda p, x: x @ p["w"] + p["b"],
    "column, gathered, no bias": lambda p, x: np.einsum("BTD,DcNH->BTcNH", x, p["w"]),
    "row": lambda p, x: x @ p["w"] + p["b"],
    "row, whole input, no bias": lambda p, x: np.einsum("BTNH,NHD->BTD", x, p["w"]),
    "square": lambda p, x: x @ p["w"] + p["b"],
    "norm": lambda p, x: norm(x, p),
    "rms norm": lambda p, x: rms_norm(x, p),
    "mlp": lambda p, x: mlp(x, p),
    "mlp, gated": lambda p, x: gated_mlp(x, p),
    "attention in groups, dropout 0.0": lambda p, x, *_: attention_in_groups(x, p),
    "attention in groups, all heads normalised": lambda p, x, *_: attention_in_groups(
        x, p, norm_of_all_heads
    ),
    "attention, dropout 0.0": lambda p, x, *_: attention(x, p),
    "attention to all tokens, biased": lambda p, x, *_: biased_attention(x, p),
    "cross-attention, dropout 0.0": lambda p, x, samples, positions, seed, source, segments: (
        cross_attention(x, source, segments, p)
    ),
    "block, dropout 0.0": lambda p, x, *_: block(x, p),
    "block, norms of sums": lambda p, x, *_: block_of_sums(x, p),
    "embedding": lambda p, tokens: p["table"][tokens],
    "positions": lambda p, x, positions: x * p["table"][positions],
    "output layer and loss": lambda p, x, targets: cross_entropy(x @ p["table"].T, targets),
}


# A block contains these, or variants that differ in an option.
PARTS = {
    "column",
    "column, gathered, no bias",
    "row",
    "row, whole input, no bias",
    "square",
    "norm",
    "mlp",
    "attention, dropout 0.0",
}
NAMES = [slow(name) if name in PARTS else name for name in FORMULAS]


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_its_formula(name: str) -> None:
    case, found = outcome(name)
    inputs = [x.astype(np.float64) if x.dtype == np.float32 else x for x in case.inputs]
    want = FORMULAS[name](parameters(name), *inputs)
    np.testing.assert_allclose(found.output, want, rtol=1e-10, atol=1e-12)


STEP = 1e-6  # central difference: its error is STEP**2 times a third derivative


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_is_the_derivative_of_the_formula(name: str) -> None:
    """Checks the gradient of `run`'s weighted sum along a random direction of each argument."""
    case, found = outcome(name)
    floats = {i: x for i, x in enumerate(case.inputs) if x.dtype == np.float32}
    arguments = parameters(name) | {str(i): x.astype(np.float64) for i, x in floats.items()}
    gradients = found.params | dict(zip(map(str, floats), found.inputs, strict=True))
    weights = random_weights(case, found.output.shape, Layout(), "float64")

    def total(moved: dict[str, np.ndarray]) -> float:
        inputs = [moved.get(str(i), x) for i, x in enumerate(case.inputs)]
        return float((FORMULAS[name](moved, *inputs) * weights).sum())

    for argument, x in arguments.items():
        along = np.random.default_rng(5).standard_normal(x.shape)
        ends = [total(arguments | {argument: x + sign * STEP * along}) for sign in (1, -1)]
        derivative = (ends[0] - ends[1]) / (2 * STEP)
        np.testing.assert_allclose(
            (gradients[argument] * along).sum(), derivative, rtol=1e-6, atol=1e-8, err_msg=argument
        )


DROPPED = ("attention", "attention in groups", "block", "cross-attention")


def test_every_case_has_a_formula_or_a_test_of_its_own() -> None:
    dropped = {f"{name}, dropout 0.3" for name in DROPPED}
    assert {case.name for case in CASES} == dropped | set(FORMULAS)


def test_norm_in_bfloat16_computes_in_float32() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 16)) + 100, jnp.bfloat16)
    (case,) = (case for case in CASES if case.name == "norm")
    found = jax.jit(case.make(make_tensor_parallel(Layout()), nnx.Rngs(0)))(x)
    assert found.dtype == jnp.bfloat16
    want = norm(np.asarray(x, np.float64), {"w": 1.0, "b": 0.0})
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=2**-7)
