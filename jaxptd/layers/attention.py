"""Self-attention with heads cut over devices.

Letters: B batch, T query position, S key position, D model, N heads, H head size.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jaxptd.config import ModelConfig
from jaxptd.flash import Dropout, Sites, attend_cudnn, attend_xla
from jaxptd.layers.dropout import Places, fold, kept
from jaxptd.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.params import Initialiser


class Cache(NamedTuple):
    """Keys and values of the tokens so far: k, v `[B, S, N, H]`, S the longest; used: how many."""

    k: Array
    v: Array
    used: Array

    def append(self, k_BTNH: Array, v_BTNH: Array) -> "Cache":
        put = partial(lax.dynamic_update_slice_in_dim, start_index=self.used, axis=1)
        return Cache(put(self.k, k_BTNH), put(self.v, v_BTNH), self.used + k_BTNH.shape[1])


class SelfAttention(nnx.Module):
    """Causal multi-head attention; Q, K and V come from one product, `[D, 3, N, H]`, cut over N.

    Each device holds whole heads, so scores, softmax, dropout and context move nothing.
    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    def __init__(
        self, config: ModelConfig, *, form: TensorParallel, rngs: nnx.Rngs, init_out: Initialiser
    ) -> None:
        heads = (config.num_heads, config.head_size)
        self.qkv = ColumnParallelLinear(
            config.hidden_size, (3, *heads), cut=1, form=form, rngs=rngs
        )
        self.out = RowParallelLinear(heads, config.hidden_size, form=form, rngs=rngs, init=init_out)
        self.form, self.config = form, config

    def __call__(
        self, x_BTD: Array, places: Places, cache: Cache | None
    ) -> tuple[Array, Cache | None]:
        """x, as the residual stream has it, -> the same; and the cache, with x's keys and values.

        Args:
            x_BTD: the residual stream.
            places: where its tokens are; its seed is that of this layer's probabilities.
            cache: keys and values before these, or None.
        """
        q_BTNH, k_BTNH, v_BTNH = jnp.moveaxis(self.qkv(x_BTD), 2, 0)
        if cache is None:
            o_BTNH = self._attend(q_BTNH, k_BTNH, v_BTNH, places)
        else:
            cache = cache.append(k_BTNH, v_BTNH)
            o_BTNH = self._attend_xla(q_BTNH, cache.k, cache.v, places)
        return self.out(o_BTNH), cache

    def _attend(self, q_BTNH: Array, k_BTNH: Array, v_BTNH: Array, places: Places) -> Array:
        attend = (
            attend_cudnn
            if self.config.attention == "cudnn"
            else partial(self._attend_xla, places=places)
        )
        if self.config.remat == "attention":
            attend = jax.checkpoint(attend, prevent_cse=not self.config.scan_layers)
        return attend(q_BTNH, k_BTNH, v_BTNH)

    def _attend_xla(self, q_BTNH: Array, k_BSNH: Array, v_BSNH: Array, places: Places) -> Array:
        key_S = places.position_T
        if k_BSNH.shape[1] != q_BTNH.shape[1]:  # a cache: keys from the start of the text
            key_S = jnp.arange(k_BSNH.shape[1], dtype=jnp.int32)
        seed_BN2 = None
        if places.seed is not None:
            head_N = self.form.own_heads(q_BTNH.shape[2])
            seed_BN2 = fold(places.seed, places.sample_B[:, None], head_N)
        sites = Sites(places.position_T, key_S, seed_BN2)
        return attend_xla(q_BTNH, k_BSNH, v_BSNH, sites, Dropout(self.config.dropout, kept))
