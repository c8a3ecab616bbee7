"""A batch: its fields, and how it is sharded over the mesh."""

import dataclasses
from collections.abc import Callable, Mapping
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
            UserError: the batch has other fields, shapes or types than the config needs, or ids
                outside the vocabulary.
        """
        check_batch(batch, self.config)
        _check_ids(batch, self.config)
        return self.read(lambda field, rows: np.asarray(batch[field], np.int32)[rows])


def batch_fields(config: Config) -> tuple[str, ...]:
    """The fields of a batch."""
    return ("tokens", "targets", "segments")[: 3 if config.data.documents == "apart" else 2]


def check_batch(batch: Mapping[str, Any], config: Config) -> None:
    """Checks the fields of a batch, and their shapes and types; the arrays may be traced ones.

    Raises:
        UserError: they are not those that the config needs.
    """
    fields = ", ".join(batch_fields(config))
    if not isinstance(batch, Mapping):
        raise UserError(f"a batch is a {type(batch).__name__}; use a dict with {fields}")
    if set(batch) != set(batch_fields(config)):
        raise UserError(
            f"a batch holds {', '.join(map(str, batch)) or 'nothing'}; with data.documents="
            f"{config.data.documents} it holds {fields}"
        )
    for name, x in batch.items():
        kind = getattr(x, "dtype", type(x).__name__)
        if isinstance(kind, str) or not jnp.issubdtype(kind, jnp.integer):
            raise UserError(f"a batch holds {name} of {kind}; use an array of int32")
    want = (config.train.global_batch_size, config.model.seq_length)
    if wrong := [f"{name} {x.shape}" for name, x in batch.items() if x.shape != want]:
        words = "train.global_batch_size x model.seq_length"
        raise UserError(f"a batch holds {', '.join(wrong)}; use {want}, {words}")


def _check_ids(batch: Mapping[str, np.ndarray], config: Config) -> None:
    """Raises UserError for ids outside the vocabulary, and for numbers that int32 does not hold."""
    int32, size = np.iinfo(np.int32), config.model.vocab_size or 0
    for name, x in batch.items():
        lowest = 0 if name == "tokens" else int32.min
        highest = int32.max if name == "segments" else size - 1
        if wrong := [i for i in (int(x.min()), int(x.max())) if not lowest <= i <= highest]:
            raise UserError(
                f"a batch holds {name} with {wrong[0]}; use {lowest} to {highest}, with "
                f"model.vocab_size={size}"
            )
