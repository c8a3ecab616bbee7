"""The body of a step: what each device runs inside the `shard_map`.

Letters: B batch, T position, C chunks of the ring, M micro-batches.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying, varying_axes
from jaxptd.data import Field
from jaxptd.layers.block import Seen
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.tensor_parallel import block_along, local_numbers
from jaxptd.mesh import BATCH_AXES, SAMPLE_AXES, SEQUENCE_AXES, Axis
from jaxptd.models.decoder import POSITION, SAMPLE
from jaxptd.models.family import Loss
from jaxptd.models.model import SEEN, run_layers
from jaxptd.params import Params
from jaxptd.step.batch import Batch, batch_specs
from jaxptd.step.expert_load import balanced, load_metrics
from jaxptd.step.optimizer import (
    Scalars,
    clip,
    global_norm,
    learning_rate,
    updated,
)
from jaxptd.step.passes import ForwardBackward, Losses, MicroBatches
from jaxptd.step.pipelined import make_passes
from jaxptd.step.resolved import ResolvedConfig
from jaxptd.step.state import SCALED, Metrics, State, States, after_step, is_sound


@dataclasses.dataclass(frozen=True)
class StepBody:
    """Runs a training step or an evaluation on one device's shards of state and batch.

    Args:
        resolved: the config's choices.
        states: moves the state to host memory.
        passes: runs the micro-batches through the model.
        counting: names of the parameters whose gradients count tokens.
        owed: axes over which the gradient of each parameter is a partial sum, see `owed_axes`.
        terms: of the loss.
        fields: of a batch.
        drops: whether training draws random numbers.
    """

    resolved: ResolvedConfig
    states: States
    passes: ForwardBackward
    counting: tuple[str, ...]
    owed: Mapping[str, tuple[str, ...]]
    terms: Mapping[str, Loss]
    fields: Mapping[str, Field]
    drops: bool

    @classmethod
    def of(cls, resolved: ResolvedConfig, states: States) -> Self:
        """Makes the body of a config's step."""
        return cls(
            resolved,
            states,
            make_passes(resolved),
            tuple(
                n
                for n, each in resolved.stored.items()
                if each.info.counts and not each.info.frozen
            ),
            owed_axes(resolved),
            terms=resolved.family.losses(resolved.model),
            fields=resolved.family.fields(resolved.config),
            drops=resolved.model.drops,
        )

    def train(self, state: State, batch: Batch) -> tuple[State, Metrics, Params]:
        """The next state, the step's metrics, and its gradients."""
        resolved, config, guard = self.resolved, self.resolved.config, state["guard"]
        counts, dtype = self._counts(batch), resolved.master_dtype
        scale = guard["scale"].astype(dtype)  # a weight times float32 would be rounded to it
        weights = {
            name: term.weight
            * scale
            / jnp.maximum(counts[term.targets], int(term.optional)).astype(dtype)
            for name, term in self.terms.items()
            if term.trained
        }
        micro, token_info = self.micro_batches(batch, state["step"])
        gatherable = resolved.zero.begin_step(state["params"], self.owed)
        losses, grads = self.passes.gradients(gatherable, micro, token_info, weights)
        grads = resolved.zero.end_step(grads, self.owed)  # once, whatever M is
        counts = {name: grads[name] for name in self.counting}
        grads = {name: g for name, g in grads.items() if name not in counts}
        losses, scales = self._loss_sums(losses), {}
        if resolved.model.dtype == SCALED:
            scales = {"loss_scale": guard["scale"]}
            losses, grads = jax.tree.map(lambda x: x / guard["scale"], (losses, grads))
        norm = global_norm(grads, resolved.stored)
        rate = learning_rate(config.optimizer, step=state["step"], steps=config.train.steps)
        clipped = clip(grads, norm, config.optimizer.grad_clip)
        terms = losses if len(losses) > 1 else {}
        total = functools.reduce(operator.add, losses.values())
        metrics = {"loss": total, **terms, "grad_norm": norm, "learning_rate": rate}
        sound = is_sound(total, norm, config.optimizer.skip_above)
        new = updated(config, resolved.optimizer, state, clipped, Scalars(rate, norm, sound))
        guard, loads = after_step(guard, sound, norm, resolved.model.dtype), {}
        if counts:
            new["params"] |= balanced(config, state["params"], counts, sound)
            loads = load_metrics(config, counts, resolved.stored)
        new["params"] = state["params"] | new["params"]  # frozen ones as they were
        skips = {"skipped": guard["skipped"], "skipped_in_row": guard["in_row"]}
        state = self.states.to_host({**new, "step": state["step"] + 1, "guard": guard})
        return state, metrics | skips | scales | loads, grads | counts

    def evaluate(self, params: Params, batch: Batch) -> dict[str, Metrics]:
        """Sums each loss over all targets, in nats, and counts them; without dropout."""
        gatherable = self.resolved.zero.begin_step(params, self.owed, training=False)
        sums = self._loss_sums(self.passes.losses(gatherable, *self.micro_batches(batch)))
        counts = self._counts(batch)
        return {
            name: {"sum": sums[name], "targets": counts[term.targets]}
            for name, term in self.terms.items()
            if term.evaluated
        }

    def log_probabilities(self, params: Params, batch: Batch) -> Array:
        """The sum of the targets' log-probabilities in each document of all samples, `[B, K]`.

        Without dropout.
        """
        gatherable = self.resolved.zero.begin_step(params, self.owed, training=False)
        size = self.resolved.config.train.global_batch_size

        def of_documents(model: Any) -> Callable[..., Losses]:
            def place(x: Any, batch: Batch, token_info: TokenInfo) -> Losses:
                sums_BK = model.log_probabilities(x, batch)
                whole_BK = jnp.zeros((size, sums_BK.shape[1]), sums_BK.dtype)
                return {"sums": whole_BK.at[token_info.sample_B].set(sums_BK)}

            return place

        micro_batches, shared = self.micro_batches(batch)
        sums = self.passes.losses(gatherable, micro_batches, shared, of_documents)
        return self._loss_sums(sums)["sums"]

    def classes(self, params: Params, batch: Batch) -> Array:
        """The most likely classes of what the model's output is of, `[B, ..]`; without dropout."""
        gatherable = self.resolved.zero.begin_step(params, self.owed, training=False)
        gathered = self.passes.gathered(gatherable)
        micro_batches, shared = self.micro_batches(batch)

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

    def choices(self, params: Params, batch: Batch, step: int | None = None) -> Seen:
        """The experts of every token in each layer, and by how much; without stages.

        step: whose dropout tokens meet; None: without dropout.
        """
        resolved, moe = self.resolved, self.resolved.model.moe
        assert moe is not None
        gatherable = resolved.zero.begin_step(params, self.owed, training=False)
        model = resolved.blueprint.build(self.passes.gathered(gatherable))
        number = None if step is None else jnp.int32(step)
        micro_batches, shared = self.micro_batches(batch, number)
        tokens = resolved.tensor_parallel.axes.tokens
        axes = (Axis.PP, *BATCH_AXES, *tokens)

        def of_one(micro: MicroBatches) -> Seen:
            like = block_along(micro.batch["tokens"], tokens, 1)
            shape = (*like.shape, resolved.model.routed_layers)
            margin_BTL = jnp.zeros(shape, resolved.master_dtype)
            empty = Seen(jnp.zeros((*shape, moe.top_k), jnp.int32), margin_BTL)
            seen = jax.tree.map(lambda x: as_varying(x, axes), empty)
            token_info = micro.token_info(shared)
            x, _ = run_layers(model, {**micro.batch, SEEN: seen}, token_info)
            found: Seen = model.seen(x, micro.batch, token_info)
            return found

        seen = lax.map(of_one, micro_batches)
        alike = tuple(sorted({*axes} - {*BATCH_AXES, *tokens}))  # only typed as varying
        return jax.tree.map(lambda x: lax.pmax(x.reshape(-1, *x.shape[2:]), alike), seen)

    def micro_batches(
        self, batch: Batch, step: Array | None = None
    ) -> tuple[MicroBatches, TokenInfo]:
        """[B, ...] -> [M, B/M, ...], and where the tokens of all of them are.

        step: its number, from which all its dropout is drawn; None: without dropout.
        """
        config, ring = self.resolved.config, self.resolved.tensor_parallel.ring
        seed, token_info, segments = None, None, []
        if step is not None and self.drops:
            seed = jax.random.key_data(jax.random.fold_in(jax.random.key(config.train.seed), step))
        for sequence in self.resolved.family.sequences:
            size, length = batch[sequence.tokens].shape[:2]
            sample_B = lax.axis_index(SAMPLE_AXES) * size + jnp.arange(size, dtype=jnp.int32)
            sample_B = batch.get(SAMPLE, sample_B)
            segment_BT, segment_BCT = sequence.documents(batch), None
            if segment_BT is not None:
                segment_BCT = ring.by_device(lax.all_gather(segment_BT, SEQUENCE_AXES, axis=1))
            if self.fields[sequence.tokens].ring:
                position_T = ring.positions_along(Axis.CP, length)
            else:
                position_T = local_numbers(SEQUENCE_AXES, length)
            counted_T = None
            if config.model.moe and config.padded_model.seq_length > config.model.seq_length:
                counted_T = position_T < config.model.seq_length
            segments.append(segment_BCT)
            token_info = TokenInfo(sample_B, position_T, seed, segment_BCT, token_info, counted_T)
        assert token_info is not None
        places = None
        if POSITION in batch:
            every_BT = lax.all_gather(batch[POSITION], SEQUENCE_AXES, axis=1)
            places = ring.by_device(every_BT)
        whole = MicroBatches(batch, token_info.sample_B, tuple(segments), places)
        M = config.train.micro_batches
        micro = jax.tree.map(lambda x: x.reshape(M, x.shape[0] // M, *x.shape[1:]), whole)
        return micro, token_info

    # ---- losses -----------------------------------------------------------------------------

    def _counts(self, batch: Batch) -> dict[str, Array]:
        """The number of targets in each field that has any."""
        fields = sorted({term.targets for term in self.terms.values()})
        counts = {name: jnp.sum(batch[name] >= 0, dtype=jnp.int32) for name in fields}
        return {
            name: lax.psum(x, [a for a in BATCH_AXES if a in varying_axes(x)])
            for name, x in counts.items()
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


def owed_axes(resolved: ResolvedConfig) -> dict[str, tuple[str, ...]]:
    """Axes over which the gradient of each parameter's shard is a partial sum.

    Those that shard tokens, pp, and those that shard what only this parameter is used on; without
    replicas where layers add up theirs.
    """
    axes, owed = (Axis.PP, *BATCH_AXES, *resolved.tensor_parallel.axes.tokens), {}
    for name, stored in resolved.stored.items():
        others = (axis for axis in stored.info.over if axis not in axes)
        summed = {*stored.axes, *[Axis.REPLICAS] * resolved.zero.plans[name].sums_replicas}
        owed[name] = tuple(a for a in (*axes, *others) if a not in summed)
    return owed
