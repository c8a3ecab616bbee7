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
from jaxptd.config import Config, ModelConfig, option
from jaxptd.errors import UserError
from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.models.families import family_of

# Arrays of int32 [B, T] by name, or others, see `Family.fields`; on the mesh also those that follow
# from the given ones. Along T the tokens are in the order of the ring's devices (`Ring.order`), if
# there is a ring.
Batch = dict[str, Array]

BATCH_SPEC = P(*BATCH_AXES)
SEQUENCE_SPEC = P(Axis.DP)  # of a number a sequence


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
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """[B, ..] of each array of a global batch, with the padding of T."""
        return batch_shapes(self.config)

    @property
    def specs(self) -> dict[str, P]:
        """The spec of each array."""
        return batch_specs(self.config)

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.mesh, spec) for name, spec in self.specs.items()}

    @property
    def abstract(self) -> Batch:
        """Shapes and shardings, for compiling without a batch."""
        fields, shardings = family_of(self.config.model).fields(self.config), self.shardings
        make: Any = jax.ShapeDtypeStruct
        return {
            name: make(shape, fields[name].dtype, sharding=shardings[name])
            for name, shape in self.shapes.items()
        }

    @cached_property
    def token_orders(self) -> dict[str, np.ndarray]:
        """For each `[B, T, ..]` the positions in the order in which the devices hold them."""
        size, shapes = self.config.layout.ring_size, self.shapes
        fields = family_of(self.config.model).fields(self.config)
        lengths = {name: shapes[name][1] for name, each in fields.items() if each.length}
        return {
            name: self.ring.order(length, size) if fields[name].ring else np.arange(length)
            for name, length in lengths.items()
        }

    def read(self, rows_of: Callable[[str, slice], np.ndarray]) -> Batch:
        """Builds a batch; each process reads the rows of its own devices only.

        Args:
            rows_of: (field, rows of the global batch) -> these rows, `[rows, T, ..]` in text order,
                or `[rows]`.
        """
        fields, shapes = family_of(self.config.model).fields(self.config), self.shapes

        def rows(field: str, numbers: slice) -> np.ndarray:
            derived = fields[field].derived
            if derived is not None:
                return derived.make(rows(derived.field, numbers))
            return fields[field].padded(rows_of(field, numbers), shapes[field][1:])

        def block(index: tuple[slice, ...], field: str) -> np.ndarray:
            rows_here = rows(field, index[0])
            return rows_here[:, self.token_orders[field][index[1]]] if len(index) > 1 else rows_here

        shardings, make = self.shardings, jax.make_array_from_callback
        return {
            name: make(shape, shardings[name], partial(block, field=name))
            for name, shape in shapes.items()
        }

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Puts a whole batch, in text order, on the mesh.

        Raises:
            UserError: the batch has other fields, shapes or types than the config needs, or ids
                outside the vocabulary.
        """
        check_batch(batch, self.config, given_shapes(self.config))
        check_ids(batch, self.config)
        fields = family_of(self.config.model).fields(self.config)
        return self.read(lambda field, rows: np.asarray(batch[field], fields[field].dtype)[rows])


def batch_fields(config: Config) -> tuple[str, ...]:
    """The fields of a batch that users give."""
    return tuple(family_of(config.model).given(config))


def batch_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """[B, ..] of each field of a global batch on the mesh, with the padding of T."""
    return _shapes(config, config.padded_model)


def given_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """[B, ..] of each field of a global batch that users give."""
    shapes = _shapes(config, config.model)
    return {name: shapes[name] for name in batch_fields(config)}


def _shapes(config: Config, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    fields, size = family_of(model).fields(config), config.train.global_batch_size
    return {
        name: (size, *(option(model, each) for each in field.sizes))
        for name, field in fields.items()
    }


def batch_specs(config: Config) -> dict[str, P]:
    """The spec of each field of a batch."""
    fields = family_of(config.model).fields(config)
    return {name: BATCH_SPEC if each.length else SEQUENCE_SPEC for name, each in fields.items()}


def check_batch(
    batch: Mapping[str, Any], config: Config, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Checks the fields of a batch, and their shapes and types; the arrays may be traced ones.

    Args:
        batch: whole, or on the mesh.
        config: of the run.
        shapes: of the fields that it needs.

    Raises:
        UserError: they are not those that the config needs.
    """
    fields = ", ".join(shapes)
    if not isinstance(batch, Mapping):
        raise UserError(f"a batch is a {type(batch).__name__}; use a dict with {fields}")
    if set(batch) != set(shapes):
        raise UserError(
            f"a batch holds {', '.join(map(str, batch)) or 'nothing'}; with data.documents="
            f"{config.data.documents} it holds {fields}"
        )
    kinds = family_of(config.model).fields(config)
    for name, x in batch.items():
        kind, wanted = getattr(x, "dtype", type(x).__name__), kinds[name].dtype
        abstract = jnp.integer if wanted == "int32" else jnp.floating
        if isinstance(kind, str) or not jnp.issubdtype(kind, abstract):
            raise UserError(f"a batch holds {name} of {kind}; use an array of {wanted}")
    if wrong := [name for name, x in batch.items() if x.shape != shapes[name]]:
        given = ", ".join(f"{name} {batch[name].shape}" for name in wrong)
        lengths = (f" x model.{size}" for size in kinds[wrong[0]].sizes)
        words = "train.global_batch_size" + "".join(lengths)
        raise UserError(f"a batch holds {given}; use {shapes[wrong[0]]}, {words}")


def check_ids(batch: Mapping[str, np.ndarray], config: Config) -> None:
    """Raises UserError for ids outside the vocabulary, and for numbers that int32 does not hold.

    Args:
        batch: some fields of a batch, or all.
        config: of the run.
    """
    int32, fields = np.iinfo(np.int32), family_of(config.model).fields(config)
    for name, x in batch.items():
        field = fields[name]
        lowest = int32.min if field.lowest is None else field.lowest
        highest = int32.max if field.end is None else field.end - 1
        if field.dtype != "int32":
            continue
        if wrong := [i for i in (int(x.min()), int(x.max())) if not lowest <= i <= highest]:
            raise UserError(
                f"a batch holds {name} with {wrong[0]}; use {lowest} to {highest}, with "
                f"{_ids(config.model)}"
            )


def _ids(model: ModelConfig) -> str:
    """The number of ids of a model, as its config has it."""
    if model.images is not None:
        return f"model.images.classes={model.images.classes}"
    return f"model.vocab_size={model.vocab_size}"
