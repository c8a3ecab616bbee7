"""What decoders need to train on pairs of answers: fields of a batch, and terms of the loss.

Letters: B batch, T position.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from jaxptd.config import Config
from jaxptd.config.preference import ACCURACY, CHOSEN, LOSS, REJECTED, pairs_of
from jaxptd.data import NOT_COUNTED, Derived, Field
from jaxptd.models.family import Loss

Wide = Literal["float32", "float64"]
REFERENCE = "reference"  # a field: log-probabilities of the reference model
PAIRS = "pairs"  # the field that numbers pairs


def pair_fields(config: Config, segments: str) -> dict[str, Field]:
    """The reference's log-probabilities, of which a document's sum counts, and the pairs' numbers.

    None without `model.preference`. segments: the field of documents.
    """
    if config.model.preference is None:
        return {}
    wide: Wide = "float64" if config.model.dtype == "float64" else "float32"
    return {
        REFERENCE: Field("seq_length", dtype=wide),
        PAIRS: Field("seq_length", derived=Derived(("targets", segments), pair_numbers)),
    }


def pair_numbers(target_BT: np.ndarray, segment_BT: np.ndarray) -> np.ndarray:
    """The number of a pair at the first target of its chosen text; elsewhere not counted."""
    chosen_BT = (target_BT >= 0) & (segment_BT >= 0) & (segment_BT % 2 == 0)
    document_BT = np.where(chosen_BT, segment_BT, NOT_COUNTED)
    last_BT = np.maximum.accumulate(document_BT, axis=1)
    before_BT = np.pad(last_BT[:, :-1], ((0, 0), (1, 0)), constant_values=NOT_COUNTED)
    return np.where(document_BT > before_BT, segment_BT // 2, NOT_COUNTED).astype(np.int32)


def pair_losses() -> Mapping[str, Loss]:
    """The loss, the share of pairs whose chosen text gains more, and what both gain, times beta."""
    score = Loss(PAIRS, weight=0.0, trained=False)
    return {LOSS: Loss(PAIRS), ACCURACY: score, CHOSEN: score, REJECTED: score}


def drawn_pairs(segment_BT: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random log-probabilities, and documents of at most as many pairs as a sequence can hold."""
    most = 2 * pairs_of(segment_BT.shape[1])
    reference_BT = -np.abs(rng.standard_normal(segment_BT.shape))
    return {REFERENCE: reference_BT, "segments": np.minimum(segment_BT, most - 1)}
