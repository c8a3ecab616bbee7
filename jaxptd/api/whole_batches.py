"""Loss, gradients and logits of whole batches of numpy arrays, of any size that fits.

Letters: B batch, T position, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_same
from jaxptd.errors import UserError
from jaxptd.layers.dropout import Places
from jaxptd.models.families import family_of
from jaxptd.params import Params
from jaxptd.step import Program, State
from jaxptd.step.passes import make_passes
from jaxptd.step.resolved import resolve_for_decoding

FIELDS = ("tokens", "targets")
MASKED = -1  # a target that does not count

WholeBatch = Mapping[str, np.ndarray]


class WholeBatches:
    """Compiled functions of a program for whole batches.

    Args:
        program: of the run; its batch has another size.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._gradients: dict[int, Any] = {}
        self._logits = _logits_function(program)

    def loss_and_gradients(
        self, state: State, batch: WholeBatch
    ) -> tuple[float, dict[str, np.ndarray]]:
        """The mean loss of all targets that count, and canonical gradients."""
        x = _checked(batch, FIELDS, self._program)
        config = self._program.config
        unit = config.layout.dp * config.train.micro_batches
        rows = -(-len(x["tokens"]) // unit) * unit
        length = config.model.seq_length
        # Of a causal model no token sees the padding after it, whose targets do not count.
        padded = {"tokens": _padded(x["tokens"], rows, length, 0)}
        padded["targets"] = _padded(x["targets"], rows, length, MASKED)
        if rows not in self._gradients:
            train = dataclasses.replace(config.train, global_batch_size=rows)
            sized = dataclasses.replace(config, train=train)
            self._gradients[rows] = Program(sized, self._program.mesh).gradients
        loss, gradients = self._gradients[rows](state, padded)
        stored = self._program.states.stored
        return float(loss), {
            name: np.asarray(stored[name].to_canonical(g)) for name, g in gradients.items()
        }

    def logits(self, params: Params, batch: WholeBatch) -> np.ndarray:
        """Logits `[B, T, V]`, computed a sequence at a time."""
        tokens_BT = _checked(batch, FIELDS[:1], self._program)["tokens"]
        rows = [self._logits(params, row_T[None]) for row_T in tokens_BT]
        return np.concatenate([np.asarray(row) for row in rows])


def _logits_function(program: Program) -> Any:
    """(params, tokens[1, T]) -> logits[1, T, V], compiled for each T."""
    resolved = resolve_for_decoding(program.config, program.mesh)
    vocab_size = program.config.model.vocab_size

    def run(params: Params, tokens_BT: Array) -> Array:
        passes, (B, T) = make_passes(resolved), tokens_BT.shape
        params = program.states.to_device(params)
        params = passes.gathered(resolved.zero.begin_step(params, training=False))
        places = Places(jnp.zeros(B, jnp.int32), jnp.arange(T, dtype=jnp.int32), None)
        state = passes.empty_state(params, B)
        logits_BTV, _ = passes.logits(params, {"tokens": tokens_BT}, places, state)
        return as_same(resolved.form.axes.gather(logits_BTV, 2)[..., :vocab_size])

    specs = (program.states.specs["params"], P())
    whole = partial(jax.shard_map, mesh=program.mesh, check_vma=True)
    return jax.jit(whole(run, in_specs=specs, out_specs=P()))


def _padded(x_BT: np.ndarray, rows: int, length: int, value: int) -> np.ndarray:
    missing = ((0, rows - x_BT.shape[0]), (0, length - x_BT.shape[1]))
    return np.pad(x_BT, missing, constant_values=value).astype(np.int32)


def _checked(batch: WholeBatch, names: tuple[str, ...], program: Program) -> dict[str, np.ndarray]:
    """The arrays of a batch. Raises UserError for others than `[B, T]` of ids, and for encoders."""
    model = program.config.model
    writing = family_of(model).writing
    if writing is None or not writing.continues:
        raise UserError(
            f"model.family={model.family}: only batches of a decoder are taken here; use "
            "run.program.gradients or eval_step"
        )
    if not isinstance(batch, Mapping) or [name for name in names if name not in batch]:
        raise UserError(f"a batch is a dict with {' and '.join(names)}, numpy arrays [B, T]")
    found = {name: np.asarray(batch[name]) for name in names}
    shape, longest = found["tokens"].shape, program.config.model.seq_length
    for name, x in found.items():
        if x.ndim != 2 or x.size == 0 or x.shape != shape or x.dtype.kind not in "iu":
            raise UserError(
                f"a batch holds {name} of {x.dtype} {list(x.shape)}; use whole numbers [B, T], "
                "the same shape for all"
            )
        lowest = 0 if name == "tokens" else np.iinfo(np.int32).min  # below 0: not counted
        highest = program.config.model.vocab_size or 0
        if x.min() < lowest or x.max() >= highest:
            raise UserError(f"a batch holds {name} outside {lowest} to {highest - 1}")
    if shape[1] > longest:
        raise UserError(f"a batch has {shape[1]} positions; use at most model.seq_length={longest}")
    if "targets" in found and (found["targets"] < 0).all():
        raise UserError("a batch has no target that counts; use targets of 0 or more")
    return found
