"""Checks of the devices: what JAX finds, and whether they compute alike."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxptd.analysis.hardware import memory_limit
from jaxptd.calibration.timer import table_name
from jaxptd.config import Config
from jaxptd.display import gib_text
from jaxptd.distributed.launchers import World
from jaxptd.doctor.nvidia import Found
from jaxptd.doctor.page import Row, failed, judged, note, problem
from jaxptd.errors import UserError
from jaxptd.hardware import accelerators
from jaxptd.run.devices import prepare, start
from jaxptd.step.replicas import unlike

MOST_COMPARED = 64  # local devices whose results are compared
SIZE = 256  # of the matrices that they multiply


# ---- what JAX finds ------------------------------------------------------------------------------


def devices(config: Config | None, world: World, found: Found, *, gpus: int) -> list[Row]:
    """Starts the devices; the rows of this section.

    Args:
        config: of a run. None starts all devices.
        world: the processes, which have joined.
        found: gets the devices.
        gpus: number of NVIDIA GPUs that the system shows.
    """
    if config is None:
        start()
        layout = None
    else:
        layout = f"{config.layout} on {prepare(config, world=world)}"
    found.devices, found.local = jax.devices(), jax.local_devices()
    simulated = config is not None and config.train.platform == "cpu"
    rows = list(_kinds(found, 0 if simulated else gpus))
    if layout:
        rows.append(Row("layout", layout))
    try:
        bits = products(found.local)
    except RuntimeError as error:
        return [*rows, failed("arithmetic", error)]
    return [*rows, agreement(found.local, bits)]


def _kinds(found: Found, gpus: int) -> Iterator[Row]:
    counts = collections.Counter(device.device_kind for device in found.devices)
    first = found.local[0]
    if first.platform == "cpu":
        missed = (
            f"JAX does not use the {gpus} GPUs: see the CUDA plugin, JAX_PLATFORMS and "
            "CUDA_VISIBLE_DEVICES above"
        )
        what = f"{len(found.devices)} on the CPU, which simulates a layout's devices"
        yield judged("devices", what, bad=missed if gpus else "")
        return
    for kind, count in counts.items():
        yield judged("devices", f"{count} x {kind}", remark=_unknown(kind))
    if len(counts) > 1:
        remedy = "use one kind for a run: the slowest devices set its speed"
        yield note("devices", f"{len(counts)} kinds", remedy)
    if limit := memory_limit(first):
        free = limit - (first.memory_stats() or {}).get("bytes_in_use", 0)
        yield Row("memory of a device", f"{gib_text(limit)} for JAX, {gib_text(free)} free")


def _unknown(kind: str) -> str:
    try:
        table_name(kind, accelerators())
    except UserError:
        return (
            "measure it for the planner (jaxptd plan calibrate): the hardware table has no figures "
            "of it"
        )
    return ""


# ---- devices that compute something else ---------------------------------------------------------


def products(local: Sequence[Any]) -> Mapping[Any, bytes]:
    """The bits of the same matmuls on each device, in float32 and bfloat16."""
    chosen = list(local)[:MOST_COMPARED]
    mesh = Mesh(np.array(chosen), ("devices",))
    numbers = np.sin(np.arange(SIZE * SIZE, dtype=np.float32)).reshape(1, SIZE, SIZE)
    each = NamedSharding(mesh, PartitionSpec("devices"))
    x = jax.device_put(np.repeat(numbers, len(chosen), axis=0), each)

    def multiply(x: Any) -> Any:
        wide = jnp.einsum("nij,njk->nik", x, x)
        narrow = jnp.einsum("nij,njk->nik", x.astype(jnp.bfloat16), wide.astype(jnp.bfloat16))
        return wide + narrow.astype(jnp.float32)

    y = jax.jit(multiply, out_shardings=each)(x)
    return {shard.device: np.asarray(shard.data).tobytes() for shard in y.addressable_shards}


def agreement(local: Sequence[Any], bits: Mapping[Any, bytes]) -> Row:
    """A row on whether devices of a kind have computed the same bits."""
    wrong: list[str] = []
    remedy = "take it out of service: its arithmetic is faulty"
    for kind in sorted({device.device_kind for device in bits}):
        alike = {device: x for device, x in bits.items() if device.device_kind == kind}
        odd = unlike(alike)
        wrong += map(str, odd)
        if len(odd) == len(alike):
            remedy = "the arithmetic of some of them is faulty: compare them with further devices"
    what = f"{len(bits)} of {len(local)} multiplied the same matrices"
    if not wrong:
        return Row("arithmetic", what)
    return problem("arithmetic", f"{what}; different bits on {', '.join(wrong)}", remedy)
