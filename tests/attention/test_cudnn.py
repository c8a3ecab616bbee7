"""cuDNN's kernel: types and lowering on any machine; values on a GPU with `pytest --gpu`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.attention import cudnn as flash_cudnn
from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.attention.cudnn import Cudnn, unproven
from jaxptd.attention.kernel import Dropout, Kernel, Saved, ScoreCoordinates, Scores
from jaxptd.attention.obstacle import obstacle
from jaxptd.attention.xla import Xla
from jaxptd.collectives import varying_axes
from jaxptd.layers.dropout import keep_mask
from jaxptd.mesh import Axis, Layout, RingKind, make_mesh
from jaxptd.ring_attention import attend

B, T, N, H = 2, 128, 3, 64
DEVICES = 4
SCORES = Scores(H**-0.5)
WINDOW = Scores(0.25, window=100)
XLA = Xla(Dropout(0.0, keep_mask))
NO_OBSTACLE = {"head_sizes": (64,), "dropout": 0.0, "documents": False}


def abstract(length: int = T) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((B, length, N, H), jnp.bfloat16)


def coordinates(length: int, keys: int) -> ScoreCoordinates:
    return ScoreCoordinates(*(jnp.arange(n, dtype=jnp.int32) for n in (length, keys)))


def whole(q: Array, k: Array, v: Array, do: Array, *, kernel: Kernel, scores: Scores) -> tuple:
    """Computes o, logsumexp, dq, dk, dv of one block."""
    where = coordinates(q.shape[1], k.shape[1])
    o, lse = kernel.fwd(q, k, v, where, scores=scores)
    saved = Saved(q, k, v, o.astype(q.dtype), lse)
    return o, lse, *kernel.bwd(saved, do, where, scores=scores)[:3]


def ringed(
    q: Array, k: Array, v: Array, do: Array, *, kernel: Kernel, kind: RingKind, devices: int
) -> tuple:
    """Computes o, dq, dk, dv of a sequence that is sharded over a ring."""
    mesh, spec = make_mesh(Layout(cp=devices)), P(None, Axis.CP)
    run = partial(attend, ring=Ring(Axis.CP, kind), kernel=kernel, scores=SCORES)

    def local(q: Array, k: Array, v: Array, do: Array) -> tuple:
        o, back = jax.vjp(lambda *x: run(*x, AttentionInputs()), q, k, v)
        assert varying_axes(o) == {Axis.CP}
        return o, *back(do)

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)(
        q, k, v, do
    )


# ---- without a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_shapes_and_types_are_those_of_the_kernel_interface(causal: bool) -> None:
    o, lse, *grads = jax.eval_shape(
        partial(whole, kernel=Cudnn(), scores=SCORES._replace(causal=causal)), *[abstract()] * 4
    )
    assert (o.shape, o.dtype) == ((B, T, N, H), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((B, T, N), jnp.float32)
    assert [(x.shape, x.dtype) for x in grads] == [((B, T, N, H), jnp.bfloat16)] * 3


@pytest.mark.parametrize("kind", ["zigzag", "blockwise", "gather"])
def test_ring_of_it_lowers_for_cuda(kind: RingKind) -> None:
    """Traces inside a shard_map that checks along which axes each array varies."""
    run = jax.jit(partial(ringed, kernel=Cudnn(), kind=kind, devices=DEVICES))
    text = run.trace(*[abstract()] * 4).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmax(" in text and "__cudnn$fmhaSoftmaxBackward(" in text
    assert "CAUSAL" in text and "NO_MASK" in text  # for the local block and for the others


def test_a_part_that_is_seen_whole_has_no_mask() -> None:
    run = jax.jit(partial(whole, kernel=Cudnn(), scores=SCORES._replace(causal=False)))
    text = run.trace(*[abstract()] * 4).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("NO_MASK") == 2 and "CAUSAL" not in text


def test_keys_may_be_those_of_another_sequence() -> None:
    run = jax.jit(partial(whole, kernel=Cudnn(), scores=SCORES._replace(causal=False)))
    traced = run.trace(abstract(), abstract(192), abstract(192), abstract())
    assert [x.shape[1] for x in traced.out_info] == [T, T, T, 192, 192]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("NO_MASK") == 2 and "CAUSAL" not in text


def test_groups_of_queries_share_keys_that_nothing_repeats() -> None:
    few = jax.ShapeDtypeStruct((B, T, 1, H), jnp.bfloat16)
    run = jax.jit(partial(whole, kernel=Cudnn(), scores=SCORES))
    traced = run.trace(abstract(), few, few, abstract())
    assert [x.shape[2] for x in traced.out_info] == [N, N, N, 1, 1]
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(calls) == 2 and all(f"tensor<{B}x{T}x1x{H}xbf16>" in line for line in calls)


def test_a_window_and_a_factor_are_the_kernels_own() -> None:
    run = jax.jit(partial(whole, kernel=Cudnn(), scores=WINDOW))
    text = run.trace(*[abstract()] * 4).lower(lowering_platforms=("cuda",)).as_text()
    config = text.replace("\\22", "'").replace('\\"', "'")
    assert config.count("'sliding_window_length': 100") == 2 and config.count("CAUSAL") == 2
    assert config.count("'fmha_scale': 0.25") == 2


@pytest.mark.parametrize(
    ("platform", "dtype", "other", "words"),
    [
        ("cpu", "bfloat16", {}, "NVIDIA GPU, not cpu"),
        ("gpu", "float32", {}, "bfloat16, not float32"),
        ("gpu", "bfloat16", {"head_sizes": (20,)}, "multiple of 8, at most 256, not 20"),
        ("gpu", "bfloat16", {"head_sizes": (264,)}, "at most 256, not 264"),
        ("gpu", "bfloat16", {"head_sizes": (64, 136), "capability": 8.0}, "at most 128, not 136"),
        ("gpu", "bfloat16", {"capability": 7.5}, "compute capability 8.0 or more, not 7.5"),
        ("gpu", "bfloat16", {"dropout": 0.1}, "no dropout (model.dropout=0.1)"),
        ("gpu", "bfloat16", {"documents": True}, "data.documents=apart"),
        ("gpu", "bfloat16", {"bias": True}, "scores have a bias by distance"),
        ("gpu", "bfloat16", {"capped": True}, "scores have a limit (model.attention_softcap)"),
        (
            "gpu",
            "bfloat16",
            {"window_in_ring": True},
            "not at another device's (model.window)",
        ),
    ],
)
def test_what_speaks_against_it_is_said(platform: str, dtype: str, other: dict, words: str) -> None:
    assert words in (obstacle(platform, dtype, **NO_OBSTACLE | other) or "")


def test_nothing_speaks_against_it_on_a_gpu_in_bfloat16() -> None:
    assert (obstacle("cuda", "bfloat16", **NO_OBSTACLE), unproven()) == (None, None)


def test_unknown_version_of_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_cudnn._private.cache_clear()
    try:
        monkeypatch.setattr(jax, "__version__", "0.99.1")
        words = "jax 0.99.1 is not one it is known to work with"
        assert unproven() == words
    finally:
        monkeypatch.undo()
        flash_cudnn._private.cache_clear()


# ---- on GPUs ---------------------------------------------------------------------------------


def random_inputs(length: int) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((B, length, N, H)), jnp.bfloat16) for _ in range(4)]


def assert_close(found: tuple, want: tuple) -> None:
    """Checks that arrays agree to 1 % of their norm: a few roundings to bfloat16."""
    for x, y in zip(found, want, strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [SCORES._replace(causal=False), SCORES, WINDOW], ids=str)
def test_values_and_gradients_of_a_block(scores: Scores) -> None:
    found, want = (
        jax.jit(partial(whole, kernel=kernel, scores=scores))(*random_inputs(1024))
        for kernel in (Cudnn(), XLA)
    )
    assert_close(found, want)


@pytest.mark.gpu
def test_values_and_gradients_with_keys_of_another_sequence() -> None:
    (q, do), (k, v) = random_inputs(512)[:2], random_inputs(768)[:2]
    scores = SCORES._replace(causal=False)
    found, want = (
        jax.jit(partial(whole, kernel=kernel, scores=scores))(q, k, v, do)
        for kernel in (Cudnn(), XLA)
    )
    assert_close(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("scores", [SCORES, WINDOW], ids=str)
def test_values_and_gradients_of_groups_that_share_keys(scores: Scores) -> None:
    q, k, v, do = random_inputs(1024)
    found, want = (
        jax.jit(partial(whole, kernel=kernel, scores=scores))(q, k[:, :, :1], v[:, :, :1], do)
        for kernel in (Cudnn(), XLA)
    )
    assert_close(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["zigzag", "blockwise", "gather"])
def test_values_and_gradients_of_a_ring_of_all_devices(kind: RingKind) -> None:
    devices = len(jax.devices())
    found, want = (
        jax.jit(partial(ringed, kernel=kernel, kind=kind, devices=devices))(
            *random_inputs(512 * devices)
        )
        for kernel in (Cudnn(), XLA)
    )
    assert_close(found, want)
