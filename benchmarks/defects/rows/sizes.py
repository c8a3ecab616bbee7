"""Defects of sizes that no layout divides, and of products in few bits."""

from benchmarks.breaks.table import Break
from benchmarks.defects.cases import BLOCKWISE, CP, SUMMA, TP
from benchmarks.defects.table import Defect, Kind, Reach, known

SEQUENCES = "tests/models/test_sequence_padding.py"
GROUPS = "model.family=qwen3 model.num_heads=15 model.num_kv_heads=5 model.head_size=2"
FP8 = "model.products=fp8"

SIZES = (
    # ---- padding ----
    Defect(Kind.PADDING, known("padding of a sequence is a target"), (f"{CP} model.seq_length=9",)),
    Defect(
        Kind.PADDING,
        known("a sequence is padded to one chunk a device of a zigzag"),
        (f"{CP} model.seq_length=9",),
    ),
    Defect(
        Kind.PADDING,
        Break(
            "padding of a sequence is before it",
            "jaxptd/models/family.py",
            "[(0, size - have) for size, have",
            "[(size - have, 0) for size, have",
            SEQUENCES,
        ),
        (f"{BLOCKWISE} model.seq_length=9",),
    ),
    Defect(
        Kind.PADDING,
        known("heads of padding read a kv head of the model"),
        (f"{TP} {GROUPS}",),
    ),
    # ---- few bits ----
    Defect(
        Kind.EIGHT_BITS,
        known("a gradient on a grid is rounded as an operand of forward is"),
        (f"{SUMMA} {FP8}",),
    ),
    Defect(
        Kind.EIGHT_BITS,
        known("the scale of one operand in 8 bits is not undone"),
        (f"layout.tp=2 {FP8}",),
        Reach.BOTH,
    ),
)
