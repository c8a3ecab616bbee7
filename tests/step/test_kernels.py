"""`model.kernels: triton` in a whole step, with plain operations in place of its kernels.

This runs on any device; `tests/kernels` tests the kernels themselves.
"""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx
from jax import Array
from one_device import hold
from turns import slow

from jaxptd.config import Config, ModelConfig
from jaxptd.errors import UserError
from jaxptd.kernels import activation, loss, norm
from jaxptd.kernels.tile import Instructions
from jaxptd.layers.for_layout import make_tensor_parallel
from jaxptd.layers.norm import Norm
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import resolved
from jaxptd.step.resolved import choose_kernels, resolve_for_decoding

# Each kernel as plain operations on whole arrays: inputs, number of results, options -> results.


def normalised(inputs: Any, results: int, options: Mapping[str, Any]) -> list[Array]:
    x, w, b = inputs
    wide = _wide(x)
    means = [wide.mean(1)] * (results - 2)
    for mean in means:
        wide -= mean[:, None]
    scale = jax.lax.rsqrt((wide**2).mean(1) + options["eps"])
    y = wide * scale[:, None] * w
    return [(y if b is None else y + b).astype(x.dtype), scale, *means]


def norm_gradients(inputs: Any, results: int, options: Mapping[str, Any]) -> list[Array]:
    x, dy, own, w, scale, means = inputs
    n, g = _wide(x), _wide(dy) * w
    for mean in means:
        n -= mean[:, None]
    n *= scale[:, None]
    dx = g - n * (g * n).mean(1, keepdims=True)
    dx = dx - g.mean(1, keepdims=True) if means else dx
    dx = sum(map(_wide, own), dx * scale[:, None])
    sums = [dy * n, _wide(dy)][: results - 1]
    return [dx.astype(x.dtype), *(each.sum(0, keepdims=True) for each in sums)]


def _activated(inputs: Any, options: Mapping[str, Any]) -> tuple[Array, list[Array]]:
    """The activation with its gate, and its derivatives by each part of h."""
    h, b, *_ = inputs
    wide = sum(map(_wide, b), _wide(h))
    x, *gate = (wide[:, part] for part in range(h.shape[1]))
    y, slope = options["act"](x, Instructions(interpret=True))
    return math.prod(gate, start=y), [math.prod(gate, start=slope), *(y for _ in gate)]


def activated(inputs: Any, results: int, options: Mapping[str, Any]) -> list[Array]:
    return [_activated(inputs, options)[0].astype(inputs[0].dtype)]


def activation_gradients(inputs: Any, results: int, options: Mapping[str, Any]) -> list[Array]:
    h, b, dy = inputs
    grads = _wide(dy)[:, None] * jnp.stack(_activated(inputs, options)[1], 1)
    return [grads.astype(h.dtype), *[grads.sum(0, keepdims=True)] * len(b)]


def max_and_sum(inputs: Any, results: int, options: Mapping[str, Any]) -> list[Array]:
    logits, stop = inputs
    there = jnp.arange(logits.shape[1]) < stop
    wide = jnp.where(there, _wide(logits), -jnp.inf)
    top = wide.max(1, initial=jnp.finfo(jnp.float32).min)
    return [top, jnp.exp(wide - top[:, None]).sum(1)]


def loss_gradients(inputs: Any, results: int, options: Mapping[str, Any]) -> list[Array]:
    logits, stop, *rows = inputs
    target, logsumexp, d_sum, d_target = (row[:, None] for row in rows)
    columns = jnp.arange(logits.shape[1])
    d = jnp.exp(_wide(logits) - logsumexp) * d_sum - (columns == target) * d_target
    return [jnp.where(columns < stop, d, 0).astype(logits.dtype)]


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


COMPUTED: Mapping[Callable[..., None], Callable[..., list[Array]]] = {
    norm._forward_kernel: normalised,
    norm._backward_kernel: norm_gradients,
    activation._forward_kernel: activated,
    activation._backward_kernel: activation_gradients,
    loss._sum_kernel: max_and_sum,
    loss._gradient_kernel: loss_gradients,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """Records the kernels called, which this makes available on any device."""
    found = []

    def call(kernel: Any, inputs: Any, shapes: Any, **_: Any) -> list[Array]:
        function = getattr(kernel, "func", kernel)
        found.append(function)
        return COMPUTED[function](inputs, len(shapes), getattr(kernel, "keywords", {}))

    for module in (norm, activation, loss):
        monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(resolved, "choose_kernels", lambda config, _: config.kernels_on_gpus)
    return found


ACTIVATION = {activation._forward_kernel, activation._backward_kernel}
NORM_AND_LOSS = set(COMPUTED) - ACTIVATION
FOUR = {"num_layers": 4, "micro_batches": 4}
UNROLLED = {"scan_layers": False}
# Neither for gelu, nor for values saved by a loop over layers.
WITH_ACTIVATION = [
    *(
        slow(*each)
        for each in (
            (tiny.SEQUENCE_PARALLEL, {"remat": "full", "z_loss": 0.1}),
            (Layout(dp=4, cp=2, zero=3), {"family": "llama", "remat": "dots", **UNROLLED}),
            (Layout(tp=2), {"remat": "attention", **UNROLLED}),
            (Layout(tp=2), {"remat": "full", "remat_layers": 1, "num_layers": 3}),
            (Layout(pp=2, tp=2, sequence_parallel=True), {"remat": "full", **FOUR}),
            (tiny.CONTEXT_PARALLEL, {"family": "qwen3", "dropout": 0.1, **UNROLLED}),
            (tiny.SEQUENCE_PARALLEL, tiny.T5 | UNROLLED),
            (Layout(tp=2), {"norm_order": "both", "norm": "rmsnorm", **UNROLLED}),
            (Layout(tp=4, collective_matmul=True, sequence_parallel=True), UNROLLED),
            (Layout(dp=2, tp=2), {"logit_softcap": 5.0, "vocab_multiple": 16, "remat": "full"}),
        )
    ),
]
CASES = [
    (tiny.SEQUENCE_PARALLEL, {"remat": "dots"}),
    (Layout(dp=2, tp=2), {"family": "bert", **UNROLLED}),
    (Layout(pp=2, schedule="zb-v"), {"norm_order": "post", **FOUR}),
    (Layout(dp=2, zero=1, offload=("optimizer", "activations")), {"remat": "dots"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "choice"), CASES, ids=str)
def test_a_step_is_the_same(
    layout: Layout, choice: dict[str, Any], calls: list[Callable[..., None]]
) -> None:
    hold(layout, kernels="triton", **choice)
    assert set(calls) == NORM_AND_LOSS


@pytest.mark.parametrize(("layout", "choice"), WITH_ACTIVATION, ids=str)
def test_a_step_with_the_activation_is_the_same(
    layout: Layout, choice: dict[str, Any], calls: list[Callable[..., None]]
) -> None:
    hold(layout, kernels="triton", **choice)
    assert set(calls) == set(COMPUTED)


@pytest.mark.slow
def test_a_model_of_images_has_the_norms(calls: list[Callable[..., None]]) -> None:
    hold(Layout(dp=2, tp=3), kernels="triton", family="swin-unet")
    assert set(calls) == {norm._forward_kernel, norm._backward_kernel}


CPU, GPU = (SimpleNamespace(platform=name) for name in ("cpu", "gpu"))
OLD = SimpleNamespace(platform="gpu", compute_capability="7.0")


def chosen(device: Any, layout: Layout | None = None, **model: Any) -> str:
    return choose_kernels(Config(ModelConfig(**model), layout or Layout()), device)


def test_auto_is_triton_where_it_can_run() -> None:
    auto = {"kernels": "auto"}
    assert [chosen(each, **auto) for each in (GPU, CPU, OLD)] == ["triton", "xla", "xla"]
    assert chosen(GPU, Layout(row=2), **auto) == "xla"
    assert chosen(GPU, dtype="float64", **auto) == "xla"
    assert chosen(GPU, kernels="triton") == "triton"
    assert [chosen(each) for each in (GPU, CPU)] == ["xla", "xla"]


def test_a_model_that_decodes_has_the_chosen_kernels(calls: list[Any]) -> None:
    config = Config(ModelConfig(kernels="auto", vocab_size=8))
    assert resolve_for_decoding(config, make_mesh(Layout())).model.kernels == "triton"


def test_it_is_refused_where_it_cannot_run() -> None:
    for device in (CPU, OLD):
        with pytest.raises(UserError, match="it needs an NVIDIA GPU of .* 8.0 or more; use "):
            chosen(device, kernels="triton")
    with pytest.raises(UserError, match="kernels=triton: it computes in float32; use "):
        chosen(GPU, kernels="triton", dtype="float64")
    with pytest.raises(UserError, match="a grid .* splits them; use model.kernels=xla"):
        Config(ModelConfig(kernels="triton"), Layout(row=2))


@pytest.mark.parametrize(("size", "fused"), [(8192, True), (8193, False)])
def test_long_norms_stay_xlas(size: int, fused: bool) -> None:
    block = ModelConfig(kernels="triton").block
    assert (
        Norm(
            size, options=block, tensor_parallel=make_tensor_parallel(Layout()), rngs=nnx.Rngs(0)
        ).fused
        == fused
    )
