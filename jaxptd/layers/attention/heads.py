"""The parts that self- and cross-attention share.

Letters: B batch, T query position, S key position, D model, N heads, K heads of keys and values,
H head size.
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.kernel import TAKEN, Dropout, Scores, Sites
from jaxptd.attention.xla import Xla
from jaxptd.config import ModelConfig
from jaxptd.layers.dropout import Places, fold, keep_mask
from jaxptd.layers.form import TensorParallel
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.layers.norm import HeadNorm
from jaxptd.params import Initialiser


class Heads(nnx.Module):
    """The parameters of multi-head attention, and what follows on queries, keys and values.

    joined: whether one product makes all three of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        form: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
        joined: bool,
    ) -> None:
        options, dim = config.block, form.axes.head_dim
        kv_heads, size = options.num_kv_heads, options.head_size
        self.unit = options.head_unit if dim else 1
        groups = kv_heads < config.num_heads
        self.gathers_kv = groups and not dim and form.padded(kv_heads, each=size) != kv_heads
        linear = partial(
            ColumnParallelLinear,
            config.hidden_size,
            form=form,
            rngs=rngs,
            unit=self.unit,
            bias=options.linear_bias != "none",
        )
        self.qkv = linear((3, kv_heads, size), shard_dim=1 + dim, parts=1) if joined else None
        self.q = None if joined else linear((config.num_heads, size), shard_dim=dim)
        kv_dim = 2 if self.gathers_kv else 1 + dim
        self.kv = None if joined else linear((2, kv_heads, size), shard_dim=kv_dim, parts=1)
        norm = partial(HeadNorm, size, options=options, form=form, rngs=rngs, unit=self.unit)
        self.q_norm = norm() if options.qk_norm else None
        self.k_norm = norm() if options.qk_norm else None
        self.out = RowParallelLinear(
            (config.num_heads, size),
            config.hidden_size,
            shard_dim=dim,
            unit=self.unit,
            form=form,
            rngs=rngs,
            bias=options.linear_bias == "all",
            init=init_out,
        )
        self.form, self.config = form, config

    @property
    def local_kv_heads(self) -> int:
        """Heads of keys and values that a device has in its cache."""
        if self.gathers_kv:
            return max(1, self.config.block.num_kv_heads // self.form.inner_devices)
        linear = self.qkv or self.kv
        assert linear is not None
        return linear.w.shape[-2]

    def local_keys_values(self, kv: Array) -> tuple[Array, Array]:
        """Keys and values of this device's heads, from those that it makes."""
        if self.gathers_kv:
            kv = self.form.axes.own_kv_heads(kv, self.config.block.head_size)
            kv = checkpoint_name(kv, TAKEN)
        k_BTKH, v_BTKH = jnp.moveaxis(kv, 2, 0)
        return k_BTKH, v_BTKH

    def whole(self, x_BTNH: Array) -> Array:
        """Whole heads, for attention with a cache."""
        return self.form.join_heads(x_BTNH, self.config.block.head_size)

    def attend_whole(
        self, q_BTNH: Array, k: Array, v: Array, *, sites: Sites, scores: Scores
    ) -> Array:
        """Attends with whole heads to all keys, without dropout."""
        o_BTNH, _ = Xla(Dropout(0.0, keep_mask)).fwd(q_BTNH, k, v, sites, scores=scores)
        return self.form.split_heads(o_BTNH.astype(q_BTNH.dtype), self.unit)

    def seed(self, places: Places, heads: int) -> Array | None:
        """Dropout seeds `[B, N, 2]`, one per sequence and head."""
        if places.seed is None:
            return None
        return fold(places.seed, places.sample_B[:, None], self.form.axes.local_heads(heads))
