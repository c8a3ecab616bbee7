"""H200s to compile for without having any: the hardware described in `h200.txtpb`."""

from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from jaxptd.errors import UserError

HARDWARE = Path(__file__).parent / "h200.txtpb"
PLUGINS = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cudnn-cu13"


def gpus(number: int) -> list[Any]:
    """Makes so many H200s to compile for.

    Raises:
        UserError: the CUDA plugin is not installed.
    """
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=HARDWARE.read_text(), topology=f"1x1x{number}"
        ).devices
    except Exception as error:
        raise UserError(
            f"no CUDA compiler here ({' '.join(str(error).split())[:120]}); "
            f"pip install --no-deps {PLUGINS}, of the version of jax ({jax.__version__})"
        ) from error
