"""Objectives other than next-token prediction: they turn windows of the corpus into batches.

An objective is a pure function of (seed, sample number), as the windows are. `masking` is BERT's
and `spans` T5's; `prepared` serves their fields and finds the ids of their special tokens.
"""

from jaxptd.data.objectives.masking import MaskedPairs
from jaxptd.data.objectives.prepared import (
    MASK_TOKENS,
    SPAN_TOKENS,
    MaskIds,
    Objective,
    Prepared,
    SpanIds,
)
from jaxptd.data.objectives.spans import SpanCorruption
