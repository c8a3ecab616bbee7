"""Device memory that a training step takes outside of the compiled program."""

from typing import NamedTuple

from jaxptd.layout import Layout

MIB = 2**20


class Outside(NamedTuple):
    """Memory that is no array of the program.

    Args:
        name: in words.
        bytes: of it on one device.
        source: where the figure is from.
    """

    name: str
    bytes: int
    source: str


CONTEXT = Outside("CUDA context", 500 * MIB, "judged: kernels and the context itself, 0.4-0.6 GiB")
WORKSPACE = Outside(
    "cuBLAS and cuDNN workspace", 128 * MIB, "judged: XLA's is in the program, the libraries' not"
)
NCCL = Outside("NCCL buffers", 512 * MIB, "judged: 0.5-2 GiB, grows with communicators")
OUTSIDE = (CONTEXT, WORKSPACE, NCCL)


def outside(layout: Layout) -> tuple[Outside, ...]:
    """The memory outside of the program on a device of a layout: without collectives no NCCL."""
    return OUTSIDE if layout.num_devices > 1 else OUTSIDE[:2]
