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
        narrow: the head's table in the precision of activations.
        gradient: of that, until it is added to others; a grid's is in the state's precision.
        product: both; on a grid of whole columns, which its products take, and the sum.
        logits: of one micro-batch, in that precision.
        x: the residual stream.
    """

    parameters: int
    gathered: int
    narrow: int
    gradient: int
    product: int
    logits: int
    x: int


def ends_of(config: Config) -> Ends:
    """The bytes outside a model's layers."""
    sizes, layout = Sizes(config), config.layout
    found, wide, hidden = sizes.inventory, sizes.master_itemsize, sizes.hidden
    table = sizes.vocab * hidden * wide // sizes.matrix_shards
    narrow = table * sizes.itemsize // wide
    positions = found.positions.rows * hidden if found.positions else 0
    squares = sum(head.squares for head in found.heads) * hidden**2
    tables = 1 if config.model.tie_embeddings else 2
    columns = sum(sizes.columns(head) for head in found.heads)
    parameters = tables * table + (positions + squares) * wide // (layout.row * layout.col)
    return Ends(
        parameters=parameters,
        gathered=parameters * sizes.itemsize // wide,
        narrow=narrow,
        gradient=table if layout.has_grid else narrow,
        product=(layout.row * (narrow + table) + table if layout.has_grid else 2 * narrow),
        logits=sizes.rows * columns // sizes.inner_devices * sizes.itemsize,
        x=sizes.streams[-1],
    )
