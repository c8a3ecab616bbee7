"""The body of a step: what each device runs inside the `shard_map`.

Letters: B batch, T position, C chunks of the ring, M micro-batches.
"""

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.tensor_parallel import local_numbers
from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.models.family import Loss, Sequence
from jaxptd.params import Params
from jaxptd.step.batch import Batch, batch_specs
from jaxptd.step.optimizer import Scalars, clip, global_norm, learning_rate, updated
from jaxptd.step.passes import ForwardBackward, Losses, MicroBatches, total
from jaxptd.step.pipelined import make_passes
from jaxptd.step.resolved import ResolvedConfig
from jaxptd.step.state import Metrics, State, States, advance, is_sound, unscaled


@dataclasses.dataclass(frozen=True)
class StepBody:
    """Runs a training step or an evaluation on one device's shards of state and batch.

    Args:
        resolved: the config's choices.
        states: moves the state to host memory.
        passes: runs the micro-batches through the model.
        owed: axes over which the gradient of each parameter is a partial sum, see `owed_axes`.
        terms: of the loss.
    """

    resolved: ResolvedConfig
    states: States
    passes: ForwardBackward
    owed: Mapping[str, tuple[str, ...]]
    terms: Mapping[str, Loss]

    @classmethod
    def of(cls, resolved: ResolvedConfig, states: States) -> Self:
        """Makes the body of a config's step."""
        terms = resolved.family.losses(resolved.model)
        return cls(resolved, states, make_passes(resolved), owed_axes(resolved), terms)

    def train(self, state: State, batch: Batch) -> tuple[State, Metrics, Params]:
        """The next state, the step's metrics, and its gradients."""
        config = self.resolved.config
        scale = state["guard"]["scale"]
        weights = self._weights(batch, scale)
        micro, token_info = self.micro_batches(batch, self._seed(state["step"]))
        gatherable = self.resolved.zero.begin_step(self._varying(state["params"]))
        losses, grads = self.passes.gradients(gatherable, micro, token_info, weights)
        grads = self._reduce(self.resolved.zero.end_step(grads))  # once, whatever M is
        sums = self._loss_sums(losses), grads
        losses, grads = unscaled(sums, scale, self.resolved.model.dtype)
        norm = global_norm(grads, self.resolved.stored)
        rate = learning_rate(config.optimizer, step=state["step"], steps=config.train.steps)
        clipped = clip(grads, norm, config.optimizer.grad_clip)
        metrics = _with_total(losses) | {"grad_norm": norm, "learning_rate": rate}
        sound = is_sound(metrics["loss"], norm, config.optimizer.skip_above)
        scalars = Scalars(rate, norm, sound)
        new = updated(config, self.resolved.optimizer, state, clipped, scalars)
        state, metrics = advance(state, new, metrics, sound=sound, dtype=self.resolved.model.dtype)
        return self.states.to_host(state), metrics, grads

    def evaluate(self, params: Params, batch: Batch) -> dict[str, Metrics]:
        """Sums each loss over all targets, in nats, and counts them; without dropout."""
        gatherable = self.resolved.zero.begin_step(self._varying(params), training=False)
        sums = self._loss_sums(self.passes.losses(gatherable, *self.micro_batches(batch, None)))
        counts = self._counts(batch)
        return {
            name: {"sum": sums[name], "targets": counts[term.targets]}
            for name, term in self.terms.items()
            if term.evaluated
        }

    def classes(self, params: Params, batch: Batch) -> Array:
        """The most likely classes of what the model's output is of, `[B, ..]`; without dropout."""
        gatherable = self.resolved.zero.begin_step(self._varying(params), training=False)
        gathered = self.passes.gathered(gatherable)
        micro_batches, shared = self.micro_batches(batch, None)

        def of_one(micro: MicroBatches) -> Array:
            token_info = micro.token_info(shared)
            logits, _ = self.passes.logits(gathered, micro.batch, token_info, {})
            classes = jnp.argmax(logits, -1).astype(jnp.int32)
            return self.resolved.tensor_parallel.axes.gather_images(classes)

        classes = lax.map(of_one, micro_batches)
        spec = batch_specs(self.resolved.config)[self.resolved.family.classes or ""]
        alike = tuple(sorted(varying_axes(classes) - set(spec)))  # only typed as varying
        classes = lax.pmax(classes, alike) if alike else classes
        return classes.reshape(-1, *classes.shape[2:])

    def micro_batches(self, batch: Batch, seed: Array | None) -> tuple[MicroBatches, TokenInfo]:
        """[B, ...] -> [M, B/M, ...], and where the tokens of all of them are."""
        M, token_info = self.resolved.config.train.micro_batches, self._places(batch, seed)
        micro = jax.tree.map(
            lambda x: x.reshape(M, x.shape[0] // M, *x.shape[1:]),
            MicroBatches(batch, token_info.sample_B, token_info.segments),
        )
        return micro, token_info

    # ---- gradients --------------------------------------------------------------------------

    def _varying(self, params: Params) -> Params:
        """Parameters that vary over the axes that shard tokens, so gradients stay local sums."""
        return {name: as_varying(p, self.owed[name]) for name, p in params.items()}

    def _reduce(self, grads: Params) -> Params:
        """Sums the gradients over the axes where they are owed: one all-reduce for each set."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in grads:
            groups.setdefault(self.owed[name], []).append(name)
        reduced: Params = {}
        for axes, names in groups.items():
            reduced |= lax.psum({name: grads[name] for name in names}, axes)
        return {name: reduced[name] for name in grads}

    # ---- losses -----------------------------------------------------------------------------

    def _counts(self, batch: Batch) -> dict[str, Array]:
        """The number of targets in each field that has any."""
        fields = sorted({term.targets for term in self.terms.values()})
        counts = {name: jnp.sum(batch[name] >= 0, dtype=jnp.int32) for name in fields}
        return {
            name: lax.psum(x, [a for a in BATCH_AXES if a in varying_axes(x)])
            for name, x in counts.items()
        }

    def _weights(self, batch: Batch, scale: Array) -> Losses:
        """The factor of each loss's sum: its weight and the scale, divided by its targets."""
        counts, dtype = self._counts(batch), self.resolved.master_dtype
        scale = scale.astype(dtype)  # a weight times float32 would be rounded to it
        return {
            name: term.weight * scale / counts[term.targets].astype(dtype)
            for name, term in self.terms.items()
            if term.trained
        }

    def _loss_sums(self, losses: Losses) -> Losses:
        """Sums losses over the axes that shard the logits' tokens, and pp: one stage has them.

        Where x is whole images, so are the logits: then axes that shard x's tokens shard these too.
        """
        axes = (Axis.PP, *BATCH_AXES, *self.resolved.tensor_parallel.axes.logit_tokens)
        varying = frozenset().union(*map(varying_axes, losses.values())).difference(axes)
        axes = (
            *axes,
            *(axis for axis in self.resolved.tensor_parallel.axes.tokens if axis in varying),
        )
        return lax.psum({name: as_varying(x, axes) for name, x in losses.items()}, axes)

    # ---- tokens and random numbers --------------------------------------------------------------

    def _seed(self, step: Array) -> Array | None:
        """Two words that all dropout of a step is drawn from; None without dropout."""
        if not self.resolved.model.drops:
            return None
        key = jax.random.key(self.resolved.config.train.seed)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def _places(self, batch: Batch, seed: Array | None) -> TokenInfo:
        """The global numbers of this device's samples, and of the tokens of their sequences."""
        first, *others = self.resolved.family.sequences
        token_info = self._places_of(first, batch, seed)
        for each in others:
            token_info = self._places_of(each, batch, seed)._replace(source=token_info)
        return token_info

    def _places_of(self, sequence: Sequence, batch: Batch, seed: Array | None) -> TokenInfo:
        """The places of one of a sample's sequences."""
        size, length = batch[sequence.tokens].shape[:2]
        sample_B = lax.axis_index(Axis.DP) * size + jnp.arange(size, dtype=jnp.int32)
        ring, segment_BCT = self.resolved.tensor_parallel.ring, None
        segment_BT = sequence.documents(batch)
        if segment_BT is not None:
            segment_BCT = ring.by_device(lax.all_gather(segment_BT, Axis.CP, axis=1))
        in_ring = self.resolved.family.fields(self.resolved.config)[sequence.tokens].ring
        positions = ring.positions_along if in_ring else local_numbers
        return TokenInfo(sample_B, positions(Axis.CP, length), seed, segment_BCT)


def owed_axes(resolved: ResolvedConfig) -> dict[str, tuple[str, ...]]:
    """Axes over which the gradient of each parameter's shard is a partial sum.

    Those that shard tokens, pp, and those that shard what only this parameter is used on.
    """
    axes, owed = (Axis.PP, *BATCH_AXES, *resolved.tensor_parallel.axes.tokens), {}
    for name, stored in resolved.stored.items():
        others = (axis for axis in stored.info.over if axis not in axes)
        owed[name] = tuple(a for a in (*axes, *others) if a not in stored.axes)
    return owed


def _with_total(losses: Losses) -> Metrics:
    """The loss, the sum of all terms; with each of them, if there are several."""
    terms = losses if len(losses) > 1 else {}
    return {"loss": total(losses), **terms}
