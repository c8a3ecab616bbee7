"""A batch: its fields, and how it is sharded over the mesh."""

import functools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.attention.attend import Ring
from jaxptd.config import Config, ModelConfig, option
from jaxptd.data import NOT_COUNTED, Samples
from jaxptd.data.balance import dealt, sample_work, token_orders
from jaxptd.errors import UserError
from jaxptd.mesh import SAMPLE_AXES, SEQUENCE_AXES
from jaxptd.models.decoder import CHOICES, POSITION, SAMPLE, SEGMENTS
from jaxptd.models.families import family_of

# Arrays of int32 [B, T] by name, or others, see `Family.fields`; on the mesh also those that follow
# from the given ones. Along T the tokens are in the order of the ring's devices (`Ring.order`), if
# there is a ring.
Batch = dict[str, Array]

BATCH_SPEC = P(SAMPLE_AXES, SEQUENCE_AXES)
SEQUENCE_SPEC = P(SAMPLE_AXES)  # of a number a sequence
ARRANGED = (SAMPLE, POSITION)  # fields that say where samples and tokens are


class Batches:
    """Builds the batches of a config on a mesh, all of which have the same fields and shapes.

    Args:
        config: of the run.
        mesh: to put batches on.
        ring: the devices that each sequence is sharded over.

    Attributes:
        fields: the arrays of a batch.
        targets: the given fields whose entries are targets of a loss, or the first from which
            such a field follows.
        shapes: [B, ..] of each array of a global batch, with the padding of T.
        specs: of each array.
        shardings: of each array.
        token_orders: for each `[B, T, ..]` the positions in the order in which the devices hold
            them, if it is the same in all samples.
    """

    def __init__(self, config: Config, mesh: Mesh, ring: Ring) -> None:
        family, size = family_of(config.model), config.layout.ring_size
        self.config, self.fields, self._rows = config, family.fields(config), family.rows
        named = {term.targets for term in family.losses(config.model).values()}
        derived = {name: self.fields[name].derived for name in named}
        self.targets = {rule.fields[0] if rule else name for name, rule in derived.items()}
        self.shapes, self.specs = batch_shapes(config), batch_specs(config)
        self.shardings = {name: NamedSharding(mesh, spec) for name, spec in self.specs.items()}
        lengths = {name: self.shapes[name][1] for name, x in self.fields.items() if x.length}
        self._places = config.layout.places_tokens
        self.token_orders = {
            name: ring.order(length, size) if self.fields[name].ring else np.arange(length)
            for name, length in lengths.items()
        }

    @property
    def abstract(self) -> Batch:
        """Shapes and shardings, for compiling without a batch."""
        make: Any = jax.ShapeDtypeStruct
        return {
            name: make(shape, self.fields[name].dtype, sharding=self.shardings[name])
            for name, shape in self.shapes.items()
        }

    def of_samples(
        self, samples: Samples, first: int, *, end_of_document: int, beyond: float = math.inf
    ) -> Batch:
        """Reads the samples `first`, `first + 1`, ...; each process those of its own devices only.

        Args:
            samples: of training or validation.
            first: sample number of the batch's first row.
            end_of_document: id of the token that ends a document.
            beyond: samples from this number on are masked out of the loss.
        """

        def rows_of(field: str, numbers: np.ndarray) -> np.ndarray:
            sample_B = first + np.arange(self.config.train.global_batch_size)[numbers]
            rows = self._rows(samples, field, sample_B, end_of_document=end_of_document)
            inside = (sample_B < beyond).reshape(-1, *[1] * (rows.ndim - 1))
            return np.where(inside, rows, NOT_COUNTED) if field in self.targets else rows

        return self.read(rows_of)

    def read(self, rows_of: Callable[[str, np.ndarray], np.ndarray]) -> Batch:
        """Builds a batch; each process reads the rows of its own devices only.

        With `layout.balance` it also reads the documents of all rows.

        Args:
            rows_of: (field, numbers of rows in the global batch `[n]`) -> these rows, `[n, T, ..]`
                in text order, or `[n]`.
        """
        fields, shapes = self.fields, self.shapes
        row_B = np.arange(self.config.train.global_batch_size)
        if self.config.layout.balance != "none":
            row_B = self._dealt(rows_of, row_B)
        orders = functools.cache(partial(self._orders, rows_of))

        def block(index: tuple[slice, ...], field: str) -> np.ndarray:
            derived, numbers, every = fields[field].derived, row_B[index[0]], []
            for given in derived.fields if derived else (field,):
                rows = rows_of(given, numbers)
                every.append(fields[given].padded(rows, (len(rows), *shapes[given][1:])))
            rows = derived.make(*every or [numbers]) if derived else every[0]
            if len(index) == 1:
                return rows
            if self._places and fields[field].ring:
                return _along(rows, orders(tuple(numbers.tolist()))[:, index[1]])
            return rows[:, self.token_orders[field][index[1]]]

        make = jax.make_array_from_callback
        return {
            name: make(shape, self.shardings[name], partial(block, field=name))
            for name, shape in shapes.items()
        }

    def _dealt(
        self, rows_of: Callable[[str, np.ndarray], np.ndarray], row_B: np.ndarray
    ) -> np.ndarray:
        """The row of the given batch in each row on the mesh, `[B]`; row_B: those of all."""
        work_B = sample_work(rows_of(SEGMENTS, row_B), reach=self._reach)
        return dealt(work_B, self.config.layout.sample_shards, self.config.train.micro_batches)

    def _orders(
        self, rows_of: Callable[[str, np.ndarray], np.ndarray], numbers: tuple[int, ...]
    ) -> np.ndarray:
        """The positions of some rows' tokens in the order in which the devices hold them."""
        segment_BT = rows_of(SEGMENTS, np.array(numbers))
        return token_orders(segment_BT, self.config.layout.ring_size, reach=self._reach)

    @property
    def _reach(self) -> int | None:
        """Tokens that a query sees at most, if all layers have a window."""
        model = self.config.model
        return model.reach if all(model.windowed) else None

    def as_given(self, field: str, x: np.ndarray, where: Mapping[str, np.ndarray]) -> np.ndarray:
        """Results of tokens as the devices hold them, `[B, T, ..]`, in the order of a given batch.

        Args:
            field: whose tokens they are.
            x: the results.
            where: the fields of `ARRANGED` that the batch on the mesh has.
        """
        order = where.get(POSITION)
        if order is None:
            x = x[:, np.argsort(self.token_orders[field])]
        else:
            x = _along(x, np.argsort(order, 1))
        x = x[np.argsort(where[SAMPLE])] if SAMPLE in where else x
        return x[:, : given_shapes(self.config)[field][1]]

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """Puts a whole batch, in text order, on the mesh.

        Raises:
            UserError: the batch has other fields, shapes or types than the config needs, or ids
                outside the vocabulary.
        """
        self.checked(batch, given_shapes(self.config))
        check_ids(batch, self.config)
        return self.read(
            lambda field, rows: np.asarray(batch[field], self.fields[field].dtype)[rows]
        )

    def checked(self, batch: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Returns a batch whose fields, shapes and types are right; its arrays may be traced ones.

        Args:
            batch: whole, or on the mesh.
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
                f"{self.config.data.documents} it holds {fields}"
            )
        for name, x in batch.items():
            kind, wanted = getattr(x, "dtype", type(x).__name__), self.fields[name].dtype
            abstract = jnp.integer if wanted == "int32" else jnp.floating
            if isinstance(kind, str) or not jnp.issubdtype(kind, abstract):
                raise UserError(f"a batch holds {name} of {kind}; use an array of {wanted}")
        if wrong := [name for name, x in batch.items() if x.shape != shapes[name]]:
            given = ", ".join(f"{name} {batch[name].shape}" for name in wrong)
            lengths = (f" x model.{size}" for size in self.fields[wrong[0]].sizes)
            words = "train.global_batch_size" + "".join(lengths)
            raise UserError(f"a batch holds {given}; use {shapes[wrong[0]]}, {words}")
        return batch


def _along(x: np.ndarray, order_BT: np.ndarray) -> np.ndarray:
    """x[B, T, ..] in the order of each row."""
    return np.take_along_axis(x, order_BT.reshape(*order_BT.shape, *[1] * (x.ndim - 2)), 1)


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
                f"{_ids(config.model, name)}"
            )


def _ids(model: ModelConfig, field: str) -> str:
    """The number of ids of a model's field, as its config has it."""
    if model.moe and field == CHOICES:
        return f"model.moe.num_experts={model.moe.num_experts}"
    if model.images is not None:
        return f"model.images.classes={model.images.classes}"
    return f"model.vocab_size={model.vocab_size}"
