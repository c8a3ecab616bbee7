"""Times samples with JAX, on the devices at hand.

A sample runs many times in one loop, so that the host's launches do not count. An iteration's input
is the previous iteration's result, or contains one value of it, which is then an output of the
loop. So XLA can neither drop, hoist nor merge iterations. Each sample uses the variant for which
XLA on GPUs copies nothing per iteration: an all-reduce runs in place, and an elementwise pass that
did not would also write its input.
"""

import collections
import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxptd.analysis.hardware import memory_limit
from jaxptd.attention.kernel import Saved, ScoreCoordinates
from jaxptd.calibration.suite import (
    SIZE,
    SMALL,
    Attention,
    Dispatch,
    Exchange,
    Machine,
    Pass,
    Product,
    Sample,
    SmallKernels,
)
from jaxptd.collectives import as_varying, shift, varying_axes
from jaxptd.config import Config, ModelConfig
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from jaxptd.distributed import coordination
from jaxptd.errors import UserError, quoted
from jaxptd.layers.attention.heads import choose_kernel, make_kernel, make_scores
from jaxptd.layers.fp8 import CAPABILITY, fp8_matmul
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.topology import domain_of, network_order

# ---- programs of samples -------------------------------------------------------------------------

SCALE = 0.1  # scale of the inputs, so that large matmuls stay finite in 16 bits
GROUP = Axis.CP  # the axis of a mesh along which an exchange goes
Apply = Callable[..., Any]  # (x, *others) -> an array, or a tree of them


class Work(NamedTuple):
    """A sample as JAX runs it.

    apply: the function to time, called with the inputs. inputs: their shapes and shardings. mesh:
    the devices that share them. None if one device has all. options: of the compiler. in_place: an
    iteration's result is the next one's first input.
    """

    apply: Apply
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    mesh: Mesh | None = None
    options: dict[str, Any] | None = None
    in_place: bool = False


def inputs_of(work: Work) -> tuple[Array, ...]:
    """Inputs with varied values: GPUs compute faster with zeros than with data."""
    makers = {shape: _varied(shape) for shape in work.inputs}
    return tuple(makers[shape]() for shape in work.inputs)


def _varied(shape: jax.ShapeDtypeStruct) -> Callable[[], Array]:
    def draw() -> Array:
        numbers = jnp.arange(shape.size, dtype=jnp.float32).reshape(shape.shape)
        return (SCALE * jnp.sin(numbers)).astype(shape.dtype)

    return jax.jit(draw, out_shardings=shape.sharding)


def compiled(work: Work, trips: int) -> Any:
    """Compiles a loop of this many iterations."""
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
    """One matmul, optionally with its factors rounded to 8 bits."""
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
    """A chain of small matmuls, each its own kernel."""

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
    """The 16-bit precision that a device supports: GPUs before Ampere have no bfloat16."""
    return jnp.bfloat16 if float(getattr(device, "compute_capability", 8.0)) >= 8 else jnp.float16


def _on(device: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, half(device), sharding=SingleDeviceSharding(device))


# ---- samples of several devices -----------------------------------------------------------------


def exchange_work(sample: Exchange, devices: list[Any]) -> Work:
    """A collective in all groups of the devices at once."""
    n, stride = sample.group.members, sample.group.stride
    devices = network_order(devices)
    layout = Layout(dp=len(devices) // (n * stride), cp=n, tp=stride)
    mesh = make_mesh(layout, devices)
    shape = len(devices), sample.size // SIZE // (n if sample.kind == ALL_GATHER else 1)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    x = jax.ShapeDtypeStruct(shape, half(devices[0]), sharding=sharding)
    return Work(APPLIED[sample.kind], (x,), mesh, in_place=sample.kind == ALL_REDUCE)


APPLIED: dict[str, Apply] = {
    ALL_REDUCE: lambda x: as_varying(lax.psum(x, GROUP), [GROUP]),
    ALL_GATHER: lambda x: lax.all_gather(x, GROUP, axis=1, tiled=True),
    REDUCE_SCATTER: lambda x: lax.psum_scatter(x, GROUP, scatter_dimension=1, tiled=True),
    PERMUTE: lambda x: shift(x, GROUP),
}


# ---- the devices: nodes, memory and name ---------------------------------------------------------

# Parts of the names of variants with other limits than the packaged table's.
OTHER_VARIANTS = frozenset({"pcie", "nvl", "40gb", "16gb"})


def find_machine(devices: Sequence[Any], *, fp8: bool) -> Machine:
    """The nodes and the memory of devices.

    Args:
        devices: all devices of a run.
        fp8: whether the hardware table has a limit for fp8 matmuls.

    Raises:
        UserError: nodes have different numbers of devices.
    """
    nodes = collections.Counter(map(domain_of, devices))
    if len(sizes := set(nodes.values())) > 1:
        raise UserError(f"nodes have {sorted(sizes)} devices; start the same number on each node")
    capability = float(getattr(devices[0], "compute_capability", CAPABILITY))
    memory = memory_limit(jax.local_devices()[0]) or 0
    return Machine(len(devices), sizes.pop(), memory, fp8 and capability >= CAPABILITY)


def table_name(device_kind: str, known: Iterable[str]) -> str:
    """A device's name in the hardware table, from JAX's name: `NVIDIA H200` is `h200`.

    Raises:
        UserError: the table has no such device.
    """
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    names = list(known)
    matches = [name for name in names if name in words]
    if len(matches) != 1 or words & OTHER_VARIANTS:
        raise UserError(
            f"the hardware table has no {quoted(device_kind)}; give --gpu, one of "
            f"{', '.join(names)}, or --hardware F with one of your own"
        )
    return matches[0]


REPETITIONS = 5
LONG_ENOUGH = 0.04  # seconds of a loop, a thousand host launches
MOST_TRIPS = 1024
DISPATCHES = 200  # per repetition


class Timer:
    """Times samples; all processes of a run call it with the same ones.

    Args:
        devices: all devices of the run; this process times kernels on its first.
        repetitions: per sample, after one that does not count.
        long_enough: seconds that a repetition should take.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        *,
        repetitions: int = REPETITIONS,
        long_enough: float = LONG_ENOUGH,
    ) -> None:
        self._devices = list(devices)
        self._repetitions, self._long_enough = repetitions, long_enough
        self._meetings = 0

    def __call__(self, sample: Sample) -> tuple[float, ...]:
        """Seconds of each repetition, of one run of the sample."""
        if isinstance(sample, Dispatch):
            return self._repeated(_dispatches(self._own), DISPATCHES)
        work = self._work(sample)
        runs = sample.count if isinstance(sample, SmallKernels) else 1
        inputs = inputs_of(work)
        call = functools.partial(compiled(work, 1), *inputs)
        _seconds(call)
        once = min(_seconds(call) for _ in range(2))
        trips = max(1, min(MOST_TRIPS, math.ceil(self._long_enough / once)))
        trips = int(self.agreed(str(trips)))
        if trips > 1:
            call = functools.partial(compiled(work, trips), *inputs)
        return self._repeated(call, trips * runs)

    def agreed(self, value: str) -> str:
        """The first process's value, for all processes: their programs must be the same."""
        self._meetings += 1
        return coordination.share(f"calibrate.{self._meetings}", value)[0]

    @property
    def _own(self) -> Any:
        """The first device of this process."""
        here = jax.process_index()
        return next(device for device in self._devices if device.process_index == here)

    def _work(self, sample: Sample) -> Work:
        match sample:
            case Exchange():
                return exchange_work(sample, self._devices)
            case Product():
                return product_work(sample, self._own)
            case Pass():
                return pass_work(sample, self._own)
            case Attention():
                return attention_work(sample, self._own)
            case SmallKernels():
                return small_kernels_work(sample, self._own)
        raise TypeError(f"no program for {sample}")

    def _repeated(self, call: Callable[[], Any], runs: int) -> tuple[float, ...]:
        _seconds(call)
        return tuple(_seconds(call) / runs for _ in range(self._repetitions))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _dispatches(device: Any) -> Callable[[], Any]:
    """Launches one program many times without waiting for the device in between."""
    x = jax.device_put(jnp.zeros((), jnp.float32), device)
    step = jax.jit(lambda x: x + 1).lower(x).compile()

    def call() -> Any:
        return functools.reduce(lambda x, _: step(x), range(DISPATCHES), x)

    return call
