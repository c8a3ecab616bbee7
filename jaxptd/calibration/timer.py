"""Times samples with JAX, on the devices at hand."""

import collections
import functools
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxptd.analysis.hardware import memory_limit
from jaxptd.calibration import programs
from jaxptd.calibration.programs import Work, compiled, inputs_of
from jaxptd.calibration.suite import (
    Attention,
    Dispatch,
    Exchange,
    Machine,
    Pass,
    Product,
    Sample,
    SmallKernels,
)
from jaxptd.distributed import coordination
from jaxptd.errors import UserError, quoted
from jaxptd.layers.fp8 import CAPABILITY

# ---- the devices: nodes, memory and name ---------------------------------------------------------

# Parts of the names of variants whose limits are not those of the packaged table.
OTHER_VARIANTS = frozenset({"pcie", "nvl", "40gb", "16gb"})


def find_machine(devices: Sequence[Any], *, fp8: bool) -> Machine:
    """The nodes and the memory of devices.

    Args:
        devices: all of a run.
        fp8: whether the hardware table has a limit for products in 8 bits.

    Raises:
        UserError: nodes have different numbers of devices.
    """
    nodes = collections.Counter(map(_node, devices))
    if len(sizes := set(nodes.values())) > 1:
        raise UserError(f"nodes have {sorted(sizes)} devices; start the same number on each")
    capability = float(getattr(devices[0], "compute_capability", CAPABILITY))
    memory = memory_limit(jax.local_devices()[0]) or 0
    return Machine(len(devices), sizes.pop(), memory, fp8 and capability >= CAPABILITY)


def _node(device: Any) -> int:
    """The node of a device: XLA numbers those of GPUs as slices; else a process has one."""
    index = getattr(device, "slice_index", None)
    return int(device.process_index if index is None else index)


def table_name(device_kind: str, known: Iterable[str]) -> str:
    """The name in the hardware table of a device, as JAX names it: `NVIDIA H200` is `h200`.

    Raises:
        UserError: the table has none for it.
    """
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    names = list(known)
    matches = [name for name in names if name in words]
    if len(matches) != 1 or words & OTHER_VARIANTS:
        raise UserError(
            f"no limits of {quoted(device_kind)} in the hardware table; give --gpu, one of "
            f"{', '.join(names)}, or --hardware F with one of your own"
        )
    return matches[0]


REPETITIONS = 5
LONG_ENOUGH = 0.04  # seconds of a loop: a thousand launches by the host
MOST_TRIPS = 1024
DISPATCHES = 200  # in a repetition


class Timer:
    """Times samples; all processes of a run call it with the same ones.

    Args:
        devices: all of the run; this process times kernels on its first.
        repetitions: of each, after one that is not counted.
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
        """The value of the first process, for all of them: their programs have to be alike."""
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
                return programs.exchange_work(sample, self._devices)
            case Product():
                return programs.product_work(sample, self._own)
            case Pass():
                return programs.pass_work(sample, self._own)
            case Attention():
                return programs.attention_work(sample, self._own)
            case SmallKernels():
                return programs.small_kernels_work(sample, self._own)
        raise TypeError(f"no program for {sample}")

    def _repeated(self, call: Callable[[], Any], runs: int) -> tuple[float, ...]:
        _seconds(call)
        return tuple(_seconds(call) / runs for _ in range(self._repetitions))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def _dispatches(device: Any) -> Callable[[], Any]:
    """Launches one program many times; the host does not wait for the device in between."""
    x = jax.device_put(jnp.zeros((), jnp.float32), device)
    step = jax.jit(lambda x: x + 1).lower(x).compile()

    def call() -> Any:
        return functools.reduce(lambda x, _: step(x), range(DISPATCHES), x)

    return call
