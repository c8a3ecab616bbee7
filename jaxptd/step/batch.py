"""A batch: what it holds, and how it lies over the mesh."""

from collections.abc import Iterable, Mapping

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.mesh import BATCH_AXES

# tokens, targets: int32 [B, T]; a target below 0 counts for nothing. segments, where documents are
# kept apart: the number of each token's document in its sequence. Made by `Program.place`: where
# there is a ring, the tokens of a sequence lie in its order.
Batch = dict[str, Array]

BATCH_SPEC = P(*BATCH_AXES)


def batch_fields(config: Config) -> tuple[str, ...]:
    """What a batch holds."""
    return ("tokens", "targets", "segments")[: 3 if config.data.documents == "apart" else 2]


def check_fields(batch: Iterable[str], config: Config) -> None:
    """Raises UserError if a batch does not hold what the config needs."""
    want = batch_fields(config)
    if set(batch) != set(want):
        raise UserError(
            f"a batch holds {', '.join(batch)}; with data.documents={config.data.documents} it "
            f"holds {', '.join(want)}"
        )


def check_batch(batch: Mapping[str, np.ndarray], config: Config) -> None:
    """Raises UserError if a whole batch does not hold what the config needs, in its shape."""
    check_fields(batch, config)
    want = (config.train.global_batch_size, config.model.seq_length)
    if wrong := [f"{name} {x.shape}" for name, x in batch.items() if x.shape != want]:
        words = "train.global_batch_size x model.seq_length"
        raise UserError(f"a batch holds {', '.join(wrong)}; use {want}, {words}")
