"""The body of a step: what each device runs inside the `shard_map`.

Letters: B batch, T position, C chunks of the ring, M micro-batches.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_varying
from jaxptd.layers.dropout import Places
from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.params import Params
from jaxptd.step.batch import Batch
from jaxptd.step.optimizer import clip, global_norm, learning_rate
from jaxptd.step.passes import Micro, Passes
from jaxptd.step.resolved import Resolved
from jaxptd.step.skipping import Metrics, advance, unscaled
from jaxptd.step.state import State, States


@dataclasses.dataclass(frozen=True)
class StepBody:
    """Runs a training step or an evaluation on one device's shards of state and batch.

    Args:
        resolved: the config's choices.
        states: moves the state between host and device memory.
        passes: runs the micro-batches through the model.
    """

    resolved: Resolved
    states: States
    passes: Passes

    def train(self, state: State, batch: Batch) -> tuple[State, Metrics, Params]:
        """The next state, the step's metrics, and its gradients."""
        config, optimizer = self.resolved.config, self.resolved.optimizer
        scale = state["guard"]["scale"]
        params = self.states.to_device(state["params"])
        count = lax.psum(jnp.sum(batch["targets"] >= 0), BATCH_AXES)
        count = count.astype(self.resolved.master_dtype)
        micro, places = self.micro_batches(batch, self._seed(state["step"]))
        gatherable = self.resolved.zero.begin_step(self._varying(params))
        sums = self.passes.gradients(gatherable, micro, places, scale / count)
        loss, grads = unscaled(self._reduced(*sums), scale, self.resolved.model.dtype)
        norm = global_norm(grads, self.resolved.stored)
        rate = learning_rate(config.optimizer, step=state["step"], steps=config.train.steps)
        clipped = clip(grads, norm, config.optimizer.grad_clip)
        state = self.states.to_device(state)
        direction, moments = optimizer.update(clipped, state["optimizer"], state["params"])
        params = {
            name: p - rate.astype(p.dtype) * direction[name] for name, p in state["params"].items()
        }
        new = {"params": params, "optimizer": moments}
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
        state, metrics = advance(state, new, metrics, config)
        return self.states.to_host(state), metrics, grads

    def evaluate(self, params: Params, batch: Batch) -> Metrics:
        """The sum of the losses of all tokens, in nats, and their number; without dropout."""
        varying = self._varying(self.states.to_device(params))
        gatherable = self.resolved.zero.begin_step(varying, training=False)
        loss = self.passes.loss(gatherable, *self.micro_batches(batch, None))
        tokens = jnp.sum(batch["targets"] >= 0)
        return {"loss_sum": self._loss_sum(loss), "tokens": lax.psum(tokens, BATCH_AXES)}

    def micro_batches(self, batch: Batch, seed: Array | None) -> tuple[Micro, Places]:
        """[B, ...] -> [M, B/M, ...], and where the tokens of all of them are."""
        M, places = self.resolved.config.train.micro_batches, self._places(batch, seed)
        micro = jax.tree.map(
            lambda x: x.reshape(M, x.shape[0] // M, *x.shape[1:]),
            Micro(batch, places.sample_B, places.segment_BCT),
        )
        return micro, places

    # ---- gradients --------------------------------------------------------------------------

    def _varying(self, params: Params) -> Params:
        """Parameters that vary over the axes that shard tokens, so gradients stay local sums."""
        return {name: as_varying(p, self._owed_axes(name)) for name, p in params.items()}

    def _owed_axes(self, name: str) -> tuple[str, ...]:
        """Axes over which a shard's gradient is a partial sum.

        Those that shard tokens, pp, and those that shard what only this parameter is used on.
        """
        stored = self.resolved.stored[name]
        axes = (Axis.PP, *BATCH_AXES, *self.resolved.form.axes.tokens)
        others = (axis for axis in stored.info.over if axis not in axes)
        return tuple(a for a in (*axes, *others) if a not in stored.axes)

    def _reduced(self, loss: Array, grads: Params) -> tuple[Array, Params]:
        """Sums loss and gradients over the devices: once, whatever M is."""
        grads = self._reduce(self.resolved.zero.end_step(grads))
        return self._loss_sum(loss), grads

    def _reduce(self, grads: Params) -> Params:
        """Sums the gradients over the axes that `_owed_axes` names: one all-reduce for each set."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in grads:
            groups.setdefault(self._owed_axes(name), []).append(name)
        reduced: Params = {}
        for axes, names in groups.items():
            reduced |= lax.psum({name: grads[name] for name in names}, axes)
        return {name: reduced[name] for name in grads}

    def _loss_sum(self, loss: Array) -> Array:
        """Sums the loss over the axes that shard the logits' tokens, and pp: one stage has it."""
        axes = (Axis.PP, *BATCH_AXES, *self.resolved.form.axes.logit_tokens)
        return lax.psum(as_varying(loss, axes), axes)

    # ---- tokens and random numbers --------------------------------------------------------------

    def _seed(self, step: Array) -> Array | None:
        """Two words that all dropout of a step is drawn from; None without dropout."""
        if self.resolved.model.dropout == 0:
            return None
        key = jax.random.key(self.resolved.config.train.seed)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def _places(self, batch: Batch, seed: Array | None) -> Places:
        """The global numbers of this device's sequences and tokens."""
        local_B = jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32)
        sample_B = lax.axis_index(Axis.DP) * local_B.size + local_B
        ring, segment_BCT = self.resolved.form.ring, None
        if "segments" in batch:
            segment_BCT = ring.by_device(lax.all_gather(batch["segments"], Axis.CP, axis=1))
        position_T = ring.positions_along(Axis.CP, batch["tokens"].shape[1])
        return Places(sample_B, position_T, seed, segment_BCT)
