"""`model.norm_kernel: triton` in a whole step, its kernels replaced by what they compute.

So it runs on any device; the kernels themselves are in `tests/norms/test_fused.py`.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny
from flax import nnx
from one_device import hold
from turns import slow

from jaxptd.config import Config, ModelConfig
from jaxptd.errors import UserError
from jaxptd.layers.forms import make_form
from jaxptd.layers.norm import Norm, check_norm_kernel
from jaxptd.mesh import Layout
from jaxptd.norms import fused
from jaxptd.step import resolved


def computed(kernel: Any, inputs: Any, shapes: Any, **_: Any) -> list[jax.Array]:
    """What a kernel computes, by plain operations on whole arrays, in place of `_call`."""
    options = kernel.keywords
    if "eps" in options:
        x, w, b = inputs
        wide = _wide(x)
        means = [wide.mean(1)] * (len(shapes) - 2)
        for mean in means:
            wide -= mean[:, None]
        scale = jax.lax.rsqrt((wide**2).mean(1) + options["eps"])
        y = wide * scale[:, None] * w
        return [(y if b is None else y + b).astype(x.dtype), scale, *means]
    x, dy, own, w, scale, means = inputs
    n, g = _wide(x), _wide(dy) * w
    for mean in means:
        n -= mean[:, None]
    n *= scale[:, None]
    dx = g - n * (g * n).mean(1, keepdims=True)
    dx = dx - g.mean(1, keepdims=True) if means else dx
    dx = sum(map(_wide, own), dx * scale[:, None])
    sums = [dy * n, _wide(dy)][: len(shapes) - 1]
    return [dx.astype(x.dtype), *(each.sum(0, keepdims=True) for each in sums)]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that are called; any device has them."""
    found = []

    def call(kernel: Any, *arguments: Any, **options: Any) -> list[jax.Array]:
        found.append(kernel.func.__name__)
        return computed(kernel, *arguments, **options)

    monkeypatch.setattr(fused, "_call", call)
    monkeypatch.setattr(resolved, "check_norm_kernel", lambda *_: None)
    return found


FOUR = {"num_layers": 4, "micro_batches": 4}
CASES = [
    (tiny.SEQUENCE_PARALLEL, {"remat": "dots"}),
    (Layout(dp=2, tp=2), {"scan_layers": False, "family": "bert"}),
    (Layout(dp=4, cp=2, zero=3), {"family": "llama", "remat": "dots"}),
    *(
        slow(*each)
        for each in (
            (Layout(tp=2), {"scan_layers": False, "remat": "attention"}),
            (Layout(tp=2), {"remat": "full", "remat_layers": 1, "num_layers": 3}),
            (Layout(pp=2, tp=2, sequence_parallel=True), {"remat": "full", **FOUR}),
            (Layout(pp=2, schedule="zb-v"), {"norm_order": "post", **FOUR}),
            (Layout(dp=2, zero=1, offload=("optimizer", "activations")), {"remat": "dots"}),
            (tiny.CONTEXT_PARALLEL, {"family": "qwen3", "num_kv_heads": 2, "dropout": 0.1}),
            (tiny.SEQUENCE_PARALLEL, tiny.T5),
            (Layout(dp=2, tp=3), {"family": "swin-unet"}),
        )
    ),
]


@pytest.mark.parametrize(("layout", "choice"), CASES, ids=str)
def test_a_step_is_the_same(layout: Layout, choice: dict[str, Any], calls: list[str]) -> None:
    hold(layout, norm_kernel="triton", **choice)
    assert set(calls) == {"_forward_kernel", "_backward_kernel"}


def test_it_is_refused_where_it_cannot_run() -> None:
    cpu, gpu = (SimpleNamespace(platform=name) for name in ("cpu", "gpu"))
    model = ModelConfig(norm_kernel="triton")
    check_norm_kernel(model, gpu)
    check_norm_kernel(ModelConfig(), cpu)
    with pytest.raises(UserError, match="norm_kernel=triton: it needs an NVIDIA GPU; use "):
        check_norm_kernel(model, cpu)
    with pytest.raises(UserError, match="norm_kernel=triton: it computes in float32; use "):
        check_norm_kernel(ModelConfig(norm_kernel="triton", dtype="float64"), gpu)
    with pytest.raises(UserError, match="a grid .* splits them; use model.norm_kernel=xla"):
        Config(model, Layout(row=2))
    with pytest.raises(UserError, match="8193 numbers of a token are more than 8192; use "):
        Norm(8193, options=model.block, form=make_form(Layout()), rngs=nnx.Rngs(0))
