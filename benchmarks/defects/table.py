"""A defect: its kind, its patch, and the cases in which a detector looks for it."""

from enum import StrEnum
from functools import cache
from typing import NamedTuple

from benchmarks.breaks.__main__ import ALL
from benchmarks.breaks.table import Break


class Reach(StrEnum):
    """Where a defect shows."""

    LAYOUT = "layout"  # one device computes the right step
    BOTH = "both"  # one device computes the same wrong step, so no comparison with it shows it
    RUN = "run"  # no step computes anything else: data, checkpoints, evaluation


class Kind(StrEnum):
    """What a defect does."""

    SUM_FORWARD = "a sum of forward over an axis, dropped or doubled"
    SUM_BACKWARD = "a sum of backward over an axis, dropped or doubled"
    RING = "a ring turned, a hop too few, the wrong source block"
    STAGE = "a permute off by one stage"
    OWED = "a sum owed over one axis too few"
    TIED = "the gradient of a tied weight once"
    COUNT = "a loss divided by the wrong count"
    DROPOUT = "dropout by local numbers"
    ORDER = "zigzag's order in one place only"
    MASK = "a mask off by one"
    DOCUMENTS = "segments not gathered"
    STALE = "stale parameters under ZeRO"
    SHARD = "a shard's offset"
    MICRO_BATCHES = "double reduction with micro-batches"
    NORM = "a norm without the numbers of others"
    ROWS = "wrong rows of layers in a chunk"
    ACTIVATION = "the activation of the wrong micro-batch"
    STATE = "optimizer state of another shard"
    SCALE = "the scale of float16 not undone"
    CLIP = "clipping by a local norm"
    GRID = "panels of a grid: SUMMA, Cannon, Fox, slices"
    COLLECTIVE_MATMUL = "steps of a collective matmul"
    VOCABULARY = "the vocabulary's shards"
    HEADS = "heads of another device"
    FAMILY = "specifics of a family: T5, BERT, Llama"
    OFFLOAD = "offload and recomputation"
    OPTIMIZER = "optimizers of whole matrices: Muon, Adafactor"
    PADDING = "padding of sequences and heads"
    EIGHT_BITS = "products in 8 bits"
    CHECKPOINT = "rows of a checkpoint permuted, pieces in the wrong place"
    DATA = "the data cursor off by one"
    EVALUATION = "an evaluation counted twice"


class Defect(NamedTuple):
    """A defect.

    kind: what it does.
    patch: its name, file and line, and the tests that must notice it.
    cases: layouts and options of the tiny config in which a step is wrong; none if no step is.
    reach: where it shows.
    explained: why it changes nothing, where it does not.
    """

    kind: Kind
    patch: Break
    cases: tuple[str, ...] = ()
    reach: Reach = Reach.LAYOUT
    explained: str = ""

    @property
    def name(self) -> str:
        return self.patch.name


@cache
def _breaks() -> dict[str, Break]:
    return {row.name: row for row in ALL}


def known(name: str) -> Break:
    """The row of `benchmarks.breaks` with this name."""
    return _breaks()[name]
