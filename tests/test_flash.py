"""Attention of a block against plain softmax attention, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxptd.flash import Dropout, Sites, attend_xla, cudnn_obstacle, flash_bwd, flash_fwd
from jaxptd.layers.dropout import kept

B, T, N, H = 2, 8, 3, 4
SEED_BN2 = np.random.default_rng(9).integers(0, 2**32, (B, N, 2)).astype(np.uint32)


def inputs(dtype: str) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, T, N, H)), dtype) for _ in range(4)]


def plain(q: Array, k: Array, v: Array, sites: Sites, rate: float) -> Array:
    s = jnp.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5
    s = jnp.where(sites.query_T[:, None] >= sites.key_S, s, -jnp.inf)
    p = jax.nn.softmax(s, -1)
    if sites.seed_BN2 is not None:
        seed = sites.seed_BN2[:, :, None, None]
        p = jnp.where(kept(seed, sites.query_T[:, None], sites.key_S, rate), p / (1 - rate), 0)
    return jnp.einsum("BNTS,BSNH->BTNH", p, v)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(
    "order", [np.arange(T), np.array([0, 1, 6, 7, 2, 3, 4, 5])], ids=["whole", "zigzag"]
)
def test_value_and_gradients_are_the_plain_ones(rate: float, order: np.ndarray) -> None:
    position_T = jnp.asarray(order, jnp.int32)
    sites = Sites(position_T, position_T, jnp.asarray(SEED_BN2) if rate else None)
    with jax.enable_x64(True):
        *qkv, do = inputs("float64")
        o, back = jax.vjp(lambda *x: attend_xla(*x, sites, Dropout(rate, kept)), *qkv)
        want, want_back = jax.vjp(lambda *x: plain(*x, sites, rate), *qkv)
        np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-14)
        for found, expected in zip(back(do), want_back(do), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


def test_keys_of_a_cache_that_are_not_written_yet_are_not_seen() -> None:
    q, k, v, _ = inputs("float32")
    key_S = jnp.arange(T, dtype=jnp.int32)
    sites = Sites(jnp.array([2], jnp.int32), key_S, None)
    garbage = k.at[:, 3:].set(1e3), v.at[:, 3:].set(1e3)
    found = attend_xla(q[:, 2:3], *garbage, sites, Dropout(0.0, kept))
    want = plain(q[:, :3], k[:, :3], v[:, :3], Sites(key_S[:3], key_S[:3], None), 0.0)[:, 2:]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_only_o_and_the_logsumexp_join_the_inputs_for_backward() -> None:
    q, k, v, do = inputs("float32")
    sites = Sites(jnp.arange(T), jnp.arange(T), None)
    o, lse_BNT = flash_fwd(q, k, v, sites, Dropout(0.0, kept))
    assert lse_BNT.shape == (B, N, T)
    s = np.where(np.tril(np.ones((T, T))), np.einsum("BTNH,BSNH->BNTS", q, k) / H**0.5, -np.inf)
    np.testing.assert_allclose(lse_BNT, np.log(np.exp(s).sum(-1)), rtol=1e-5, atol=1e-6)
    grads = flash_bwd((q, k, v, o, lse_BNT), do, sites, Dropout(0.0, kept))
    _, back = jax.vjp(lambda *x: attend_xla(*x, sites, Dropout(0.0, kept)), q, k, v)
    for found, expected in zip(grads, back(do), strict=True):
        np.testing.assert_array_equal(found, expected)
    saved = [x.shape for x in jax.tree.leaves(back) if hasattr(x, "shape")]
    assert (B, N, T, T) not in saved


def test_bfloat16_keeps_its_softmax_in_float32() -> None:
    q, k, v, _ = inputs("bfloat16")
    sites = Sites(jnp.arange(T), jnp.arange(T), None)
    o, lse_BNT = flash_fwd(q, k, v, sites, Dropout(0.0, kept))
    assert (o.dtype, lse_BNT.dtype) == (jnp.bfloat16, jnp.float32)
    want = plain(*(x.astype("float32") for x in (q, k, v)), sites, 0.0)
    np.testing.assert_allclose(o.astype("float32"), want, atol=2**-6)


@pytest.mark.parametrize(
    ("platform", "dtype", "head_size", "dropout", "word"),
    [
        ("cpu", "bfloat16", 64, 0.0, "NVIDIA"),
        ("gpu", "float32", 64, 0.0, "bfloat16"),
        ("gpu", "bfloat16", 20, 0.0, "multiple of 8"),
        ("gpu", "bfloat16", 264, 0.0, "256"),
        ("gpu", "bfloat16", 64, 0.1, "dropout"),
    ],
)
def test_what_speaks_against_cudnn(platform, dtype, head_size, dropout, word) -> None:
    assert word in cudnn_obstacle(platform, dtype, head_size=head_size, dropout=dropout)


def test_nothing_speaks_against_cudnn_on_a_gpu_in_bfloat16() -> None:
    assert cudnn_obstacle("gpu", "bfloat16", head_size=64, dropout=0.0) is None
