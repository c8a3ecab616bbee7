"""Context parallelism: the strategies by which devices share a sequence, and the cost of each.

A strategy is an order of tokens, which says what each device holds, and an exchange, in which its
queries meet the keys of all devices. A new strategy is a row of `STRATEGIES`, with its name in
`RingKind`. If its exchange is also new, the row has its function and its costs.
Layouts, plans and formulas read this file, so it imports no JAX: a function is imported when a step
calls it.

Contiguous: device i of n holds block i of n. A causal query sees no block after its own, so the
last device has 2n-1 times the work of the first.
Zigzag: device i holds chunks i and 2n-1-i of 2n. Of any two devices' four pairs of chunks, two
are entirely visible and two not at all, whichever device comes first: all devices do equal work.

Source: Li et al., arXiv 2105.13120 (RSA); Liu et al., arXiv 2310.01889 (blockwise); Llama Team,
arXiv 2407.21783, section 3.3.2 (gathered keys and values).
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

RingKind = Literal["zigzag", "blockwise", "rsa", "gather"]
CHUNK = 512  # queries and keys per matmul in `attention/xla.py`


@dataclasses.dataclass(frozen=True)
class Imported:
    """A class or function whose module is imported when it is called, as tables import no JAX."""

    module: str
    name: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.name)(*args, **options)


@dataclasses.dataclass(frozen=True)
class TokenOrder:
    """The chunks of a sequence that each device holds, one after the other.

    Args:
        numbers: for each of a device's chunks, in ascending order, a function (device, number of
            devices) -> the chunk's number among all of the sequence. The device may be an array.
            Either one chunk, or two of which those of a device enclose those of the next (a
            zigzag's).
        in_line: device i holds the tokens just before those of device i + 1, so that a window of
            causal attention reaches the nearest devices only.
        balanced: all devices have as many visible scores under a causal mask.
        described: a device's chunks in words, for errors.
    """

    numbers: tuple[Callable[[Any, int], Any], ...]
    in_line: bool = False
    balanced: bool = False
    described: str = "one chunk"

    @property
    def chunks(self) -> int:
        """Chunks of a device."""
        return len(self.numbers)

    def split(self, length: int, device: Any, devices: int) -> list[tuple[Any, int]]:
        """First position and length of each chunk of a device's `length` tokens.

        Raises:
            ValueError: the tokens do not split into chunks.
        """
        chunks = len(self.numbers)
        if length % chunks and devices > 1:
            raise ValueError(f"a block of {length} tokens does not split into {self.described}")
        size = length // chunks
        sizes = [size] * (chunks - 1) + [length - size * (chunks - 1)]
        return [
            (number(device, devices) * size, held)
            for number, held in zip(self.numbers, sizes, strict=True)
        ]


def _same(device: Any, devices: int) -> Any:
    return device


def _mirrored(device: Any, devices: int) -> Any:
    return 2 * devices - 1 - device


CONTIGUOUS = TokenOrder((_same,), in_line=True)
ZIGZAG = TokenOrder((_same, _mirrored), balanced=True, described="a zigzag's two chunks")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The way in which queries meet the keys of all devices.

    Args:
        attend: attention, `(q, k, v, inputs, spec) -> o`, shaped as in `attention.attend.attend`;
            q, k and v vary over the same axes, and spec is an `attention.attend.AttentionSpec`.
        costs: makes a `parts.exchange.Blocks`, or a subclass, from the `HeadSizes` of attention. It
            says what the exchange sends, saves and holds in backward.
        whole_rows: whether a device forms the scores of its queries with all keys, visible or not,
            and saves their probabilities, without a fused kernel. Otherwise a kernel visits the
            blocks that they see.
        expands: whether latent vectors can move instead of keys and values, which each device then
            computes where it visits them.
        any_order: whether devices may hold any tokens, other ones in each sample, whose positions
            come with the batch.
    """

    attend: Callable[..., Any]
    costs: Callable[..., Any] = Imported("jaxptd.parts.exchange", "Blocks")
    whole_rows: bool = False
    expands: bool = True
    any_order: bool = False


BLOCKS = Exchange(Imported("jaxptd.ring_attention", "attend_blocks"))
ROWS = Exchange(
    Imported("jaxptd.attention.rsa", "attend_rsa"),
    Imported("jaxptd.parts.exchange", "WholeRows"),
    whole_rows=True,
    expands=False,
)
GATHERED = Exchange(
    Imported("jaxptd.attention.gather", "attend_gathered"),
    Imported("jaxptd.parts.exchange", "Gathered"),
    any_order=True,
)


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """A strategy: which tokens a device holds, and how its queries meet all keys.

    >>> STRATEGIES["zigzag"].order.split(4, 1, 3)  # of 12 tokens, device 1 of 3: 2, 3 and 8, 9
    [(2, 2), (8, 2)]
    """

    order: TokenOrder
    exchange: Exchange

    @property
    def balanced(self) -> bool:
        """True if all devices compute as many scores under a causal mask."""
        return self.order.balanced or self.exchange.whole_rows


STRATEGIES: dict[str, ContextParallel] = {
    "zigzag": ContextParallel(ZIGZAG, BLOCKS),
    "blockwise": ContextParallel(CONTIGUOUS, BLOCKS),
    "rsa": ContextParallel(CONTIGUOUS, ROWS),
    "gather": ContextParallel(ZIGZAG, GATHERED),
}


def placed_blocks(length: int, devices: int) -> int:
    """Blocks into which a sequence is cut where any device may hold any of them.

    At least two for each device, and chunks of attention if a device holds more tokens.
    """
    return devices * max(2, -(-length // (devices * CHUNK)))
