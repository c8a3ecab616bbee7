"""A mesh as text, for `python -m jaxptd.mesh`."""

from typing import Any

import numpy as np


def draw(layout: Any) -> str:
    """The mesh as text: a column a pipeline stage, a line a dp and cp index, tp ranks in a box.

    Args:
        layout: a `mesh.Layout`, whose sizes are read.
    """
    pp, dp, cp = layout.pp, layout.dp, layout.cp
    digits = len(str(layout.num_devices - 1))
    ranks = np.arange(layout.num_devices).reshape(pp, dp * cp, -1)
    d_width, c_width = len(str(dp - 1)), len(str(cp - 1))
    labels = [f"dp {d:>{d_width}} cp {c:>{c_width}} " for d, c in np.ndindex(dp, cp)]
    rows = [
        [" ".join(f"{rank:>{digits}}" for rank in box) for box in line]
        for line in ranks.swapaxes(0, 1)
    ]
    cell = max(len(rows[0][0]), len(f"pp {pp - 1}"))
    margin = " " * len(labels[0])
    title = margin + " ".join(f"  {f'pp {stage}':<{cell}}" for stage in range(pp)).rstrip()
    rule = margin + ("+" + "-" * (cell + 2)) * pp + "+"
    body = [
        label + "".join(f"| {text:<{cell}} " for text in row) + "|"
        for label, row in zip(labels, rows, strict=True)
    ]
    across = f"row {layout.row} x col {layout.col}" if layout.has_grid else f"tp {layout.tp}"
    return "\n".join([title, rule, *body, rule, f"{margin}in each box: {across}"])
