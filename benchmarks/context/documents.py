"""The time of attention to packed documents, as a share of that to one long document, on a CPU.

`python -m benchmarks.context.documents [--lengths 4096 1024 256] [--out FILE]`: 8,192 tokens, 4
heads of 64, forward and backward by `attention/xla.py`, in processor seconds, the least of three
runs. Lengths of documents are log-normal, with these means.
"""

import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.lib.pages import append, head, joined, parser, printed
from jaxptd.analysis.report import table, versions
from jaxptd.attention.kernel import Dropout, Saved, ScoreCoordinates, Scores
from jaxptd.attention.xla import Xla
from jaxptd.errors import run_command
from jaxptd.layers.dropout import keep_mask

T, N, H = 8192, 4, 64
KERNEL, SCORES = Xla(Dropout(0.0, keep_mask)), Scores(H**-0.5)


def documents(mean: int) -> Array:
    """The document of each token, `[1, T]`."""
    lengths = np.random.default_rng(0).lognormal(np.log(mean) - 0.5, 1.0, T)
    return jnp.asarray(np.repeat(np.arange(T), np.ceil(lengths).astype(int))[None, :T], jnp.int32)


@jax.jit
def both_passes(q: Array, k: Array, v: Array, do: Array, segment_BT: Array) -> tuple:
    """The output, and the gradients of q, k and v."""
    position_T = jnp.arange(T, dtype=jnp.int32)
    coordinates = ScoreCoordinates(position_T, position_T, segment_BT, segment_BT)
    o, lse = KERNEL.fwd(q, k, v, coordinates, scores=SCORES)
    gradients = KERNEL.bwd(Saved(q, k, v, o, lse), do, coordinates, scores=SCORES)
    return o, *gradients[:3]


def seconds(segment_BT: Array) -> float:
    """Processor seconds of both passes."""
    qkvdo = jnp.asarray(np.random.default_rng(1).standard_normal((4, 1, T, N, H)), jnp.float32)
    found = []
    for _ in range(4):  # the first one compiles
        begin = time.process_time()
        jax.block_until_ready(both_passes(*qkvdo, segment_BT))
        found.append(time.process_time() - begin)
    return min(found[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Compares attention to packed documents with attention to one long document."""
    made = parser("context.documents", main)
    made.add_argument("--lengths", nargs="+", type=int, default=[4096, 1024, 256], help="means")
    options = made.parse_args(argv)
    whole = seconds(jnp.zeros((1, T), jnp.int32))
    rows = printed((f"{n:,}", f"{seconds(documents(n)) / whole:.2f}") for n in options.lengths)
    title = head("Attention to packed documents", "context.documents")
    columns = ("tokens of a document, mean", "time, of one document's")
    append(options.out, title, joined(versions(), table([columns, *rows])))
    return 0


if __name__ == "__main__":
    run_command(main)
