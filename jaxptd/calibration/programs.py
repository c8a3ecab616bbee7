"""Programs that run a sample many times in one loop, so that the host's launches do not count.

Each trip needs one value of the trip before it, and its whole result is an output of the loop. So
XLA can neither leave out, hoist nor join trips, and writes each result into the same memory.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxptd.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxptd.attention.kernel import Saved, Sites
from jaxptd.calibration.samples import SMALL, Attention, Exchange, Pass, Product, SmallKernels
from jaxptd.collectives import as_varying, shift, varying_axes
from jaxptd.config import Config, ModelConfig
from jaxptd.layers.attention.kernels import choose_kernel, make_kernel, make_scores
from jaxptd.layers.fp8 import fp8_product
from jaxptd.mesh import Axis, Layout, in_process_order, make_mesh

GROUP = Axis.CP  # the axis of a mesh along which an exchange goes
Apply = Callable[..., Any]  # (x, *others) -> an array, or a tree of them


class Work(NamedTuple):
    """A sample as JAX runs it: a function, its inputs, and devices that share them, or None."""

    apply: Apply
    inputs: tuple[Array, ...]
    mesh: Mesh | None = None
    options: dict[str, Any] | None = None


def compiled(work: Work, trips: int) -> Callable[[], Any]:
    """Compiles a loop of this many trips; returns a call of it with the work's inputs."""
    function = functools.partial(_loop, work.apply, trips)
    if work.mesh is not None:
        shards = PartitionSpec(tuple(work.mesh.axis_names))
        function = jax.shard_map(
            function, mesh=work.mesh, in_specs=shards, out_specs=shards, check_vma=True
        )
    program = jax.jit(function).lower(*work.inputs).compile(compiler_options=work.options)
    return functools.partial(program, *work.inputs)


def _loop(apply: Apply, trips: int, x: Array, *others: Array) -> Any:
    def trip(_: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        x, _ = carry
        found = apply(x, *others)
        first = jax.tree.leaves(found)[0]
        value = first[(0,) * first.ndim].astype(x.dtype)
        return x.at[(0,) * x.ndim].set(value), found

    def empty(shape: jax.ShapeDtypeStruct) -> Array:
        return as_varying(jnp.zeros(shape.shape, shape.dtype), varying_axes(x))

    found = jax.tree.map(empty, jax.eval_shape(apply, x, *others))
    return lax.fori_loop(0, trips, trip, (x, found))[1]


# ---- samples of one device ----------------------------------------------------------------------


def product_work(sample: Product, device: Any) -> Work:
    """One product, or one with its factors rounded to 8 bits."""
    x = _normal(device, (sample.M, sample.K), 1.0)
    w = _normal(device, (sample.K, sample.N), sample.K**-0.5)
    if not sample.fp8:
        return Work(jnp.dot, (x, w))
    options = None if device.platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}
    return Work(lambda x, w: fp8_product(x, w, 1), (x, w), options=options)


def pass_work(sample: Pass, device: Any) -> Work:
    """One pass over memory: x + x^2."""
    return Work(lambda x: x + x * x, (_normal(device, (sample.size // 2,), 0.01),))


def small_kernels_work(sample: SmallKernels, device: Any) -> Work:
    """Small products in a chain, each a kernel of its own."""
    x, w = (_normal(device, (SMALL, SMALL), SMALL**-0.5) for _ in range(2))

    def chain(x: Array, w: Array) -> Array:
        for _ in range(sample.count):
            x = jnp.dot(x, w)
        return x

    return Work(chain, (x, w))


def attention_work(sample: Attention, device: Any) -> Work:
    """The kernel that a config with `model.attention: auto` has on this device."""
    config, (B, T, N, H) = attention_config(sample, device), attention_shape(sample)
    kernel, scores = make_kernel(config.model), make_scores(config.model)
    q, k, v, do = (_normal(device, (B, T, N, H), 1.0) for _ in range(4))
    sites = Sites(jnp.arange(T), jnp.arange(T))
    if not sample.backward:
        return Work(lambda q, k, v: kernel.fwd(q, k, v, sites, scores=scores), (q, k, v))
    o, lse = jax.jit(lambda q, k, v: kernel.fwd(q, k, v, sites, scores=scores))(q, k, v)

    def backward(do: Array, *saved: Array) -> Any:
        found = kernel.bwd(Saved(*saved), do, sites, scores=scores)
        return found.q, found.k, found.v

    return Work(backward, (do, q, k, v, o.astype(q.dtype), lse))


def attention_shape(sample: Attention) -> tuple[int, int, int, int]:
    return 1, sample.length, sample.heads, sample.head_size


def attention_config(sample: Attention, device: Any) -> Config:
    """A config with the sample's sizes, and the kernel that is chosen for it."""
    model = ModelConfig(
        hidden_size=sample.heads * sample.head_size,
        num_heads=sample.heads,
        seq_length=sample.length,
        dtype=jnp.dtype(half(device)).name,
        vocab_size=256,
    )
    kernel, _ = choose_kernel(Config(model=model), device, documents=False)
    return Config(model=dataclasses.replace(model, attention=kernel))


def half(device: Any) -> Any:
    """The precision of 16 bits that a device computes in: GPUs before Ampere have no bfloat16."""
    return jnp.bfloat16 if float(getattr(device, "compute_capability", 8.0)) >= 8 else jnp.float16


def _normal(device: Any, shape: tuple[int, ...], scale: float) -> Array:
    """Random values: a GPU computes with zeros faster than with data."""

    def draw() -> Array:
        return scale * jax.random.normal(jax.random.key(math.prod(shape)), shape, half(device))

    return jax.jit(draw, out_shardings=jax.sharding.SingleDeviceSharding(device))()


# ---- samples of several devices -----------------------------------------------------------------


def exchange_work(sample: Exchange, devices: list[Any]) -> Work:
    """A collective in all groups of the devices at once."""
    n, stride = sample.group.members, sample.group.stride
    devices = in_process_order(devices)
    layout = Layout(dp=len(devices) // (n * stride), cp=n, tp=stride)
    mesh = make_mesh(layout, devices)
    values = sample.size // 2 // (n if sample.kind == ALL_GATHER else 1)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    shape, dtype = (len(devices), values), half(devices[0])
    x = jax.jit(functools.partial(jnp.ones, shape, dtype), out_shardings=sharding)()
    return Work(APPLIED[sample.kind], (x,), mesh)


def _all_reduce(x: Array) -> Array:
    return as_varying(lax.psum(x, GROUP), [GROUP])


def _all_gather(x: Array) -> Array:
    return lax.all_gather(x, GROUP, axis=1, tiled=True)


def _reduce_scatter(x: Array) -> Array:
    return lax.psum_scatter(x, GROUP, scatter_dimension=1, tiled=True)


def _permute(x: Array) -> Array:
    return shift(x, GROUP)


APPLIED: dict[str, Apply] = {
    ALL_REDUCE: _all_reduce,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    PERMUTE: _permute,
}
