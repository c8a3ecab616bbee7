"""The devices of a calibration: their nodes, memory and name."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jaxptd.analysis.hardware import memory_limit
from jaxptd.calibration.suite import Machine
from jaxptd.errors import UserError, quoted
from jaxptd.layers.fp8 import CAPABILITY

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
    found = getattr(device, "slice_index", None)
    return int(device.process_index if found is None else found)


def table_name(device_kind: str, known: Iterable[str]) -> str:
    """The name in the hardware table of a device, as JAX names it: `NVIDIA H200` is `h200`.

    Raises:
        UserError: the table has none for it.
    """
    words = set(re.split(r"[^a-z0-9]+", device_kind.lower()))
    names = list(known)
    found = [name for name in names if name in words]
    if len(found) != 1 or words & OTHER_VARIANTS:
        raise UserError(
            f"no limits of {quoted(device_kind)} in the hardware table; give --gpu, one of "
            f"{', '.join(names)}, or --hardware F with one of your own"
        )
    return found[0]
