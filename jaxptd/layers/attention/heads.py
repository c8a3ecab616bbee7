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
from jaxptd.layers.form import TensorParallel, separated
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.layers.norm import HeadNorm
from jaxptd.matmul.padding import HeadCounts, padded_heads
from jaxptd.params import Initialiser


def counts_of(config: ModelConfig, form: TensorParallel) -> HeadCounts:
    """Numbers of heads, padded where each device has whole ones."""
    heads, options = config.num_heads, config.block
    if form.axes.head_dim:
        return HeadCounts(heads, options.num_kv_heads)
    padded = partial(form.padded, each=options.head_size)
    return padded_heads(heads, options.num_kv_heads, devices=form.inner_devices, padded=padded)


class Heads(nnx.Module):
    """The parameters of multi-head attention, and what follows on queries, keys and values.

    joined: whether one parameter has the matrices of all three.
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
        queries, keys, self.gathers_kv = counts_of(config, form)
        if dim:
            queries = keys = form.padded_head(size, self.unit)
        linear = partial(
            ColumnParallelLinear,
            config.hidden_size,
            form=form,
            rngs=rngs,
            bias=options.linear_bias != "none",
        )
        makes_keys = partial(linear, shard_dim=1 + dim, padded=keys, parts=1)
        if self.gathers_kv:
            makes_keys = partial(linear, shard_dim=2, parts=1)
        shape = (config.num_heads, size)
        self.qkv = makes_keys((3, *shape)) if joined else None
        self.q = None if joined else linear(shape, shard_dim=dim, padded=queries)
        self.kv = None if joined else makes_keys((2, kv_heads, size))
        norm = partial(HeadNorm, size, options=options, form=form, rngs=rngs, unit=self.unit)
        self.q_norm = norm() if options.qk_norm else None
        self.k_norm = norm() if options.qk_norm else None
        self.out = RowParallelLinear(
            shape,
            config.hidden_size,
            shard_dim=dim,
            padded=queries,
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

    def local_keys_values(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Keys and values of this device's heads, from those that it makes."""
        if self.gathers_kv:
            kv = self.form.axes.own_kv_heads(jnp.stack([k, v], 2), self.config.block.head_size)
            k, v = separated(checkpoint_name(kv, TAKEN), 2)
        return k, v

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
