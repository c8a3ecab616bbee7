"""Reads the batches of a run."""

import math

import numpy as np

from jaxptd.data import NOT_COUNTED, Samples
from jaxptd.models.families import family_of
from jaxptd.step import Batch, Program


def read_batch(
    program: Program,
    windows: Samples,
    *,
    first: int,
    end_of_document: int,
    beyond: float = math.inf,
) -> Batch:
    """Reads the samples `first`, `first + 1`, ...; each process those of its own devices only.

    Args:
        program: takes the batch.
        windows: of training or validation.
        first: sample number of the batch's first row.
        end_of_document: id of the token that ends a document.
        beyond: samples from this number on are masked out of the loss.
    """

    def rows_of(field: str, numbers: slice) -> np.ndarray:
        sample_B = first + np.arange(program.config.train.global_batch_size)[numbers]
        found = family.rows(windows, field, sample_B, end_of_document=end_of_document)
        inside = (sample_B < beyond).reshape(-1, *[1] * (found.ndim - 1))
        return np.where(inside, found, NOT_COUNTED) if field in targets else found

    model = program.config.model
    family = family_of(model)
    targets = {term.targets for term in family.losses(model).values()}
    return program.batches.read(rows_of)
