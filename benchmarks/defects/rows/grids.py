"""Defects of products, norms, softmax and tables on a grid of devices."""

from benchmarks.breaks.table import CONTRACT, Break
from benchmarks.breaks.table import SUMMA as PRODUCTS
from benchmarks.defects.cases import BLOCKS, CANNON, FOX, ROW_COL, SLICES, SUMMA, TP, UNEVEN
from benchmarks.defects.table import Defect, Kind, known

FILE = "jaxptd/matmul/grid.py"
AXES = "jaxptd/layers/axes.py"
ATTENTION = "jaxptd/layers/grid_attention.py"
GRID = "jaxptd/layers/grid.py"

GRIDS = (
    # ---- panels ----
    Defect(Kind.GRID, known("SUMMA broadcasts the first device's panels only"), (SUMMA,)),
    Defect(
        Kind.GRID,
        known("gradient of A multiplied with B instead of its transpose's blocks"),
        (FOX, CANNON),
        explained="the same products, from another panel on; only the moves at the ends are more",
    ),
    Defect(
        Kind.GRID,
        Break(
            "SUMMA's partial sums end on the next device",
            FILE,
            "local = total[number] + reduce_to(partial_sum, self.axis, target)",
            "local = total[number] + reduce_to(partial_sum, self.axis, 1 - target)",
            PRODUCTS,
            "summa",
        ),
        (SUMMA,),
    ),
    Defect(
        Kind.GRID,
        Break(
            "Cannon's panels are not skewed",
            FILE,
            "k = (i + first + (j if self.skewed else 0)) % self.steps",
            "k = (i + first) % self.steps",
            PRODUCTS,
            "cannon",
        ),
        (CANNON,),
    ),
    Defect(
        Kind.GRID,
        Break(
            "Cannon's panels travel along the other axis",
            FILE,
            "return shift(x, self.grid.axes[self.dim], by=-1)",
            "return shift(x, self.grid.axes[1 - self.dim], by=-1)",
            PRODUCTS,
            "cannon",
        ),
        (CANNON,),
    ),
    Defect(
        Kind.GRID,
        Break(
            "Cannon's sums stay where the last step left them",
            FILE,
            "self._at(*at, self.first - 1)) for at in",
            "self._at(*at, self.first)) for at in",
            PRODUCTS,
            "cannon or fox",
        ),
        (CANNON,),
    ),
    Defect(
        Kind.GRID,
        Break(
            "Fox broadcasts the panel of the first step",
            FILE,
            "return (self.start + step) % self.steps, 0",
            "return self.start % self.steps, 0",
            PRODUCTS,
            "fox",
        ),
        (FOX,),
    ),
    Defect(
        Kind.GRID,
        Break(
            "slices are put together in turned order",
            FILE,
            "for x in total]\n        x = jnp.stack",
            "for x in total[::-1]]\n        x = jnp.stack",
            PRODUCTS,
            "gather or slices",
        ),
        (SLICES,),
    ),
    Defect(
        Kind.GRID,
        Break(
            "a slice of one section only",
            FILE,
            "return math.lcm(size, self.other) // size",
            "return 1",
            PRODUCTS,
            "gather or slices",
        ),
        (SLICES,),
    ),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "a product on the grid keeps its last panel only",
            "jaxptd/summa2d.py",
            "return total + dot(a_Mk, b_kN, ROWS_BY_COLUMNS, wide)",
            "return 0 * total + dot(a_Mk, b_kN, ROWS_BY_COLUMNS, wide)",
            PRODUCTS,
        ),
        (SUMMA,),
    ),
    # ---- norms, softmax, padding ----
    Defect(
        Kind.NORM,
        Break(
            "a norm's statistics are those of a device's numbers",
            AXES,
            "return tuple(lax.psum(jnp.stack(sums), axis)) if axis else sums",
            "return sums",
            CONTRACT,
            "norm",
        ),
        (ROW_COL,),
    ),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "sums over col are made as often as there are columns",
            AXES,
            "return tuple(lax.psum(jnp.stack(sums), axis)) if axis else sums",
            "return tuple(lax.axis_size(axis) * lax.psum(jnp.stack(sums), axis)) if axis else sums",
            CONTRACT,
            "norm",
        ),
        (ROW_COL,),
    ),
    Defect(Kind.NORM, known("padding of the hidden units not zeroed"), (UNEVEN,)),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "softmax over a device's own keys",
            ATTENTION,
            "sum_BNT1 = lax.psum(p_BNTS.sum(-1, keepdims=True), axis)",
            "sum_BNT1 = p_BNTS.sum(-1, keepdims=True)",
            "tests/layers/test_grid_attention.py",
        ),
        (BLOCKS,),
    ),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "the maximum of scores is a device's own",
            ATTENTION,
            "max_BNT1 = lax.pmax(lax.stop_gradient(s_BNTS).max(-1, keepdims=True), axis)",
            "max_BNT1 = lax.stop_gradient(s_BNTS).max(-1, keepdims=True)",
            "tests/layers/test_grid_attention.py",
        ),
        (BLOCKS,),
    ),
    Defect(
        Kind.DROPOUT,
        Break(
            "hidden units of a grid's dropout by local number",
            AXES,
            "return _numbers(self.hidden, size)",
            "return _numbers(None, size)",
            CONTRACT,
            "block and row",
        ),
        (ROW_COL,),
    ),
    # ---- tables ----
    Defect(
        Kind.VOCABULARY,
        Break(
            "positions of a grid in the rows of the first",
            GRID,
            "x_TD = local_rows(table, position_T, Axis.ROW).astype(dtype)",
            "x_TD = local_rows(table, position_T % table.shape[0], Axis.ROW).astype(dtype)",
            CONTRACT,
            "position and row",
        ),
        (ROW_COL,),
    ),
    Defect(
        Kind.VOCABULARY,
        known("rows of the vocabulary of the device before"),
        (TP,),
    ),
    Defect(
        Kind.VOCABULARY,
        Break(
            "every device adds a row for tokens of others",
            AXES,
            "return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)",
            "return table[jnp.where(mine, local, 0)]",
            CONTRACT,
            "embedding",
        ),
        (TP,),
    ),
    Defect(Kind.VOCABULARY, known("maximum over the vocabulary is local"), (TP,)),
    Defect(
        Kind.VOCABULARY,
        Break(
            "the largest logit is a device's own",
            AXES,
            "return lax.pmax(m, self.inner)",
            "return m",
            f"{CONTRACT} tests/layers/test_loss.py",
            "loss",
        ),
        (TP,),
    ),
    Defect(
        Kind.VOCABULARY,
        Break(
            "ids of the logits are those of the device before",
            AXES,
            "return local_numbers(self.inner, size)",
            "return (local_numbers(self.inner, size) - size) % (size * lax.axis_size(self.inner))",
            f"{CONTRACT} tests/layers/test_loss.py",
            "loss",
        ),
        (TP,),
    ),
)
