"""Reads the batches of a run."""

import math

import numpy as np

from jaxptd.data import Windows, number_documents
from jaxptd.step import Batch, Program


def read_batch(
    program: Program,
    windows: Windows,
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
        rows = windows.rows(sample_B)
        if field == "targets":
            return np.where(sample_B[:, None] < beyond, rows[:, 1:], -1)
        if field == "segments":
            return number_documents(rows[:, :-1], end_of_document)
        return rows[:, :-1]

    return program.batches.read(rows_of)
