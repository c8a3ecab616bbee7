"""Seconds of kernels on one device: matmuls, passes over memory, attention.

Sources: NVIDIA, "Matrix Multiplication Background User's Guide" (tiles, waves, lower utilisation
with smaller tiles); Dao, arXiv 2307.08691 (FLOPs of fused attention: five matmuls backward, two
forward).
"""

import functools
import math

from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxptd.costs.terms import HBM, HOST, PRODUCTS, Term
from jaxptd.hardware import Accelerator, Cluster, Group, Links

# Rows, columns, and the rate relative to the largest tile, from its use of shared memory.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.80), (64, 64, 0.65))
FILL = 128  # a tile's prologue and its write together cost as much as this much of K
PARTS = (1, 2, 3, 4, 6, 8, 12, 16)  # pieces of K, whose results are added up
FEW_WAVES = 4  # up to this many, a last wave takes as long as a full one; beyond, tiles overlap
LAUNCH = 3e-6  # seconds between two kernels of a stream, with their start and end
BACKWARD = 2.5  # FLOPs of fused attention's backward relative to forward
FULL_HEAD = 128  # a smaller head's score takes as long as this one's (seen with 64 on one H200)


@functools.lru_cache(65536)
def product(
    accelerator: Accelerator,
    M: int,
    N: int,
    K: int,
    *,
    batch: int = 1,
    written: int = 2,
    fp8: bool = False,
) -> Term:
    """Time of a matmul `[M, K] x [K, N]` of 16-bit or 8-bit values.

    Args:
        accelerator: the device.
        M: rows of the first factor and of the result.
        N: columns of the second factor and of the result.
        K: columns of the first and rows of the second factor.
        batch: matmuls per kernel.
        written: bytes moved per value of the result.
        fp8: whether the factors have 8 bits.
    """
    flops = 2.0 * batch * M * N * K
    moved = float(batch * ((1 if fp8 else 2) * (M * K + K * N) + written * M * N))
    peak = accelerator.fp8_flops if fp8 else accelerator.bf16_flops
    rate = peak * accelerator.products_share / accelerator.multiprocessors
    computing = min(_waves(accelerator, (M, N, K), batch, tile) for tile in TILES) / rate
    moving = moved / (accelerator.hbm_bandwidth * accelerator.hbm_share)
    resource = PRODUCTS if computing >= moving else HBM
    return Term("", "products", max(computing, moving) + LAUNCH, resource, flops, moved)


def _waves(
    a: Accelerator, sizes: tuple[int, int, int], batch: int, tile: tuple[int, int, float]
) -> float:
    """FLOPs that a multiprocessor could execute during the waves of tiles of one size.

    If there are fewer tiles than multiprocessors, each is divided along K.
    """
    M, N, K = sizes
    rows, columns, share = tile
    tiles = batch * math.ceil(M / rows) * math.ceil(N / columns)
    divided = PARTS if tiles < a.multiprocessors else PARTS[:1]
    each = 2 * rows * columns / share
    return min(
        _waves_of(parts * tiles / a.multiprocessors) * each * (K / parts + FILL)
        for parts in divided
    )


def _waves_of(tiles: float) -> float:
    """Waves that `tiles` tiles per multiprocessor take."""
    return math.ceil(tiles) if tiles <= FEW_WAVES else tiles + 0.5


def moved(accelerator: Accelerator, moves: float, kernels: int = 1) -> Term:
    """Time of kernels bound by memory bandwidth."""
    seconds = moves / (accelerator.hbm_bandwidth * accelerator.hbm_share)
    return Term("", "elementwise", seconds + kernels * LAUNCH, HBM, 0.0, moves)


def to_host(accelerator: Accelerator, moves: float) -> Term:
    """Time of copies between a device and its host's memory."""
    return Term("", "offload", moves / accelerator.host_bandwidth, HOST, 0.0, moves)


def flash(accelerator: Accelerator, flops: float, head_size: int, *, backward: bool) -> Term:
    """Time of fused attention.

    Args:
        accelerator: the device.
        flops: of forward's two matmuls, without what a causal mask hides.
        head_size: H; below 128 the rate falls in proportion.
        backward: whether to time the backward kernel.
    """
    a = accelerator
    share = a.attention_backward_share if backward else a.attention_forward_share
    rate = a.bf16_flops * share * min(head_size, FULL_HEAD) / FULL_HEAD
    executed = flops * (BACKWARD if backward else 1)
    return Term("", "attention", executed / rate + LAUNCH, PRODUCTS, executed)


# ---- seconds of collectives and messages between devices -----------------------------------------

# Seconds of a small collective: a constant, and a part per further member in a node, fitted to
# all-reduces of 1 MiB on 2, 4 and 8 A100s (vTrain's profiles: 44, 51, 93 us). A pass over nodes
# adds HOP per doubling of their number (NCCL's trees).
START, MEMBER, HOP = 14e-6, 4e-6, 5e-6
# Members up to which collectives keep their rate, and the power by which it falls beyond. Judged,
# since no measurement here has such a group: a ring of n members is only as fast as its slowest
# link.
WIDE, WIDER = 512, 0.25
RINGS = {ALL_REDUCE: 2, ALL_GATHER: 1, REDUCE_SCATTER: 1}  # passes


def collective(cluster: Cluster, kind: str, group: Group, size: float) -> Term:
    """Time of a collective: a ring; for a permute or a broadcast, one message per member.

    Args:
        cluster: the devices.
        kind: XLA's name, one of `jaxptd.costs.collective`.
        group: its members.
        size: bytes of the whole array: the sum, or all members' blocks together.
    """
    n, links = group.members, cluster.links(group)
    if n == 1:
        return Term("", "", 0.0, links.resource)
    passes = RINGS.get(kind, 1)
    sent = passes * (n - 1) / n * size if kind in RINGS else size
    rate = links.bandwidth * min(1.0, (WIDE / n) ** WIDER)
    if kind not in RINGS and links.nodes > 1:  # each message uses one rail
        rate = cluster.rail
    seconds = sent / rate + passes * _latency(links)
    return Term("", "", seconds, links.resource, 0.0, sent)


def _latency(links: Links) -> float:
    inside = START + MEMBER * (links.local - 1)
    return inside + (HOP * math.log2(links.nodes) if links.nodes > 1 else 0.0)


def message(cluster: Cluster, size: float, *, inside: bool) -> Term:
    """Time of a message from one device to another, within a node or between nodes."""
    a = cluster.accelerator
    rate = a.nvlink_bandwidth * a.nvlink_share if inside else cluster.rail
    resource = "NVLink" if inside else "network"
    return Term("", "", size / rate + START + HOP, resource, 0.0, size)
