"""Programs that run a sample many times in one loop, so that the host's launches do not count.

A trip's input is the result of the trip before it, or has one value of that result, which is then
an output of the loop. So XLA can neither leave out, hoist nor join trips. Which of the two a sample
has is chosen so that XLA for GPUs copies nothing in a trip: a sum over devices is in place, and a
pass over memory that is not would write its input, too.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxptd.attention.kernel import Saved, ScoreCoordinates
from jaxptd.calibration.suite import SIZE, SMALL, Attention, Exchange, Pass, Product, SmallKernels
from jaxptd.collectives import as_varying, shift, varying_axes
from jaxptd.config import Config, ModelConfig
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxptd.layers.attention.heads import choose_kernel, make_kernel, make_scores
from jaxptd.layers.fp8 import fp8_matmul
from jaxptd.mesh import Axis, Layout, in_process_order, make_mesh

SCALE = 0.1  # of inputs: sums of many products stay finite in 16 bits
GROUP = Axis.CP  # the axis of a mesh along which an exchange goes
Apply = Callable[..., Any]  # (x, *others) -> an array, or a tree of them


class Work(NamedTuple):
    """A sample as JAX runs it.

    apply: the function that is timed, of the inputs. inputs: their shapes and shardings. mesh: the
    devices that share them; None: one device has all. options: of the compiler. in_place: a trip's
    result is the next one's first input.
    """

    apply: Apply
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    mesh: Mesh | None = None
    options: dict[str, Any] | None = None
    in_place: bool = False


def inputs_of(work: Work) -> tuple[Array, ...]:
    """Inputs of varied values: a GPU computes with zeros faster than with data."""
    makers = {shape: _varied(shape) for shape in work.inputs}
    return tuple(makers[shape]() for shape in work.inputs)


def _varied(shape: jax.ShapeDtypeStruct) -> Callable[[], Array]:
    def draw() -> Array:
        numbers = jnp.arange(shape.size, dtype=jnp.float32).reshape(shape.shape)
        return (SCALE * jnp.sin(numbers)).astype(shape.dtype)

    return jax.jit(draw, out_shardings=shape.sharding)


def compiled(work: Work, trips: int) -> Any:
    """Compiles a loop of this many trips."""
    function = functools.partial(_in_place if work.in_place else _loop, work.apply, trips)
    if work.mesh is not None:
        shards = PartitionSpec(tuple(work.mesh.axis_names))
        function = jax.shard_map(
            function, mesh=work.mesh, in_specs=shards, out_specs=shards, check_vma=True
        )
    return jax.jit(function).lower(*work.inputs).compile(compiler_options=work.options)


def _in_place(apply: Apply, trips: int, x: Array, *others: Array) -> Array:
    return lax.fori_loop(0, trips, lambda _, x: apply(x, *others), x)


def _loop(apply: Apply, trips: int, x: Array, *others: Array) -> Any:
    def trip(_: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        x, _ = carry
        results = apply(x, *others)
        first = jax.tree.leaves(results)[0]
        value = first[(0,) * first.ndim].astype(x.dtype)
        return x.at[(0,) * x.ndim].set(value), results

    def empty(shape: jax.ShapeDtypeStruct) -> Array:
        return as_varying(jnp.zeros(shape.shape, shape.dtype), varying_axes(x))

    zeros = jax.tree.map(empty, jax.eval_shape(apply, x, *others))
    return lax.fori_loop(0, trips, trip, (x, zeros))[1]


# ---- samples of one device ----------------------------------------------------------------------


def product_work(sample: Product, device: Any) -> Work:
    """One product, or one with its factors rounded to 8 bits."""
    inputs = _on(device, (sample.M, sample.K)), _on(device, (sample.K, sample.N))
    if not sample.fp8:
        return Work(jnp.dot, inputs)
    options = None if device.platform == "cpu" else {"xla_gpu_enable_triton_gemm": False}
    return Work(
        lambda x, w: fp8_matmul(x, w, 1), inputs, options=options, in_place=sample.N == sample.K
    )


def pass_work(sample: Pass, device: Any) -> Work:
    """One pass over memory: x + x^2."""
    return Work(lambda x: x + x * x, (_on(device, (sample.size // SIZE,)),), in_place=True)


def small_kernels_work(sample: SmallKernels, device: Any) -> Work:
    """Small products in a chain, each a kernel of its own."""

    def chain(x: Array, w: Array) -> Array:
        for _ in range(sample.count):
            x = jnp.dot(x, w)
        return x

    return Work(chain, (_on(device, (SMALL, SMALL)),) * 2)


def attention_work(sample: Attention, device: Any) -> Work:
    """The kernel that a config with `model.attention: auto` has on this device."""
    model = attention_model(sample, device)
    kernel, scores = make_kernel(model), make_scores(model)
    coordinates = ScoreCoordinates(jnp.arange(sample.length), jnp.arange(sample.length))

    def forward(q: Array, k: Array, v: Array) -> Any:
        return kernel.fwd(q, k, v, coordinates, scores=scores)

    def backward(do: Array, *saved: Array) -> Any:
        gradients = kernel.bwd(Saved(*saved), do, coordinates, scores=scores)
        return gradients.q, gradients.k, gradients.v

    x = _on(device, (1, sample.length, sample.heads, sample.head_size))
    if not sample.backward:
        return Work(forward, (x, x, x))
    lse = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32, sharding=x.sharding)
    return Work(backward, (x, x, x, x, x, lse))


def attention_model(sample: Attention, device: Any) -> ModelConfig:
    """A model with the sample's sizes, and the attention kernel that is chosen for it."""
    model = ModelConfig(
        hidden_size=sample.heads * sample.head_size,
        num_heads=sample.heads,
        seq_length=sample.length,
        dtype=jnp.dtype(half(device)).name,
        vocab_size=256,
    )
    kernel, _ = choose_kernel(Config(model=model), device, documents=False)
    return dataclasses.replace(model, attention=kernel)


def half(device: Any) -> Any:
    """The precision of 16 bits that a device computes in: GPUs before Ampere have no bfloat16."""
    return jnp.bfloat16 if float(getattr(device, "compute_capability", 8.0)) >= 8 else jnp.float16


def _on(device: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, half(device), sharding=SingleDeviceSharding(device))


# ---- samples of several devices -----------------------------------------------------------------


def exchange_work(sample: Exchange, devices: list[Any]) -> Work:
    """A collective in all groups of the devices at once."""
    n, stride = sample.group.members, sample.group.stride
    devices = in_process_order(devices)
    layout = Layout(dp=len(devices) // (n * stride), cp=n, tp=stride)
    mesh = make_mesh(layout, devices)
    shape = len(devices), sample.size // SIZE // (n if sample.kind == ALL_GATHER else 1)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    x = jax.ShapeDtypeStruct(shape, half(devices[0]), sharding=sharding)
    return Work(APPLIED[sample.kind], (x,), mesh, in_place=sample.kind == ALL_REDUCE)


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
