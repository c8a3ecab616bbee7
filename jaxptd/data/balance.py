"""Packed documents arranged so that devices have equal work: `layout.balance`.

Attention skips chunks of scores between documents, so a sequence costs the chunks that its own
documents leave. Two arrangements make devices equal, and neither changes what is computed: the
samples of a global batch are dealt to replicas and micro-batches, and the blocks of a sequence to
the devices that share it. Both are functions of the batch's documents alone, so a resumed run, or
another layout, computes the same losses up to rounding.

Work is counted in chunks of scores, as `attention/xla.py` visits them: queries of block i meet the
keys of every block from the one in which their first document begins to their own.

Letters: B samples, T position, n blocks of a sequence.
Source: Wang et al., arXiv 2503.17924 (WLB-LLM: packing and sharding by the work of documents).
"""

import heapq

import numpy as np

from jaxptd.context_parallel import CHUNK, placed_blocks
from jaxptd.data.batches import document_starts

COARSE = 16  # blocks at least into which a sample is cut, to compare it with others


def visits(segment_BT: np.ndarray, block: int, *, reach: int | None = None) -> np.ndarray:
    """Blocks of keys that each block of queries meets under a causal mask, int64[B, n].

    Args:
        segment_BT: the document of each token; the tokens of a document follow one another.
        block: tokens of a block; the last one of a sequence may be shorter.
        reach: tokens that a query sees at most, itself included; None: all before it.
    """
    first_n = np.arange(0, segment_BT.shape[1], block)
    seen_Bn = document_starts(segment_BT)[:, ::block]
    if reach is not None:
        seen_Bn = np.maximum(seen_Bn, first_n - reach + 1)
    met_Bn: np.ndarray = first_n // block - seen_Bn // block + 1
    return met_Bn


def sample_work(segment_BT: np.ndarray, *, reach: int | None = None) -> np.ndarray:
    """The work of each sample's attention, in squares of its blocks, int64[B]."""
    block = min(CHUNK, -(-segment_BT.shape[1] // COARSE))
    work_B: np.ndarray = visits(segment_BT, block, reach=reach).sum(1)
    return work_B


def shares(work_n: np.ndarray, count: int) -> np.ndarray:
    """Splits pieces into `count` shares with equally many pieces and as equal work as may be.

    The largest piece goes first, each to the share that lacks most for each piece that it still
    takes. A share with one very large piece thus gets small ones. Equal pieces stay in their order.

    Returns:
        the numbers of the pieces, ascending in each share, int64[count, n / count].
    """
    room, whole = len(work_n) // count, float(work_n.sum()) / count
    found: list[list[int]] = [[] for _ in range(count)]
    lacking = [(-whole / room, share) for share in range(count)]  # a heap of those with room
    lacks = [whole] * count
    for piece in np.argsort(-work_n, kind="stable").tolist():
        share = heapq.heappop(lacking)[1]
        found[share].append(piece)
        lacks[share] -= float(work_n[piece])
        if left := room - len(found[share]):
            heapq.heappush(lacking, (-lacks[share] / left, share))
    return np.sort(np.array(found, np.int64), axis=1)


def dealt(work_B: np.ndarray, replicas: int, micro_batches: int) -> np.ndarray:
    """The sample in each row of a global batch, int64[B].

    Replicas get equal work. So do the micro-batches of a replica, and they descend in work, so that
    those that run at the same time on different replicas are alike.
    """
    rows = []
    for sample_b in shares(work_B, replicas):
        micro = [sample_b[each] for each in shares(work_B[sample_b], micro_batches)]
        rows += sorted(micro, key=lambda each: -work_B[each].sum())  # stable
    return np.concatenate(rows)


def token_orders(segment_BT: np.ndarray, devices: int, *, reach: int | None = None) -> np.ndarray:
    """Positions of each sample's tokens in the order in which the devices hold them, int64[B, T].

    A device holds whole blocks, in the order of the sequence.

    Args:
        segment_BT: the document of each token.
        devices: share each sequence; `placed_blocks` of them divides T.
        reach: as in `visits`.
    """
    length = segment_BT.shape[1]
    count = placed_blocks(length, devices)
    block = length // count
    work_Bn = visits(segment_BT, block, reach=reach)
    block_Bn = np.stack([shares(work_n, devices).ravel() for work_n in work_Bn])
    place_BT = block_Bn[:, :, None] * block + np.arange(block)
    return place_BT.reshape(segment_BT.shape)
