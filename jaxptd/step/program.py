"""The training step of any layout: forward, backward, reduction, clip and update in one shard_map.

Letters: B batch, T position, M micro-batches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.collectives import as_varying
from jaxptd.config import AttentionKind, Config, ModelConfig
from jaxptd.layers.attention import choose_kernel
from jaxptd.layers.block import OFFLOADED
from jaxptd.layers.dropout import Places
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.forms import make_form
from jaxptd.layers.fp8 import choose_product
from jaxptd.mesh import BATCH_AXES, Axis, on_gpus
from jaxptd.models.gpt import GPT
from jaxptd.params import Blueprint, ParamInfo, Params, Stored
from jaxptd.pipeline.plan import Plan
from jaxptd.step.batch import BATCH_SPEC, Batch, batch_fields, check_batch, check_fields
from jaxptd.step.compiler import compiler_options
from jaxptd.step.optimizer import adamw, clip, global_norm, learning_rate
from jaxptd.step.passes import Micro, Passes, Pipelined, Place, Unpipelined, make_plan
from jaxptd.step.skipping import advance, unscaled
from jaxptd.step.state import State, States, state_memory
from jaxptd.zero import Zero

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config compiles to on a mesh. Methods that begin with `_` run inside the shard_map."""

    config: Config
    mesh: Mesh

    @cached_property
    def model(self) -> ModelConfig:
        """The model's config with the attention kernel that this mesh's devices will run.

        And with what `remat: dots` keeps, in host memory, where the layout says so.
        """
        model, layout = self.config.model, self.config.layout
        away = layout.offload == "activations" and model.remat == "dots"
        remat: Any = OFFLOADED if away else model.remat
        return dataclasses.replace(model, attention=self.attention_kernel[0], remat=remat)

    @cached_property
    def attention_kernel(self) -> tuple[AttentionKind, str | None]:
        """The kernel, and what speaks against cuDNN's."""
        return choose_kernel(self.config, self.mesh.devices.flat[0])

    @cached_property
    def form(self) -> TensorParallel:
        dot = choose_product(self.config.model.products, self.mesh.devices.flat[0])
        return make_form(self.config.layout, native=on_gpus(self.mesh), dot=dot)

    @cached_property
    def blueprint(self) -> Blueprint:
        def make(key: Array) -> GPT:
            return GPT(self.model, form=self.form, rngs=nnx.Rngs(key))

        layout = self.config.layout
        return Blueprint(make, Place(self.plan, layout.sizes)) if layout.pp > 1 else Blueprint(make)

    @cached_property
    def plan(self) -> Plan:
        """What each stage of the pipeline does at each tick."""
        return make_plan(self.config)

    @cached_property
    def passes(self) -> Passes:
        """How micro-batches go through the model."""
        if self.config.layout.pp > 1:
            return Pipelined(self.blueprint, self.model, self.plan)
        return Unpipelined(self.blueprint)

    @cached_property
    def infos(self) -> dict[str, ParamInfo]:
        return self.blueprint.infos

    @cached_property
    def zero(self) -> Zero:
        """What of the state is cut over data parallel devices."""
        layout, dtype = self.config.layout, jnp.dtype(self.model.dtype)
        copies = layout.offload == "optimizer"
        return Zero(layout.zero, self.infos, layout.sizes, dtype, copies)

    @property
    def stored(self) -> dict[str, Stored]:
        """How the state holds each parameter."""
        return self.zero.stored

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return adamw(self.config.optimizer, self.infos)

    @property
    def master_dtype(self) -> Any:
        """Precision of parameters, gradients' sums and optimizer."""
        return jnp.promote_types(self.model.dtype, jnp.float32)

    # ---- state ------------------------------------------------------------------------------

    @cached_property
    def states(self) -> States:
        """What a state is made of, and where it lies."""
        return States(
            self.stored,
            self.optimizer,
            self.mesh,
            dtype=self.master_dtype,
            model_dtype=self.model.dtype,
            memory=state_memory(self.config.layout),
        )

    @property
    def state_specs(self) -> State:
        return self.states.specs

    @property
    def abstract_state(self) -> State:
        """Shapes, precisions and shardings of the state, for compiling without it."""
        return self.states.abstract

    def canonical(self, params: Mapping[str, Array]) -> Params:
        """As the state holds parameters, or gradients -> canonical."""
        return {name: self.stored[name].canonical(x) for name, x in params.items()}

    @property
    def abstract_batch(self) -> Batch:
        shape = (self.config.train.global_batch_size, self.model.seq_length)
        x: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding)
        return dict.fromkeys(batch_fields(self.config), x)

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, BATCH_SPEC)

    @cached_property
    def token_order(self) -> np.ndarray:
        """Positions `[T]` in the order in which the devices of the ring hold them."""
        return self.form.ring.order(self.model.seq_length, self.config.layout.ring_size)

    def place(self, batch: Mapping[str, np.ndarray]) -> Batch:
        """A whole batch on the mesh, its tokens in the order of the text so far.

        Raises:
            UserError: it does not hold what the config needs, or in another shape.
        """
        check_batch(batch, self.config)
        ordered = {name: np.asarray(x)[:, self.token_order] for name, x in batch.items()}
        make = partial(jax.make_array_from_callback, sharding=self.batch_sharding)
        return {name: make(x.shape, data_callback=x.__getitem__) for name, x in ordered.items()}

    def init_state(self) -> State:
        """Step 0: the same numbers on every mesh."""
        params = self.blueprint.init(
            self.config.train.seed, mesh=self.mesh, dtype=self.master_dtype, stored=self.stored
        )
        return self.states.new(params)

    # ---- the step ---------------------------------------------------------------------------

    @cached_property
    def train_step(self) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """(state, batch) -> (state, metrics); the old state's memory is used again."""
        return jax.jit(
            lambda state, batch: self._step_on_mesh(state, batch)[:2],
            donate_argnums=0,
            compiler_options=compiler_options(self.config, self.mesh),
        )

    @cached_property
    def step_with_gradients(self) -> Callable[[State, Batch], tuple[State, Metrics, Params]]:
        """As `train_step`, and the gradients that it reduced; keeps the old state."""
        return jax.jit(self._step_on_mesh)

    @cached_property
    def eval_step(self) -> Callable[[Params, Batch], Metrics]:
        """(params, batch) -> loss_sum, in nats, and tokens, over the whole batch; no dropout."""
        return jax.jit(self._shard(self._evaluate, (self.state_specs["params"], BATCH_SPEC), P()))

    def _shard(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )

    @property
    def _step_on_mesh(self) -> Callable[[State, Batch], tuple[State, Metrics, Params]]:
        outs = (self.state_specs, P(), self.state_specs["params"])
        return self._shard(self._step, (self.state_specs, BATCH_SPEC), outs)

    def _step(self, state: State, batch: Batch) -> tuple[State, Metrics, Params]:
        scale = state["guard"]["scale"]
        params = self.states.brought(state["params"])
        found = self._gradients(params, batch, state["step"], scale=scale)
        loss, grads = unscaled(found, scale, self.model.dtype)
        norm = global_norm(grads, self.stored)
        rate = learning_rate(
            self.config.optimizer, step=state["step"], steps=self.config.train.steps
        )
        clipped = clip(grads, norm, self.config.optimizer.grad_clip)
        state = self.states.brought(state)
        direction, optimizer = self.optimizer.update(clipped, state["optimizer"], state["params"])
        params = {
            name: p - rate.astype(p.dtype) * direction[name] for name, p in state["params"].items()
        }
        new = {"params": params, "optimizer": optimizer}
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
        state, metrics = advance(state, new, metrics, self.config)
        return self.states.put_back(state), metrics, grads

    def _gradients(
        self, params: Params, batch: Batch, step: Array, *, scale: Array
    ) -> tuple[Array, Params]:
        """`scale` x the mean loss over all target tokens, and its gradients.

        They are reduced once, whatever M is.

        Parameters vary over the axes that cut tokens before the micro-batches run, so that their
        gradients are local sums until the end.
        """
        count = lax.psum(jnp.sum(batch["targets"] >= 0), BATCH_AXES).astype(self.master_dtype)
        micro, places = self._micro_batches(batch, self._seed(step))
        lent = self.zero.begin_step(self._varying(params))
        loss, grads = self.passes.gradients(lent, micro, places, scale / count)
        grads = self._reduce(self.zero.end_step(grads))
        return lax.psum(as_varying(loss, self._loss_axes), self._loss_axes), grads

    def _varying(self, params: Params) -> Params:
        return {name: as_varying(p, self._owed_axes(name)) for name, p in params.items()}

    def _owed_axes(self, name: str) -> tuple[str, ...]:
        """Axes over which a part's gradient is a partial sum: of those that cut tokens, and pp."""
        axes = (Axis.PP, *BATCH_AXES, *self.form.axes.tokens)
        return tuple(a for a in axes if a not in self.stored[name].axes)

    def _reduce(self, grads: Params) -> Params:
        """Owed sums made: one reduction for each set of axes."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in grads:
            groups.setdefault(self._owed_axes(name), []).append(name)
        reduced: Params = {}
        for axes, names in groups.items():
            reduced |= lax.psum({name: grads[name] for name in names}, axes)
        return {name: reduced[name] for name in grads}

    def _micro_batches(self, batch: Batch, seed: Array | None) -> tuple[Micro, Places]:
        """[B, ...] -> [M, B/M, ...], and where the tokens of all of them are."""
        parts, places = self.config.train.micro_batches, self._places(batch, seed)
        micro = jax.tree.map(
            lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]),
            Micro(batch, places.sample_B, places.segment_BCT),
        )
        return micro, places

    def _evaluate(self, params: Params, batch: Batch) -> Metrics:
        lent = self.zero.begin_step(self._varying(self.states.brought(params)), training=False)
        loss = self.passes.loss(lent, *self._micro_batches(batch, None))
        tokens = jnp.sum(batch["targets"] >= 0)
        return {
            "loss_sum": lax.psum(as_varying(loss, self._loss_axes), self._loss_axes),
            "tokens": lax.psum(tokens, BATCH_AXES),
        }

    @property
    def _loss_axes(self) -> tuple[str, ...]:
        """Axes that cut the tokens of the logits, and so the loss; of the stages one has it."""
        return (Axis.PP, *BATCH_AXES, *self.form.axes.logit_tokens)

    def _seed(self, step: Array) -> Array | None:
        """Two words that all dropout of a step is drawn from; None without dropout."""
        if self.model.dropout == 0:
            return None
        return jax.random.key_data(jax.random.fold_in(jax.random.key(self.config.train.seed), step))

    def _places(self, batch: Batch, seed: Array | None) -> Places:
        """Where this device's tokens lie in the global batch."""
        local_B = jnp.arange(batch["tokens"].shape[0], dtype=jnp.int32)
        sample_B = lax.axis_index(Axis.DP) * local_B.size + local_B
        check_fields(batch, self.config)
        segment_BCT = None
        if "segments" in batch:
            segment_BCT = self.form.ring.parts(lax.all_gather(batch["segments"], Axis.CP, axis=1))
        position_T = self.form.ring.positions_along(Axis.CP, batch["tokens"].shape[1])
        return Places(sample_B, position_T, seed, segment_BCT)
