"""H200s to compile for without having any: the hardware described in `h200.txtpb`."""

import re
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxptd.errors import UserError, install

HARDWARE = Path(__file__).parent / "h200.txtpb"
PLUGINS = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13"


def gpus(number: int, memory: int | None = None) -> list[Any]:
    """Makes so many H200s to compile for.

    Args:
        number: of them.
        memory: bytes of each, which bound what XLA moves to hide collectives; None: an H200's.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=hardware(memory), topology=f"1x1x{number}"
        ).devices
    except Exception as error:
        raise UserError(
            f"no CUDA compiler here ({' '.join(str(error).split())[:120]}); "
            f"{install('h200')}, its plugins in the version of jax ({jax.__version__})"
        ) from error


def hardware(memory: int | None = None) -> str:
    """The description of an H200, with so many bytes of memory."""
    text = HARDWARE.read_text(encoding="utf-8")
    if memory is None:
        return text
    return re.sub(r"(?<=device_memory_size: )\d+", str(memory), text)
