"""Work of packed documents on the devices that share a sequence, or a batch: largest over mean.

`python -m benchmarks.context.balance [--sequences 200] [--out FILE]`: sequences of 32,768 tokens,
cut from a row of documents of log-normal length, as windows of a corpus are. Work is counted in
chunks of 512 x 512 scores that attention visits, and in scores. Needs no device: some seconds.

A device's work is what it computes in all. A ring also waits at each hop for the device that
computes most; the second number adds these up. Orders of documents are the best that exchanging
two documents at random finds, for a zigzag. `--timed` also times each device's attention, forward
and backward, on this CPU: 8,192 tokens on four devices, processor seconds, the least of three runs.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.context.documents import KERNEL, SCORES, H, N
from benchmarks.lib.pages import head, joined, parser, printed, renew
from jaxptd.analysis.report import table, versions
from jaxptd.attention.attend import Ring
from jaxptd.attention.kernel import Gradients, Saved, ScoreCoordinates
from jaxptd.context_parallel import CHUNK, STRATEGIES, TokenOrder, placed_blocks
from jaxptd.data.balance import dealt, sample_work, shares, token_orders, visits
from jaxptd.errors import run_command

T, GOAL = 32_768, 1.10
RINGS, EXCHANGES = (2, 4, 8, 16), 300


class Lengths(NamedTuple):
    """Lengths of documents: log-normal with this median, and sigma of the logarithm."""

    median: int
    sigma: float

    def sequences(self, count: int) -> np.ndarray:
        """The document of each token of `count` windows, `[count, T]`."""
        draw = np.random.default_rng([self.median, round(10 * self.sigma)])
        rows = []
        for _ in range(count):  # each from its own place, so that none is near another
            ends = np.cumsum(np.ceil(draw.lognormal(np.log(self.median), self.sigma, 4 * T)))
            start = draw.integers(0, max(1, int(min(ends[-1], 2**40)) - T))
            rows.append(np.searchsorted(ends, start + np.arange(T), side="right"))
        return np.stack([row - row[0] for row in rows]).astype(np.int64)


DOCUMENTS = (Lengths(1024, 1.0), Lengths(1024, 1.5), Lengths(1024, 2.0), Lengths(200, 1.0))


def met(segment_T: np.ndarray) -> np.ndarray:
    """Whether queries of chunk i visit the keys of chunk j, `[n, n]`."""
    number = np.arange(len(segment_T) // CHUNK)
    first = number - visits(segment_T[None], CHUNK)[0] + 1
    return (first[:, None] <= number) & (number <= number[:, None])


def scores(segment_T: np.ndarray) -> np.ndarray:
    """Scores of each chunk of queries, `[n]`."""
    begin_T = np.searchsorted(segment_T, segment_T)
    return (np.arange(len(segment_T)) - begin_T + 1).reshape(-1, CHUNK).sum(1)


def holders(order: TokenOrder, devices: int) -> np.ndarray:
    """The device of each chunk of a sequence, `[n]`."""
    found = np.zeros(T // CHUNK, int)
    for device in range(devices):
        for start, held in order.split(T // devices, device, devices):
            found[start // CHUNK : (start + held) // CHUNK] = device
    return found


def placed(segment_T: np.ndarray, devices: int) -> np.ndarray:
    """The device of each chunk with `layout.balance: tokens`."""
    block = T // placed_blocks(T, devices)
    held = shares(visits(segment_T[None], block)[0], devices)
    found = np.zeros(T // block, int)
    found[held] = np.arange(devices)[:, None]
    return found.repeat(block // CHUNK)


def largest(work_n: np.ndarray, holder_n: np.ndarray, devices: int) -> float:
    """The largest work of a device over the mean."""
    work = np.bincount(holder_n, work_n, minlength=devices)
    return float(work.max() / work.mean())


def hop_by_hop(met_nn: np.ndarray, holder_n: np.ndarray, devices: int) -> float:
    """The work of the slowest device at each hop, added up, over the mean work of a device."""
    pairs = np.zeros((devices, devices))
    query_P, key_P = met_nn.nonzero()
    np.add.at(pairs, (holder_n[query_P], (holder_n[query_P] - holder_n[key_P]) % devices), 1)
    return float(pairs.max(0).sum() / pairs.sum() * devices)


def best_order(segment_T: np.ndarray, devices: int) -> float:
    """The least of `largest` for a zigzag that exchanging two documents at random finds."""
    draw = np.random.default_rng(0)
    holder_n = holders(STRATEGIES["zigzag"].order, devices)
    lengths = np.bincount(segment_T)

    def ratio(lengths: np.ndarray) -> float:
        packed = np.repeat(np.arange(len(lengths)), lengths)
        return largest(visits(packed[None], CHUNK)[0], holder_n, devices)

    best = ratio(lengths)
    for _ in range(EXCHANGES if len(lengths) > 1 else 0):
        changed = lengths.copy()
        i, j = draw.choice(len(lengths), 2, replace=False)
        changed[[i, j]] = changed[[j, i]]
        if (found := ratio(changed)) <= best:
            best, lengths = found, changed
    return best


def of_rings(documents: Iterable[Lengths], count: int) -> Iterable[Sequence[str]]:
    """Rows of the table of devices that share a sequence."""
    zigzag, contiguous = (STRATEGIES[name].order for name in ("zigzag", "blockwise"))
    for lengths in documents:
        every = lengths.sequences(count)
        for devices in RINGS:
            found = []
            for segment_T in every:
                met_nn, holder_n = met(segment_T), holders(zigzag, devices)
                line_n, placed_n = holders(contiguous, devices), placed(segment_T, devices)
                work_n = met_nn.sum(1)
                found.append(
                    (
                        largest(work_n, holder_n, devices),
                        hop_by_hop(met_nn, holder_n, devices),
                        largest(work_n, line_n, devices),
                        hop_by_hop(met_nn, line_n, devices),
                        largest(work_n, placed_n, devices),
                        largest(scores(segment_T), placed_n, devices),
                    )
                )
            order = np.mean([best_order(x, devices) for x in every[: count // 10]])
            mean, worst = np.mean(found, 0), np.max(found, 0)
            cells = [f"{x:.2f}" for x in mean]
            yield (
                *(f"{lengths.median:,}, {lengths.sigma}", f"{devices}"),
                *(f"{cells[0]} / {cells[1]}", f"{cells[2]} / {cells[3]}", f"{order:.2f}"),
                *(f"**{cells[4]}**" if mean[4] <= GOAL else cells[4], f"{worst[4]:.2f}", cells[5]),
            )


# ---- replicas and micro-batches ------------------------------------------------------------------

BATCHES = ((8, 1, 4), (8, 4, 1), (8, 8, 1), (32, 8, 1))  # replicas, micro-batches, samples in each


def of_replicas(work_B: np.ndarray, replicas: int, micro_batches: int) -> tuple[float, float]:
    """Largest over mean of a step's work, and with a wait after each micro-batch, added up."""
    work = work_B.reshape(replicas, micro_batches, -1).sum(2)
    mean = work.sum(1).mean()
    return float(work.sum(1).max() / mean), float(work.max(0).sum() / mean)


def at_least(work_B: np.ndarray, replicas: int) -> float:
    """The least that `of_replicas` can be: a replica has the largest sample, and the smallest."""
    others = len(work_B) // replicas - 1
    return max(1.0, (work_B.max() + np.sort(work_B)[:others].sum()) / work_B.sum() * replicas)


def of_batches(documents: Iterable[Lengths], count: int) -> Iterable[Sequence[str]]:
    """Rows of the table of replicas."""
    for lengths in documents:
        work = sample_work(lengths.sequences(max(4 * count, 256)))
        for replicas, micro_batches, each in BATCHES:
            size, split = replicas * micro_batches * each, (replicas, micro_batches)
            batches = work[: len(work) // size * size].reshape(-1, size)
            given = np.mean([of_replicas(x, *split) for x in batches], 0)
            found = np.mean([of_replicas(x[dealt(x, *split)], *split) for x in batches], 0)
            least = np.mean([at_least(x, replicas) for x in batches])
            yield (
                f"{lengths.median:,}, {lengths.sigma}",
                *(f"{replicas} x {micro_batches} x {each}", f"{given[0]:.2f} / {given[1]:.2f}"),
                *(f"{found[0]:.2f} / {found[1]:.2f}", f"{least:.2f}"),
            )


# ---- seconds of each device's attention ----------------------------------------------------------

LENGTH, DEVICES = 8192, 4  # of one sequence, and of those that share it


@jax.jit
def _both_passes(qdo: Array, kv: Array, coordinates: ScoreCoordinates) -> Gradients:
    """Gradients of a device's queries `[2, 1, T, N, H]`, with do, and of all keys and values."""
    (q, do), (k, v) = qdo, kv
    o, lse = KERNEL.fwd(q, k, v, coordinates, scores=SCORES)
    return KERNEL.bwd(Saved(q, k, v, o, lse), do, coordinates, scores=SCORES)


def seconds(segment_T: np.ndarray, order_T: np.ndarray) -> list[float]:
    """Processor seconds of each device, whose tokens have these positions one after the other."""
    draw, found = np.random.default_rng(0).standard_normal, []
    kv = jnp.asarray(draw((2, 1, LENGTH, N, H)), jnp.float32)
    keys, documents = (jnp.asarray(x[None], jnp.int32) for x in (order_T, segment_T[order_T]))
    for own_T in order_T.reshape(DEVICES, -1):
        queries, own = (jnp.asarray(x[None], jnp.int32) for x in (own_T, segment_T[own_T]))
        qdo = jnp.asarray(draw((2, 1, len(own_T), N, H)), jnp.float32)
        arguments = (qdo, kv, ScoreCoordinates(queries, keys, own, documents))
        times = []
        for _ in range(4):  # the first one compiles
            begin = time.process_time()
            jax.block_until_ready(_both_passes(*arguments))
            times.append(time.process_time() - begin)
        found.append(min(times[1:]))
    return found


def of_seconds(documents: Iterable[Lengths]) -> Iterable[Sequence[str]]:
    """Rows of the table of times: largest over mean, counted and timed, and the mean."""
    for lengths in documents:
        segment_T = lengths.sequences(1)[0, :LENGTH]
        zigzag_T = Ring("cp").order(LENGTH, DEVICES)
        for name, order_T in (
            ("zigzag", zigzag_T),
            ("`balance: tokens`", token_orders(segment_T[None], DEVICES)[0]),
        ):
            work_T = visits(segment_T[None], CHUNK)[0].repeat(CHUNK)
            work = work_T[order_T].reshape(DEVICES, -1).sum(1)
            timed = np.array(seconds(segment_T, order_T))
            each = [f"{x.max() / x.mean():.2f}" for x in (work, timed)]
            yield (f"{lengths.median:,}, {lengths.sigma}", name, *each, f"{timed.mean():.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Counts the work of packed documents on each device."""
    made = parser("context.balance", main)
    made.add_argument("--sequences", type=int, default=200, help="drawn for each row")
    made.add_argument("--timed", action="store_true", help="also time attention on this CPU")
    options = made.parse_args(argv)
    timed = printed(of_seconds(DOCUMENTS[:3])) if options.timed else []
    rings = printed(of_rings(DOCUMENTS, options.sequences))
    batches = printed(of_batches(DOCUMENTS, options.sequences))
    of_documents = "documents: median, sigma"
    columns = (
        *(of_documents, "cp", "zigzag: all / hop by hop", "blockwise: all / hop by hop"),
        *("documents ordered for a zigzag", "`balance: tokens`", "its worst", "in scores"),
    )
    waits = (
        *(of_documents, "replicas x micro-batches x samples"),
        *("as read: a step / each micro-batch", "`balance: samples`", "a step, at least"),
    )
    if options.out:
        times = (of_documents, "tokens", "counted", "timed", "mean, s")
        tables = [table(x) for x in ([columns, *rings], [waits, *batches], [times, *timed])]
        page = joined(versions(), *tables[: 3 if timed else 2])
        renew(Path(options.out), head("Work of packed documents", "context.balance") + page)
    return 0


if __name__ == "__main__":
    run_command(main)
