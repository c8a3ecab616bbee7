"""The parts of a model outside its layers: the tables, and the logits. Bytes are of one device."""

import dataclasses

from jaxptd.analysis.sizes import Sizes
from jaxptd.config import Config


@dataclasses.dataclass(frozen=True)
class Ends:
    """Bytes outside the layers.

    Args:
        parameters: all, in the state's precision.
        gathered: all, in the precision of activations.
        gradient: of the head's table in the state's precision; on a grid also before its sum.
        narrow: the head's table in the precision of activations.
        logits: of one micro-batch, in that precision.
        x: the residual stream.
    """

    parameters: int
    gathered: int
    gradient: int
    narrow: int
    logits: int
    x: int


def ends_of(config: Config) -> Ends:
    """The bytes outside a model's layers."""
    sizes, layout = Sizes(config), config.layout
    found, wide, hidden = sizes.inventory, sizes.master_itemsize, sizes.hidden
    table = sizes.vocab * hidden * wide // sizes.matrix_shards
    positions = found.positions.rows * hidden if found.positions else 0
    squares = sum(head.squares for head in found.heads) * hidden**2
    tables = 1 if config.model.tie_embeddings else 2
    columns = sum(sizes.columns(head) for head in found.heads)
    parameters = tables * table + (positions + squares) * wide // (layout.row * layout.col)
    return Ends(
        parameters=parameters,
        gathered=parameters * sizes.itemsize // wide,
        # A grid's product makes it for a whole column, sums that over the rows, and transposes it.
        gradient=table * (layout.row + 1 if layout.has_grid else 1),
        narrow=table * sizes.itemsize // wide,
        logits=sizes.rows * columns // sizes.inner_devices * sizes.itemsize,
        x=sizes.streams[-1],
    )
