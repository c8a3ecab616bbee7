"""Reads the batches of a run."""

import math

import numpy as np

from jaxptd.config import Config, TrainConfig
from jaxptd.data import NOT_COUNTED, Samples, number_documents
from jaxptd.errors import UserError
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
        if field == "targets":
            return np.where(sample_B[:, None] < beyond, windows.targets(sample_B), NOT_COUNTED)
        tokens = windows.rows(sample_B)[:, :-1]
        return number_documents(tokens, end_of_document) if field == "segments" else tokens

    return program.batches.read(rows_of)


def evaluated_samples(windows: Samples, train: TrainConfig) -> int:
    """Number of samples that an evaluation reads: of `eval_batches` batches, or all there are."""
    return min(train.eval_batches * train.global_batch_size, windows.windows_per_epoch)


def require_targets(windows: Samples, config: Config) -> None:
    """Raises UserError unless an evaluation, which reads the same samples each time, has targets.

    Args:
        windows: of validation.
        config: of the run; without `data.prompt_field` every token is a target.
    """
    if config.data.prompt_field is None:
        return
    number = evaluated_samples(windows, config.train)
    if not any((windows.targets(np.array([i])) != NOT_COUNTED).any() for i in range(number)):
        raise UserError(
            f"data.prompt_field: the {number} sequences of an evaluation are all of prompts; raise "
            "train.eval_batches, or use another data.validation_fraction"
        )
