"""Objectives other than the next token: they make the fields of a batch from windows of the corpus.

An objective is a pure function of (seed, sample number), as the windows are. `masking` is BERT's,
`spans` is T5's; `prepared` gives their fields, and `special` the ids of their tokens.
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
