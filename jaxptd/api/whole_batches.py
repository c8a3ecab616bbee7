"""Losses, gradients and logits of whole batches of numpy arrays, of any size that fits.

A batch has the fields of its model's family. Shorter sequences are padded, and sequences of padding
added until the batch splits over devices and micro-batches.

Letters: B batch, T position, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_same
from jaxptd.config import Config, option
from jaxptd.data import Field
from jaxptd.errors import UserError
from jaxptd.layers.dropout import TokenInfo
from jaxptd.matmul.precision import exact_products
from jaxptd.models.families import family_of
from jaxptd.params import Params
from jaxptd.step import Program, State
from jaxptd.step.batch import check_ids
from jaxptd.step.pipelined import make_passes
from jaxptd.step.resolved import resolve_for_decoding

TOKENS = "tokens"  # the field that logits are computed from

WholeBatch = Mapping[str, np.ndarray]


_NONE: Mapping[str, float] = MappingProxyType({})


class _Pair(NamedTuple):
    loss: float
    gradients: dict[str, np.ndarray]


class LossAndGradients(_Pair):
    """A batch's loss and its gradients: `loss, gradients = run.loss_and_gradients(batch)`.

    Args:
        loss: nats a target, the sum of all terms.
        gradients: of it, whole and canonical, by the parameter's name.
        losses: each term by its name, over its own targets.
    """

    losses: dict[str, float]

    def __new__(
        cls, loss: float, gradients: dict[str, np.ndarray], losses: Mapping[str, float] = _NONE
    ) -> "LossAndGradients":
        """A pair, with the losses as an attribute."""
        pair = super().__new__(cls, loss, gradients)
        pair.losses = dict(losses)
        return pair

    def __repr__(self) -> str:
        terms = ", ".join(f"{name}={value:.6g}" for name, value in self.losses.items())
        return f"loss {self.loss:.6g} ({terms}) and {len(self.gradients)} gradients"


class WholeBatches:
    """Compiled functions of a program for whole batches.

    Args:
        program: of the run; its batch has another size.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._gradients: dict[int, Any] = {}
        self._logits = _logits_function(program)

    def loss_and_gradients(self, state: State, batch: WholeBatch) -> LossAndGradients:
        """The mean of each loss over its valid targets, and canonical gradients."""
        config = self._program.config
        fields = family_of(config.model).given(config)
        x = _checked(batch, fields, config)
        _check_no_others(batch, fields, config)
        _check_targets(x, config)
        sharing = family_of(config.model).sharing(config.model, config.layout)
        unit = config.layout.sample_shards * config.train.micro_batches * sharing
        rows = -(-len(next(iter(x.values()))) // unit) * unit
        padded = {name: _padded(x[name], field, rows, config) for name, field in fields.items()}
        if rows not in self._gradients:
            train = dataclasses.replace(config.train, global_batch_size=rows)
            sized = dataclasses.replace(config, train=train)
            self._gradients[rows] = Program(sized, self._program.mesh).gradients
        loss, losses, gradients = self._gradients[rows](state, padded)
        canonical = self._program.canonical(gradients)
        return LossAndGradients(
            float(loss),
            {name: np.asarray(g) for name, g in canonical.items()},
            {name: float(each) for name, each in losses.items()},
        )

    def logits(self, params: Params, batch: WholeBatch) -> np.ndarray:
        """Logits `[B, T, V]`, computed one sequence at a time."""
        config = self._program.config
        field = tokens_field(config)
        if field is None:
            raise UserError(
                f"model.family={config.model.family}: only models that continue text have logits; "
                "use loss_and_gradients, or run.program.eval_step"
            )
        tokens_BT = _checked(batch, {TOKENS: field}, config)[TOKENS]
        rows = [self._logits(params, row_T[None]) for row_T in tokens_BT.astype(np.int32)]
        return np.concatenate([np.asarray(row) for row in rows])


def tokens_field(config: Config) -> Field | None:
    """The tokens of a model that continues text; None if it does not."""
    family = family_of(config.model)
    continues = family.writing is not None and family.writing.continues
    return family.given(config).get(TOKENS) if continues else None


def sharded_logits(program: Program) -> Callable[[Params, Array], Array]:
    """Makes the function (params, tokens[B, T]) -> logits[B, T, V] of sequences from their start.

    It runs inside shard_map, where every device has all of the result, typed as varying.
    """
    resolved = resolve_for_decoding(program.config, program.mesh)
    vocab_size = program.config.model.vocab_size

    def logits(params: Params, tokens_BT: Array) -> Array:
        passes, (B, T) = make_passes(resolved), tokens_BT.shape
        params = passes.gathered(resolved.zero.begin_step(params, training=False))
        token_info = TokenInfo(jnp.zeros(B, jnp.int32), jnp.arange(T, dtype=jnp.int32), None)
        state = passes.empty_state(params, B)
        compute = exact_products(passes.logits, program.config.model.dtype, program.mesh)
        logits_BTV, _ = compute(params, {TOKENS: tokens_BT}, token_info, state)
        return resolved.tensor_parallel.axes.gather(logits_BTV, 2)[..., :vocab_size]

    return logits


def _logits_function(program: Program) -> Any:
    """(params, tokens[1, T]) -> logits[1, T, V], compiled for each T."""
    logits = sharded_logits(program)

    def run(params: Params, tokens_BT: Array) -> Array:
        return as_same(logits(params, tokens_BT))

    specs = (program.states.specs["params"], P())
    mapped = partial(jax.shard_map, mesh=program.mesh, check_vma=True)
    return jax.jit(mapped(run, in_specs=specs, out_specs=P()))


def _padded(x: np.ndarray, field: Field, rows: int, config: Config) -> np.ndarray:
    """`[rows, T, ..]` of the model's T, or `[rows]`, with padding after each sequence and all."""
    sizes = (rows, *(option(config.model, size) for size in field.sizes))
    return field.padded(x, sizes)


# ---- checks ---------------------------------------------------------------------------------


def _checked(
    batch: WholeBatch, fields: Mapping[str, Field], config: Config
) -> dict[str, np.ndarray]:
    """The arrays of these fields, with the fields' types: padding of -1 is not in uint16.

    Raises:
        UserError: some are missing, are of other numbers, or differ in their sequences.
    """
    if not isinstance(batch, Mapping) or [name for name in fields if name not in batch]:
        named = [f"{name} {field.dims()}" for name, field in fields.items()]
        raise UserError(f"a batch is a dict with {', '.join(named)}, numpy arrays")
    arrays = {name: np.asarray(batch[name]) for name in fields}
    shapes = {field.length: arrays[name].shape for name, field in [*fields.items()][::-1]}
    for name, field in fields.items():
        x, (kinds, words) = arrays[name], _KINDS[field.dtype]
        if x.dtype.kind not in kinds or x.ndim != 1 + len(field.sizes) or x.size == 0:
            raise UserError(
                f"a batch holds {name} of {x.dtype} {list(x.shape)}; use {words} {field.dims()}"
            )
        if x.shape[:2] != shapes[field.length][:2] or len(x) != len(next(iter(arrays.values()))):
            raise UserError(
                f"a batch holds {name} {list(x.shape)}, but {_others(arrays, name)}; use as many "
                "sequences and positions in each"
            )
        _check_length(name, x, field, config)
    check_ids(arrays, config)
    return {name: x.astype(fields[name].dtype) for name, x in arrays.items()}


_KINDS = {"int32": ("iu", "ints"), "float32": ("f", "floats")}  # numpy's letters, and in words


def _others(arrays: Mapping[str, np.ndarray], name: str) -> str:
    return ", ".join(f"{other} {list(x.shape)}" for other, x in arrays.items() if other != name)


def _check_length(name: str, x: np.ndarray, field: Field, config: Config) -> None:
    sizes = {size: option(config.model, size) for size in field.sizes}
    if not field.ring and x.shape[1:] != tuple(sizes[size] for size in field.sizes):
        names = ", ".join(f"model.{size}={number}" for size, number in sizes.items())
        raise UserError(f"a batch holds {name} {list(x.shape)}; use as many numbers as {names}")
    longest = sizes.get(field.length or "", np.inf)
    if field.length is not None and x.shape[1] > longest:
        raise UserError(
            f"a batch has {x.shape[1]} positions in {name}; use at most model.{field.length}="
            f"{longest}"
        )


def _check_no_others(batch: WholeBatch, fields: Mapping[str, Field], config: Config) -> None:
    if unknown := [str(name) for name in batch if name not in fields]:
        raise UserError(
            f"a batch holds {unknown[0]}, but with model.family={config.model.family}, "
            f"data.documents={config.data.documents} it must hold {', '.join(fields)}"
        )


def _check_targets(batch: Mapping[str, np.ndarray], config: Config) -> None:
    """Raises UserError if a loss has no target to average over."""
    family = family_of(config.model)
    for term, loss in family.losses(config.model).items():
        if loss.optional:
            continue
        derived = family.fields(config)[loss.targets].derived
        targets = derived.make(*map(batch.get, derived.fields)) if derived else batch[loss.targets]
        if (targets < 0).all():
            raise UserError(
                f"a batch has no valid target in {loss.targets} for the loss {term}; use targets "
                "of 0 or more"
            )
