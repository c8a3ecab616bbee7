"""A batch: its fields, and how it is sharded over the mesh."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.attention.ring import Ring
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.mesh import BATCH_AXES

# tokens, targets: int32 [B, T]; a target below 0 is masked out of the loss. segments, if documents
# are kept apart: the number of each token's document in its sequence. Along T the tokens are in the
# order of the ring's devices (`Batches.token_order`), if there is a ring.
Batch = dict[str, Array]

BATCH_SPEC = P(*BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Batches:
    """Builds the batches of a config on a mesh.

    Args:
        config: of the run.
        mesh: to put batches on.
        ring: the devices that each sequence is sharded over.
    """

    config: Config
    mesh: Mesh
    ring: Ring

    @property
    def shape(self) -> tuple[int, int]:
        """[B, T] of a global batch."""
        return self.config.train.global_batch_size, self.config.model.seq_length

    @property
    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH_SPEC)

    @property
    def abstract(self) -> Batch:
        """Shapes and shardings, for compiling without a batch."""
        x: Any = jax.ShapeDtypeStruct(self.shape, jnp.int32, sharding=self.sharding)
        return dict.fromkeys(batch_fields(self.config), x)

    @cached_property
    def token_order(self) -> np.ndarray:
        """Positions `[T]` in the order in which the devices of the ring hold them."""
        return self.ring.order(self.config.model.seq_length, self.config.layout.ring_size)

    def read(self, rows_of: Callable[[str, slice], np.ndarray]) -> Batch:
        """Builds a batch; each process reads the rows of its own devices only.

        Args:
            rows_of: (field, rows of the global batch) -> these rows, `[rows, T]`, in text order.
        """

        def block(index: tuple[slice, ...], field: str) -> np.ndarray:
            return rows_of(field, index[0])[:, self.token_order[index[1]]]

        make = partial(jax.make_array_from_callback, self.shape, self.sharding)
        return {name: make(partial(block, field=name)) for name in batch_fields(self.config)}

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Puts a whole batch, in text order, on the mesh.

        Raises:
            UserError: the batch has other fields or another shape than the config needs.
        """
        check_batch(batch, self.config)
        return self.read(lambda field, rows: np.asarray(batch[field])[rows])


def batch_fields(config: Config) -> tuple[str, ...]:
    """The fields of a batch."""
    return ("tokens", "targets", "segments")[: 3 if config.data.documents == "apart" else 2]


def check_fields(batch: Iterable[str], config: Config) -> None:
    """Raises UserError if a batch has other fields than the config needs."""
    want = batch_fields(config)
    if set(batch) != set(want):
        raise UserError(
            f"a batch holds {', '.join(batch)}; with data.documents={config.data.documents} it "
            f"holds {', '.join(want)}"
        )


def check_batch(batch: Mapping[str, np.ndarray], config: Config) -> None:
    """Raises UserError if a whole batch has other fields or shapes than the config needs."""
    check_fields(batch, config)
    want = (config.train.global_batch_size, config.model.seq_length)
    if wrong := [f"{name} {x.shape}" for name, x in batch.items() if x.shape != want]:
        words = "train.global_batch_size x model.seq_length"
        raise UserError(f"a batch holds {', '.join(wrong)}; use {want}, {words}")
