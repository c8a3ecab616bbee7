"""Defects of the collectives that layers use, and of the products around a ring."""

from benchmarks.breaks.table import Break
from benchmarks.defects.cases import CP, SP, STEPS, TP
from benchmarks.defects.table import Defect, Kind, known

FILE = "jaxptd/collectives.py"
TESTS = "tests/test_collectives.py"
RING = "tests/matmul/test_ring.py"
ALL_GATHER = "y = jnp.moveaxis(lax.all_gather(x, axis), 0, dim)"
COPY = 'return lax.pcast(x, axis, to="varying")\n\n\ndef reduce_from'
PSUM = "    return lax.psum(x, axis)\n\n\ndef local_block"
REDUCE_SCATTER = "return lax.psum_scatter(jnp.moveaxis(y, dim, 0), axis)"
# x, with a gradient multiplied by the number of devices; with none; with that of the first device.
# On one device all change nothing, or one device would make the same mistake.
MORE = "x + (lax.axis_size(axis) - 1) * (x - lax.stop_gradient(x))"
NONE = "lax.stop_gradient(x) if lax.axis_size(axis) > 1 else x"
FIRST = "jnp.where(lax.axis_index(axis) == 0, x, lax.stop_gradient(x))"

COLLECTIVES = (
    # ---- sums of forward ----
    Defect(Kind.SUM_FORWARD, known("reduce_from sums nothing"), (TP,)),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "reduce_from sums as often as there are devices",
            FILE,
            PSUM,
            PSUM.replace("(x, axis)", "(x, axis) * lax.axis_size(axis)"),
            TESTS,
        ),
        (TP,),
    ),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "reduce_scatter sums nothing",
            FILE,
            REDUCE_SCATTER,
            "return jnp.moveaxis(y, dim, 0)[lax.axis_index(axis)]",
            TESTS,
        ),
        (SP,),
    ),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "reduce_scatter sums as often as there are devices",
            FILE,
            REDUCE_SCATTER,
            f"{REDUCE_SCATTER} * lax.axis_size(axis)",
            TESTS,
        ),
        (SP,),
    ),
    # ---- sums of backward ----
    Defect(
        Kind.SUM_BACKWARD,
        Break(
            "copy_to has no gradient",
            FILE,
            COPY,
            COPY.replace("(x, axis", f"({NONE}, axis"),
            TESTS,
        ),
        (TP,),
    ),
    Defect(
        Kind.SUM_BACKWARD,
        Break(
            "copy_to's gradient is summed as often as there are devices",
            FILE,
            COPY,
            COPY.replace("(x, axis", f"({MORE}, axis"),
            TESTS,
        ),
        (TP,),
    ),
    Defect(
        Kind.SUM_BACKWARD,
        Break(
            "copy_to's gradient is that of the first device's use",
            FILE,
            COPY,
            COPY.replace("return", "x =").replace("\n\n\n", f"\n    return {FIRST}\n\n\n", 1),
            TESTS,
        ),
        (TP,),
    ),
    Defect(
        Kind.SUM_BACKWARD,
        Break(
            "reduce_from's gradient is summed, too",
            FILE,
            PSUM,
            PSUM.replace("(x, axis)", f"({MORE}, axis)"),
            TESTS,
        ),
        (TP,),
    ),
    Defect(
        Kind.SUM_BACKWARD,
        Break(
            "all_gather's gradient is summed as often as there are devices",
            FILE,
            ALL_GATHER,
            ALL_GATHER.replace("gather(x, axis)", f"gather({MORE}, axis)"),
            TESTS,
        ),
        (SP,),
    ),
    Defect(
        Kind.SUM_BACKWARD,
        Break(
            "all_gather's gradient is that of the first device's use",
            FILE,
            ALL_GATHER,
            f"{ALL_GATHER}\n    y = jnp.where(lax.axis_index(axis) == 0, y, lax.stop_gradient(y))",
            TESTS,
        ),
        (SP,),
    ),
    # ---- blocks of the wrong device ----
    Defect(Kind.RING, known("ring turned round"), (CP,)),
    Defect(Kind.RING, known("all_gather puts blocks in the other order"), (SP,)),
    Defect(
        Kind.RING,
        Break(
            "reduce_scatter leaves the neighbour's block",
            FILE,
            REDUCE_SCATTER,
            REDUCE_SCATTER.replace("moveaxis(y, dim, 0)", "roll(jnp.moveaxis(y, dim, 0), 1, 0)"),
            TESTS,
        ),
        (SP,),
    ),
    Defect(Kind.SHARD, known("local block of the next device"), (SP,)),
    # ---- products around a ring ----
    Defect(Kind.COLLECTIVE_MATMUL, known("collective matmul: a block too early"), (STEPS,)),
    Defect(
        Kind.COLLECTIVE_MATMUL,
        known("collective matmul: dw in the precision of x"),
        (f"{STEPS} model.dtype=bfloat16",),
    ),
    Defect(
        Kind.COLLECTIVE_MATMUL,
        Break(
            "collective matmul: partial sums for the block that has gone",
            "jaxptd/matmul/ring.py",
            "before = _take(h, (me - 1 - step) % size, size)",
            "before = _take(h, (me - step) % size, size)",
            RING,
        ),
        (STEPS,),
    ),
    Defect(
        Kind.COLLECTIVE_MATMUL,
        Break(
            "collective matmul: the last partial sum does not travel",
            "jaxptd/matmul/ring.py",
            "arrived, now = None if total is None else shift(total, axis), x",
            "arrived, now = None if total is None else shift(total, axis, int(step < size - 1)), x",
            RING,
        ),
        (STEPS,),
    ),
    Defect(
        Kind.COLLECTIVE_MATMUL,
        Break(
            "collective matmul: dw without the last block",
            "jaxptd/matmul/ring.py",
            "        if other is not None:",
            "        if other is not None and step < size - 1:",
            RING,
        ),
        (STEPS,),
    ),
)
