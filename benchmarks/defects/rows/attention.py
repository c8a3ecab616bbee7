"""Defects of attention over a ring of devices, and of what its scores depend on."""

from benchmarks.breaks.table import RING, Break
from benchmarks.defects.cases import (
    APART,
    BLOCKS,
    BLOCKWISE,
    CP,
    LLAMA,
    QWEN,
    ROW_COL,
    RSA,
    T5,
    TP,
    WINDOW,
)
from benchmarks.defects.table import Defect, Kind, Reach, known

FILE = "jaxptd/attention/ring.py"
BODY = "jaxptd/step/body.py"
VERIFY = "tests/test_verify.py"

ATTENTION = (
    # ---- hops and blocks ----
    Defect(
        Kind.RING,
        known("forward ring believes the block is the next device's"),
        (BLOCKWISE,),
    ),
    Defect(Kind.RING, known("gradients of keys stay one device too early"), (CP,)),
    Defect(Kind.RING, known("causal ring sees later devices"), (BLOCKWISE,)),
    Defect(Kind.RING, known("a hop too few for a window"), (WINDOW,)),
    Defect(Kind.RING, known("gradients of a window's keys end at the next device"), (WINDOW,)),
    Defect(
        Kind.RING,
        Break(
            "a hop too few",
            FILE,
            "others = lax.axis_size(self.axis) - 1",
            "others = max(lax.axis_size(self.axis) - 2, 0)",
            f"{RING} tests/attention/test_ring.py",
        ),
        (CP,),
    ),
    Defect(
        Kind.RING,
        Break(
            "backward believes the first block is the next device's",
            FILE,
            "total, dx = visit(total, x, (me - 1) % size)",
            "total, dx = visit(total, x, (me + 1) % size)",
            RING,
        ),
        (BLOCKWISE,),
    ),
    Defect(
        Kind.RING,
        Break(
            "gradients of keys miss the block visited last",
            FILE,
            "        dx += local_dx\n",
            "        dx += 0 * local_dx\n",
            RING,
        ),
        (CP,),
    ),
    Defect(
        Kind.RING,
        Break(
            "RSA's scores in the columns of the next block",
            "jaxptd/attention/rsa.py",
            "start = source * k.shape[1]",
            "start = (source + 1) % lax.axis_size(ring.axis) * k.shape[1]",
            RING,
            "rsa",
        ),
        (RSA,),
    ),
    Defect(Kind.SUM_BACKWARD, known("RSA's gradient of scores not scaled"), (RSA,)),
    Defect(
        Kind.SUM_FORWARD,
        Break(
            "blocks of a ring are merged by the larger sum alone",
            "jaxptd/attention/kernel.py",
            "both = jnp.logaddexp(lse, other_lse)",
            "both = jnp.maximum(lse, other_lse)",
            RING,
        ),
        (CP,),
    ),
    # ---- order ----
    Defect(Kind.ORDER, known("a zigzag's second chunk at its first one's mirror"), (CP,)),
    Defect(
        Kind.ORDER,
        Break(
            "tokens in the order of the text, positions in a zigzag",
            FILE,
            "blocks = [self._chunks(length // devices, i, devices) for i in range(devices)]",
            "blocks = [[(i * (length // devices), length // devices)] for i in range(devices)]",
            f"tests/attention/test_ring.py {VERIFY}",
        ),
        (CP,),
    ),
    Defect(
        Kind.ORDER,
        Break(
            "tokens in a zigzag, positions in the order of the text",
            FILE,
            "chunks = self._chunks(length, device, lax.axis_size(self.axis))\n        return",
            "chunks = [(device * length, length)]\n        return",
            f"tests/attention/test_ring.py {RING}",
        ),
        (CP,),
    ),
    Defect(
        Kind.ORDER,
        Break(
            "targets in the order of the text",
            "jaxptd/step/batch.py",
            "found[:, self.token_orders[field][index[1]]]",
            "found[:, index[1] if field == 'targets' else self.token_orders[field][index[1]]]",
            f"tests/run/test_batches.py {VERIFY}",
        ),
        (CP,),
    ),
    Defect(
        Kind.DROPOUT,
        Break(
            "every device has the positions of the first",
            FILE,
            "devices = [lax.axis_index(axis) * inner + i for i in range(inner)]",
            "devices = [lax.axis_index(axis) * 0 + i for i in range(inner)]",
            f"tests/attention/test_ring.py {VERIFY}",
        ),
        (CP,),
    ),
    # ---- masks and documents ----
    Defect(
        Kind.MASK,
        Break(
            "a token does not see itself",
            "jaxptd/attention/kernel.py",
            "(query_T1 if scores.causal else NOWHERE - 1) >= sites.key_S",
            "(query_T1 if scores.causal else NOWHERE - 1) > sites.key_S",
            "tests/attention/test_kernel.py tests/attention/test_xla.py",
        ),
        (CP,),
        Reach.BOTH,
    ),
    Defect(Kind.MASK, known("a window of one token more"), (WINDOW,), Reach.BOTH),
    Defect(Kind.MASK, known("tiles of a ring at the end of a window are not computed"), (WINDOW,)),
    Defect(
        Kind.MASK,
        Break(
            "a zigzag's other half",
            "jaxptd/attention/tiles.py",
            "jnp.where(source > lax.axis_index(task.ring.axis), half.keys, 0)",
            "jnp.where(source < lax.axis_index(task.ring.axis), half.keys, 0)",
            RING,
        ),
        (CP,),
    ),
    Defect(
        Kind.MASK,
        known("a grid's blocks of keys have the positions of its queries"),
        (BLOCKS,),
    ),
    Defect(Kind.DOCUMENTS, known("documents of the sender ignored"), (f"{CP} {APART}",)),
    Defect(
        Kind.DOCUMENTS,
        Break(
            "segments are not gathered",
            BODY,
            "ring.by_device(lax.all_gather(segment_BT, Axis.CP, axis=1))",
            "ring.by_device(jnp.tile(segment_BT, lax.axis_size(Axis.CP)))",
            f"{VERIFY} tests/step/test_documents.py",
        ),
        (f"{CP} {APART}",),
    ),
    Defect(
        Kind.DOCUMENTS,
        Break(
            "segments of the ring's blocks in turned order",
            BODY,
            "ring.by_device(lax.all_gather(segment_BT, Axis.CP, axis=1))",
            "ring.by_device(lax.all_gather(segment_BT, Axis.CP, axis=1))[:, ::-1]",
            f"{VERIFY} tests/step/test_documents.py",
        ),
        (f"{CP} {APART}", f"{ROW_COL} {APART}"),
    ),
    # ---- heads ----
    Defect(Kind.HEADS, known("every device takes the first kv head"), (f"{TP} {QWEN}",)),
    Defect(
        Kind.HEADS,
        Break(
            "gathered kv heads of the device's number",
            "jaxptd/layers/axes.py",
            "first = lax.axis_index(self.inner) * heads // devices",
            "first = lax.axis_index(self.inner) % heads",
            "tests/layers/test_contract.py",
            "groups and tp",
        ),
        (f"{TP} {QWEN}",),
    ),
    Defect(
        Kind.HEADS,
        known("positions of the first tokens on every row of a grid"),
        (f"{ROW_COL} {LLAMA}",),
    ),
    Defect(
        Kind.FAMILY,
        Break(
            "rotary positions begin anew on every device",
            "jaxptd/layers/attention/itself.py",
            "rotate(x_BTNH, position_T, number_H",
            "rotate(x_BTNH, position_T - position_T[0], number_H",
            f"tests/layers/test_contract.py {VERIFY}",
            "groups or options",
        ),
        (f"{CP} {LLAMA}",),
    ),
    # ---- biases by distance ----
    Defect(Kind.FAMILY, known("the bias of the last tile only gets a gradient"), (f"{CP} {T5}",)),
    Defect(
        Kind.FAMILY, known("a zigzag's two chunks have the bias of neighbours"), (f"{CP} {T5}",)
    ),
    Defect(
        Kind.FAMILY,
        known("keys of another sequence have positions of the queries' number"),
        (f"{CP} {T5} model.seq_length=16",),
    ),
)
