"""The peer: the same GPT-2 as a JAX user would write it with plain `jax.jit` and sharding rules.

It uses no shard_map and no collectives: arrays are global, `with_sharding_constraint` sets the
sharding of activations wherever it changes, and XLA's partitioner finds out what has to move.
Parameters have the names and shapes of jaxptd's canonical form, so both programs start from the
same values. Loss, gradient norm and update must then be equal, which `benchmarks.peers.step` checks
before it measures.

Letters: B batch, T query position, S key position, D model, F hidden, N heads, H head size,
V vocabulary, L layers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.config import Config, ModelConfig
from jaxptd.mesh import Axis
from jaxptd.step.optimizer import learning_rate

Params = dict[str, Any]  # by canonical name; without scan_layers, "blocks" is a list of L dicts
Block = dict[str, Array]
State = dict[str, Any]
Batch = dict[str, Array]

# The dims of each parameter by letter, with C = 3 for q, k and v; a block's have a leading L. Dims
# V, N and F are sharded over tp.
DIMS = {
    "tokens.table": "VD",
    "positions.table": "TD",
    "norm.w": "D",
    "norm.b": "D",
    "blocks.attention_norm.w": "D",
    "blocks.attention_norm.b": "D",
    "blocks.attention.qkv.w": "DCNH",
    "blocks.attention.qkv.b": "CNH",
    "blocks.attention.out.w": "NHD",
    "blocks.attention.out.b": "D",
    "blocks.mlp_norm.w": "D",
    "blocks.mlp_norm.b": "D",
    "blocks.mlp.up.w": "DF",
    "blocks.mlp.up.b": "F",
    "blocks.mlp.down.w": "FD",
    "blocks.mlp.down.b": "D",
}
SHARDED = {"V": "vocab", "N": "heads", "F": "hidden"}
LOGICAL = {n.removeprefix("blocks."): tuple(map(SHARDED.get, dims)) for n, dims in DIMS.items()}
BLOCKS = "blocks."
NO_DECAY = ("norm.w", "norm.b", ".b")


@dataclasses.dataclass(frozen=True)
class Peer:
    """The training step of `config` on a mesh with the axes dp and tp.

    Args:
        config: without dropout, remat and micro-batches; the embedding is tied.
        mesh: from `jaxptd.mesh.make_mesh`.
    """

    config: Config
    mesh: Mesh

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    # ---- shardings --------------------------------------------------------------------------

    def _spec(self, *names: str | None) -> P:
        sequence = Axis.TP if self.config.layout.sequence_parallel else None
        rules = {
            "batch": Axis.DP,
            "sequence": sequence,  # of the residual stream
            "heads": Axis.TP,
            "hidden": Axis.TP,
            "vocab": Axis.TP,
            None: None,
        }
        return P(*(rules[name] for name in names))

    def _sharding(self, *names: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, self._spec(*names))

    def _lay(self, x: Array, *names: str | None) -> Array:
        return lax.with_sharding_constraint(x, self._sharding(*names))

    def _residual(self, x_BTD: Array) -> Array:
        return self._lay(x_BTD, "batch", "sequence", None)

    def _whole(self, x_BTD: Array) -> Array:
        """Gathers the sequence for the input of a matmul; the gradient is sharded again."""
        return self._lay(self._residual(x_BTD), "batch", None, None)

    # ---- the model --------------------------------------------------------------------------

    def _attention(self, p: Block, x_BTD: Array) -> Array:
        dtype = x_BTD.dtype
        qkv = jnp.einsum("BTD,DCNH->CBTNH", x_BTD, p["attention.qkv.w"].astype(dtype))
        qkv = qkv + p["attention.qkv.b"].astype(dtype)[:, None, None]
        q, k, v = (self._lay(x, "batch", None, "heads", None) for x in qkv)
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
        o_BTNH = self._lay(attend(q, k, v), "batch", None, "heads", None)
        y_BTD = jnp.einsum("BTNH,NHD->BTD", o_BTNH, p["attention.out.w"].astype(dtype))
        return self._residual(y_BTD) + p["attention.out.b"].astype(dtype)

    def _mlp(self, p: Block, x_BTD: Array) -> Array:
        dtype = x_BTD.dtype
        h_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, p["mlp.up.w"].astype(dtype))
        h_BTF = jax.nn.gelu(h_BTF + p["mlp.up.b"].astype(dtype), approximate=True)
        h_BTF = self._lay(h_BTF, "batch", None, "hidden")
        y_BTD = jnp.einsum("BTF,FD->BTD", h_BTF, p["mlp.down.w"].astype(dtype))
        return self._residual(y_BTD) + p["mlp.down.b"].astype(dtype)

    def _block(self, x_BTD: Array, p: Block) -> Array:
        h_BTD = _norm(x_BTD, p["attention_norm.w"], p["attention_norm.b"])
        x_BTD = x_BTD + self._attention(p, self._whole(h_BTD))
        h_BTD = _norm(x_BTD, p["mlp_norm.w"], p["mlp_norm.b"])
        return self._residual(x_BTD + self._mlp(p, self._whole(h_BTD)))

    def _blocks(self, x_BTD: Array, params: Params) -> Array:
        if self.model.scan_layers:
            stacked = {n.removeprefix(BLOCKS): p for n, p in params.items() if n.startswith(BLOCKS)}
            return lax.scan(lambda x, p: (self._block(x, p), None), x_BTD, stacked)[0]
        for p in params["blocks"]:
            x_BTD = self._block(x_BTD, p)
        return x_BTD

    def loss(self, params: Params, batch: Batch) -> Array:
        """The mean of -log probability over all tokens, nats."""
        dtype = self.model.dtype
        table_VD = params["tokens.table"].astype(dtype)
        x_BTD = self._lay(table_VD[batch["tokens"]], "batch", None, None)
        x_BTD = self._residual(x_BTD + params["positions.table"].astype(dtype))
        x_BTD = self._blocks(x_BTD, params)
        x_BTD = self._whole(_norm(x_BTD, params["norm.w"], params["norm.b"]))
        logits_BTV = self._lay(
            jnp.einsum("BTD,VD->BTV", x_BTD, table_VD), "batch", None, "vocab"
        ).astype(jnp.float32)
        # A comparison works with logits sharded over V; a gather of the target's logit would not.
        is_target_BTV = (
            lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2) == batch["targets"][..., None]
        )
        target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0), axis=-1)
        return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT)

    # ---- the step ---------------------------------------------------------------------------

    @cached_property
    def _optimizer(self) -> optax.GradientTransformation:
        c, steps = self.config.optimizer, self.config.train.steps
        adamw = optax.adamw(
            lambda count: learning_rate(c, step=count, steps=steps),
            b1=c.beta1,
            b2=c.beta2,
            eps=c.epsilon,
            weight_decay=c.weight_decay,
            mask=partial(jax.tree_util.tree_map_with_path, _decays),
        )
        return optax.chain(optax.clip_by_global_norm(c.grad_clip), adamw) if c.grad_clip else adamw

    def _step(self, state: State, batch: Batch) -> tuple[State, dict[str, Array]]:
        loss, grads = jax.value_and_grad(self.loss)(state["params"], batch)
        updates, optimizer = self._optimizer.update(grads, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return {"params": params, "optimizer": optimizer}, metrics

    @cached_property
    def train_step(self) -> Callable[[State, Batch], tuple[State, dict[str, Array]]]:
        """Makes (state, batch) -> (state, metrics); the new state reuses the old one's memory."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, self._sharding()))

    def arrange(self, canonical: Mapping[str, Any]) -> Params:
        """Arranges canonical parameters for this program: stacked, or one dict per layer."""
        if self.model.scan_layers:
            return dict(canonical)
        top = {n: p for n, p in canonical.items() if not n.startswith(BLOCKS)}
        stacked = {n.removeprefix(BLOCKS): p for n, p in canonical.items() if n.startswith(BLOCKS)}
        layers = range(self.model.num_layers)
        return {**top, "blocks": [{n: p[layer] for n, p in stacked.items()} for layer in layers]}

    def init_state(self, canonical: Mapping[str, Any]) -> State:
        """Makes the state of step 0 from these parameters, sharded over the mesh."""
        params = self.arrange({name: jnp.asarray(p) for name, p in canonical.items()})
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        return jax.device_put(self._new_state(params), shardings)

    def _new_state(self, params: Params) -> State:
        return {"params": params, "optimizer": self._optimizer.init(params)}

    @cached_property
    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state, to compile without allocating it."""
        shapes = jax.eval_shape(lambda: self.arrange(_zeros(self.model)))
        state = jax.eval_shape(self._new_state, shapes)
        return jax.tree_util.tree_map_with_path(self._describe, state)

    def _describe(self, path: Any, x: Any) -> jax.ShapeDtypeStruct:
        names = LOGICAL.get(_name(path), ())
        names = (None,) * (x.ndim - len(names)) + names  # a leading L, or a scalar of the optimizer
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(*names))

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.config.train.global_batch_size, self.model.seq_length)
        x = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._sharding("batch", None))
        return {"tokens": x, "targets": x}


def _norm(x_BTD: Array, w_D: Array, b_D: Array) -> Array:
    wide = x_BTD.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return (centred * lax.rsqrt(variance + 1e-5) * w_D + b_D).astype(x_BTD.dtype)


def _name(path: Any) -> str:
    """The name in `LOGICAL` of the parameter to which a leaf of the state belongs."""
    keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    return keys[-1].removeprefix(BLOCKS) if keys else ""


def _decays(path: Any, _: Any) -> bool:
    return not _name(path).endswith(NO_DECAY)


def _zeros(model: ModelConfig) -> dict[str, Array]:
    """Arrays with the canonical parameters' shapes, to be traced but not allocated."""
    size = {"V": model.vocab_size or 0, "T": model.seq_length, "D": model.hidden_size, "C": 3}
    size |= {"N": model.num_heads, "H": model.block.head_size, "F": model.mlp_size}
    return {
        name: jnp.zeros((model.num_layers,) * name.startswith(BLOCKS) + tuple(map(size.get, dims)))
        for name, dims in DIMS.items()
    }
