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

from jaxptd.batch import BATCH_AXES, BATCH_SPEC, Batch, batch_fields, check_batch, check_fields
from jaxptd.collectives import as_varying
from jaxptd.config import AttentionKind, Config, ModelConfig
from jaxptd.layers.attention import choose_kernel
from jaxptd.layers.dropout import Places
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.tensor_parallel import make_form
from jaxptd.mesh import Axis, on_gpus
from jaxptd.models.gpt import GPT
from jaxptd.optimizer import adamw, clip, global_norm, learning_rate
from jaxptd.params import Blueprint, ParamInfo, Params
from jaxptd.passes import Micro, Passes, Pipelined, Place, Whole, make_plan
from jaxptd.pipeline.plan import Plan

State = dict[str, Any]  # params: Params, optimizer: optax's, step: int32
Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config compiles to on a mesh. Methods that begin with `_` run inside the shard_map."""

    config: Config
    mesh: Mesh

    @cached_property
    def model(self) -> ModelConfig:
        """The model's config with the attention kernel that this mesh's devices will run."""
        return dataclasses.replace(self.config.model, attention=self.attention_kernel[0])

    @cached_property
    def attention_kernel(self) -> tuple[AttentionKind, str | None]:
        """The kernel, and what speaks against cuDNN's."""
        return choose_kernel(self.config, self.mesh.devices.flat[0])

    @cached_property
    def form(self) -> TensorParallel:
        return make_form(self.config.layout, native=on_gpus(self.mesh))

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
        return Whole(self.blueprint)

    @cached_property
    def infos(self) -> dict[str, ParamInfo]:
        return self.blueprint.infos

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return adamw(self.config.optimizer, self.infos)

    @property
    def master_dtype(self) -> Any:
        """Precision of parameters, gradients' sums and optimizer."""
        return jnp.promote_types(self.model.dtype, jnp.float32)

    # ---- state ------------------------------------------------------------------------------

    def map_state(
        self, fn: Callable[[Any, ParamInfo], Any], state: State, other: Callable[[Any], Any]
    ) -> State:
        """`fn(leaf, info)` on every leaf shaped as a parameter, `other(leaf)` on the rest."""
        params = {name: fn(x, self.infos[name]) for name, x in state["params"].items()}
        optimizer = optax.tree_map_params(
            self.optimizer, fn, state["optimizer"], self.infos, transform_non_params=other
        )
        return {"params": params, "optimizer": optimizer, "step": other(state["step"])}

    def _new_state(self, params: Params) -> State:
        return {
            "params": params,
            "optimizer": self.optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    @cached_property
    def _shapes(self) -> State:
        shapes: Any = {
            n: jax.ShapeDtypeStruct(info.held, self.master_dtype) for n, info in self.infos.items()
        }
        return jax.eval_shape(self._new_state, shapes)

    @cached_property
    def state_specs(self) -> State:
        return self.map_state(lambda _, info: info.spec, self._shapes, lambda _: P())

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, precisions and shardings of the state, for compiling without it."""
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            self._shapes,
            self.state_specs,
        )

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
            self.config.train.seed, mesh=self.mesh, dtype=self.master_dtype
        )
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        return jax.jit(self._new_state, out_shardings=shardings, donate_argnums=0)(params)

    # ---- the step ---------------------------------------------------------------------------

    @cached_property
    def train_step(self) -> Callable[[State, Batch], tuple[State, Metrics]]:
        """(state, batch) -> (state, metrics); the old state's memory is used again."""
        return jax.jit(
            lambda state, batch: self._step_on_mesh(state, batch)[:2],
            donate_argnums=0,
            compiler_options=self._compiler_options,
        )

    @property
    def _compiler_options(self) -> dict[str, Any] | None:
        """Two collectives at a time, where XLA for GPUs would schedule one and wait for the second.

        Backward of a ring sends keys and values and the sums they bring home; products on a grid
        send along row and along col. Of the training step only: an evaluation is short.
        """
        layout = self.config.layout
        if not on_gpus(self.mesh) or (layout.ring_size < 3 and layout.row * layout.col == 1):
            return None
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}

    @cached_property
    def step_with_gradients(self) -> Callable[[State, Batch], tuple[State, Metrics, Params]]:
        """As `train_step`, and the gradients that it reduced; keeps the old state."""
        return jax.jit(self._step_on_mesh)

    @cached_property
    def eval_step(self) -> Callable[[Params, Batch], Metrics]:
        """(params, batch) -> loss_sum, in nats, and tokens, over the whole batch; no dropout."""
        return jax.jit(self._shard(self._evaluate, (self.blueprint.specs, BATCH_SPEC), P()))

    def _shard(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )

    @property
    def _step_on_mesh(self) -> Callable[[State, Batch], tuple[State, Metrics, Params]]:
        outs = (self.state_specs, P(), self.blueprint.specs)
        return self._shard(self._step, (self.state_specs, BATCH_SPEC), outs)

    def _step(self, state: State, batch: Batch) -> tuple[State, Metrics, Params]:
        loss, grads = self._gradients(state["params"], batch, state["step"])
        norm = global_norm(grads, self.infos)
        rate = learning_rate(
            self.config.optimizer, step=state["step"], steps=self.config.train.steps
        )
        clipped = clip(grads, norm, self.config.optimizer.grad_clip)
        direction, optimizer = self.optimizer.update(clipped, state["optimizer"], state["params"])
        params = {
            name: p - rate.astype(p.dtype) * direction[name] for name, p in state["params"].items()
        }
        state = {"params": params, "optimizer": optimizer, "step": state["step"] + 1}
        return state, {"loss": loss, "grad_norm": norm, "learning_rate": rate}, grads

    def _gradients(self, params: Params, batch: Batch, step: Array) -> tuple[Array, Params]:
        """The mean loss over all target tokens, and its gradients, reduced once whatever M is.

        Parameters vary over the axes that cut tokens before the micro-batches run, so that their
        gradients are local sums until the end.
        """
        count = lax.psum(jnp.sum(batch["targets"] >= 0), BATCH_AXES).astype(self.master_dtype)
        micro, places = self._micro_batches(batch, self._seed(step))
        loss, grads = self.passes.gradients(self._varying(params), micro, places, 1 / count)
        return lax.psum(as_varying(loss, self._loss_axes), self._loss_axes), self._reduce(grads)

    def _varying(self, params: Params) -> Params:
        return {name: as_varying(p, self._owed_axes(name)) for name, p in params.items()}

    def _owed_axes(self, name: str) -> tuple[str, ...]:
        """Axes over which a device's gradient is a partial sum: those that cut tokens, and pp."""
        axes = (Axis.PP, *BATCH_AXES, *self.form.token_axes)
        return tuple(a for a in axes if a not in self.infos[name].axes)

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
        loss = self.passes.loss(self._varying(params), *self._micro_batches(batch, None))
        tokens = jnp.sum(batch["targets"] >= 0)
        return {
            "loss_sum": lax.psum(as_varying(loss, self._loss_axes), self._loss_axes),
            "tokens": lax.psum(tokens, BATCH_AXES),
        }

    @property
    def _loss_axes(self) -> tuple[str, ...]:
        """Axes that cut the tokens of the logits, and so the loss; of the stages one has it."""
        return (Axis.PP, *BATCH_AXES, *self.form.logit_axes)

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
