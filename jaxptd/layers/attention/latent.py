"""Multi-head latent attention: heads computed from a small latent vector of each token.

    c_q = norm(x W)           c_kv, k_rope = split(x W')        c_kv = norm(c_kv)
    q = c_q W_q               k_nope, v = split(c_kv W_kv)
    k = [k_nope | rotated k_rope, the same for all heads], q with its last elements rotated

What a device computes of latent vectors is for its tokens of the residual stream, with whole
matrices; what follows is for its heads. So, where a layer gathers all of x elsewhere, it gathers
latent vectors here. Devices that share a sequence also exchange latent vectors. Each expands those
it visits into keys and values for its own heads.

W_kv = [W_k | W_v] may also multiply queries and attention's output (`layout.latent_products`):

    q' = [q_nope W_k^T | q_rope]      k = [c_kv | rotated k_rope]      o = (sum of p c_kv) W_v

The same scores, and one key of R + rope elements for all heads, whose first R are the value.

Letters: B batch, T query position, S key position, D model, N heads, H head size of queries and
keys, R a latent vector's elements.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.attention.attend import UNCHANGED, Expansion
from jaxptd.collectives import alike, all_gather, local_block
from jaxptd.config import ModelConfig
from jaxptd.config.block import rotations
from jaxptd.layers.attention.self_attention import Cache, SelfAttention, of_layer, rotate
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.linear import INIT, ColumnParallelLinear, declare
from jaxptd.layers.norm import LatentNorm
from jaxptd.layers.tensor_parallel import TensorParallel, block_along
from jaxptd.params import Initialiser
from jaxptd.parts.latent_attention import Compressed, LatentAttentionShape
from jaxptd.remat import SAVED_MATMUL_OUT


class Compression(nnx.Module):
    """`x[B, T, D]` -> a latent vector `[B, T, R]` and numbers beside it, for the same tokens.

    Every device has the whole matrix, `w[D, R + beside]`, and no collective is needed.

    Args:
        shape: describes the parameters.
        config: names the norm.
        tensor_parallel: how tokens are sharded.
        rngs: random keys of the initial parameters.
    """

    w: nnx.Param

    def __init__(
        self,
        shape: Compressed,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        declare(self, shape.matrix(), rngs, w=INIT)
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        self.norm = LatentNorm(shape.rank, options=config.block, **own)
        self.sizes, self.tensor_parallel = (shape.rank, shape.beside), tensor_parallel

    def __call__(self, x_BTD: Array) -> tuple[Array, Array]:
        """(the normalised vector, what is beside it)."""
        both = self.tensor_parallel.square(x_BTD, self.w[...])
        latent_BTR, beside = lax.split(both, self.sizes, 2)
        return self.norm(checkpoint_name(latent_BTR, SAVED_MATMUL_OUT)), beside


# ---- what devices exchange instead of keys and values --------------------------------------------


class _OfAllHeads(Expansion):
    """k and v that all heads share: one array moves."""

    def all_tokens(self, k: Array, v: Array, axis: str) -> tuple[Array, Array]:
        """One all-gather: heads share vectors."""
        return self.split(all_gather(self.join(k, v), axis, 2))


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Latents(_OfAllHeads):
    """Latent vectors with the rotated key beside them are the keys and the values of all heads.

    k is both, `[B, S, 1, R + rope]`, and v has no elements. The last rope elements of attention's
    output are sums of rotated keys, which nothing needs; the layer cuts them off.
    """

    def join(self, k: Array, v: Array) -> Array:
        return k[None]

    def split(self, x: Array) -> tuple[Array, Array]:
        return x[0], x[0, ..., :0]

    def expand(self, k: Array, v: Array) -> tuple[Array, Array]:
        return k, k

    def heads(self, x: Array) -> Array:
        return jnp.concatenate([x, x])

    def gradients(self, x: Array, dkv: Array) -> tuple[Array, Any]:
        return dkv.sum(0, keepdims=True), self


@partial(
    jax.tree_util.register_dataclass, data_fields=["w_RNH"], meta_fields=["nope_size", "head_size"]
)
@dataclasses.dataclass(frozen=True)
class FromLatents(_OfAllHeads):
    """Latent vectors c move, and with them the part of a token's key that all heads share.

        keys = [c W_k | shared]        values = c W_v, padded to the size of keys

    k is c, `[B, S, 1, R]`, and v the shared part, `[B, S, 1, H]`.

    Args:
        w_RNH: W_k and W_v of this device's heads, side by side.
        nope_size: elements of a head that W_k yields.
        head_size: elements of a key, with the shared part.
    """

    w_RNH: Array
    nope_size: int
    head_size: int

    def join(self, k: Array, v: Array) -> Array:
        return jnp.concatenate([k, v], -1)[None]

    def split(self, x: Array) -> tuple[Array, Array]:
        rank, whole = self.w_RNH.shape[0], x.shape[-1]
        latent, shared = lax.split(x[0], (rank, whole - rank), 3)
        return latent, shared

    def expand(self, k: Array, v: Array) -> tuple[Array, Array]:
        w_RNH = self.w_RNH.astype(k.dtype)
        made_BSNH = jnp.einsum("BSR,RNH->BSNH", k[:, :, 0], w_RNH)
        nope_BSNH, v_BSNH = lax.split(made_BSNH, self._sizes, 3)
        shared = jnp.broadcast_to(v, (*nope_BSNH.shape[:3], v.shape[-1]))
        padding = self.head_size - v_BSNH.shape[-1]
        v_BSNH = jnp.pad(v_BSNH, [(0, 0)] * 3 + [(0, padding)])
        return jnp.concatenate([nope_BSNH, shared], -1), v_BSNH

    def heads(self, x: Array) -> Array:
        return jnp.stack(self.expand(*self.split(x)))

    def gradients(self, x: Array, dkv: Array) -> tuple[Array, Any]:
        (dk, dv), (nope_size, value_size) = dkv, self._sizes
        dmade_BSNH = jnp.concatenate([dk[..., :nope_size], dv[..., :value_size]], -1)
        dmade_BSNH = dmade_BSNH.astype(x.dtype)
        product = partial(jnp.einsum, preferred_element_type=dkv.dtype)
        dlatent = product("BSNH,RNH->BSR", dmade_BSNH, self.w_RNH.astype(x.dtype))
        dw_RNH = product("BSR,BSNH->RNH", self.split(x)[0][:, :, 0], dmade_BSNH)
        dshared = dk[..., nope_size:].sum(2, keepdims=True)
        return self.join(dlatent[:, :, None], dshared), dataclasses.replace(self, w_RNH=dw_RNH)

    def of_heads(self, axis: str) -> "FromLatents":
        return dataclasses.replace(self, w_RNH=local_block(self.w_RNH, axis, 1))

    @property
    def _sizes(self) -> tuple[int, int]:
        """Elements of a head in what the matrix yields: of keys and of values."""
        return self.nope_size, self.w_RNH.shape[-1] - self.nope_size


# ---- the matmuls of queries and of attention's output --------------------------------------------


class _Columns(NamedTuple):
    """The columns of each head of W_kv that yield keys, or values."""

    first: int
    size: int

    def of(self, w_RNH: Array) -> Array:
        return lax.slice_in_dim(w_RNH, self.first, self.first + self.size, axis=2)

    def fill(self, w_RNH: Array, like: Array) -> Array:
        """A gradient of these columns as one of the whole matrix."""
        behind = like.shape[2] - self.first - self.size
        return jnp.pad(w_RNH, [(0, 0), (0, 0), (self.first, behind)])


def to_latents(x_BTNH: Array, w_RNH: Array, columns: _Columns) -> Array:
    """x W^T with a head's columns of W: `[B, T, N, H]` -> `[B, T, N, R]`.

    As in `matmul`, backward casts and cuts the matrix again, so that a scan saves no copy of it.
    """
    return _to_latents(*alike(x_BTNH, w_RNH), columns)


def from_latents(x_BTNR: Array, w_RNH: Array, columns: _Columns) -> Array:
    """x W of the first R elements of x: `[B, T, N, R ..]` -> `[B, T, N, H]`."""
    return _from_latents(*alike(x_BTNR, w_RNH), columns)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _to_latents(x_BTNH: Array, w_RNH: Array, columns: _Columns) -> Array:
    return jnp.einsum("BTNH,RNH->BTNR", x_BTNH, columns.of(w_RNH).astype(x_BTNH.dtype))


def _to_latents_bwd(
    columns: _Columns, saved: tuple[Array, Array], dy_BTNR: Array
) -> tuple[Array, Array]:
    x_BTNH, w_RNH = saved
    w = columns.of(w_RNH).astype(dy_BTNR.dtype)
    return jnp.einsum("BTNR,RNH->BTNH", dy_BTNR, w), _matrix(dy_BTNR, x_BTNH, w_RNH, columns)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _from_latents(x_BTNR: Array, w_RNH: Array, columns: _Columns) -> Array:
    latent_BTNR = x_BTNR[..., : w_RNH.shape[0]]
    return jnp.einsum("BTNR,RNH->BTNH", latent_BTNR, columns.of(w_RNH).astype(x_BTNR.dtype))


def _from_latents_bwd(
    columns: _Columns, saved: tuple[Array, Array], dy_BTNH: Array
) -> tuple[Array, Array]:
    x_BTNR, w_RNH = saved
    rank, w = w_RNH.shape[0], columns.of(w_RNH).astype(dy_BTNH.dtype)
    dx_BTNR = jnp.einsum("BTNH,RNH->BTNR", dy_BTNH, w)
    dx_BTNR = jnp.pad(dx_BTNR, [(0, 0)] * 3 + [(0, x_BTNR.shape[3] - rank)])
    return dx_BTNR, _matrix(x_BTNR[..., :rank], dy_BTNH, w_RNH, columns)


def _matrix(x_BTNR: Array, y_BTNH: Array, w_RNH: Array, columns: _Columns) -> Array:
    """The gradient of W from one factor and the other's gradient, summed in its precision."""
    product = partial(jnp.einsum, preferred_element_type=w_RNH.dtype)
    return columns.fill(product("BTNR,BTNH->RNH", x_BTNR, y_BTNH), w_RNH)


_to_latents.defvjp(lambda x, w, columns: (_to_latents(x, w, columns), (x, w)), _to_latents_bwd)
_from_latents.defvjp(
    lambda x, w, columns: (_from_latents(x, w, columns), (x, w)), _from_latents_bwd
)


# ---- the layer -----------------------------------------------------------------------------------


class LatentAttention(SelfAttention):
    """Multi-head latent attention, causal.

    Values are padded with zeros to the width of keys, because kernels take both alike. Devices that
    share a sequence exchange latent vectors, or keys and values (`layout.latent_exchange`).
    With absorbed products, and in generation, whose cache has latent vectors, W_kv is multiplied
    with queries and with attention's output, so that one key of R + rope elements serves all heads.

    Args:
        shape: describes the parameters.
        config: names the kernel and the scores.
        tensor_parallel: how tokens and matrices are sharded.
        rngs: random keys of the initial parameters.
        init_out: initialiser of the output projection.
    """

    kv_latent: Compression
    kv_up: ColumnParallelLinear
    q_latent: Compression | None = None  # and q_up, or q
    q_up: ColumnParallelLinear | None = None

    def __init__(
        self,
        shape: LatentAttentionShape,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        init_out: Initialiser,
    ) -> None:
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs}
        for name, each in shape.compressed.items():
            setattr(self, name, Compression(each, config, **own))
        super().__init__(shape, config, init_out=init_out, **own)
        self.shape = shape

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """One latent vector and one rotated key of a token, for all heads."""
        return (1, self.shape.kv_rank), (1, self.shape.rope_size)

    @jax.named_scope("attention")
    def __call__(
        self,
        x_BTD: Array,
        token_info: TokenInfo,
        cache: Cache | None,
        *,
        bias_NR: Array | None = None,
    ) -> tuple[Array, Cache | None]:
        """Maps the residual stream to attention's output, as `SelfAttention` does.

        Args:
            x_BTD: the residual stream, sharded as it is there; so is the output.
            token_info: its tokens, and the seed for dropout of this layer's probabilities.
            cache: latent vectors and rotated keys of the tokens before these, or None.
            bias_NR: as in `SelfAttention`.
        """
        q_BTNH = self._queries(x_BTD, token_info)
        latent_BTR, rope_BT1H = self._latent(x_BTD, token_info)
        every = self.windowed
        windowed = None if every is None else of_layer(np.array(every), token_info)
        if cache is None and self.tensor_parallel.ring.absorbs:
            o_BTNH = self._absorbed(q_BTNH, latent_BTR, rope_BT1H, token_info, bias_NR, windowed)
        elif cache is None:
            kv, expansion = self._exchanged(latent_BTR, rope_BT1H)
            o_BTNH = self._attend(q_BTNH, *kv, token_info, bias_NR, windowed, expansion)
            o_BTNH = o_BTNH[..., : self.shape.value_size]
        else:
            cache = cache.append(latent_BTR[:, :, None], rope_BT1H)
            o_BTNH = self._attend_latent(q_BTNH, cache, token_info, bias_NR, windowed)
        return self.out(o_BTNH), cache

    def _queries(self, x_BTD: Array, token_info: TokenInfo) -> Array:
        """The queries of this device's heads, their last elements rotated."""
        if self.q_latent is None or self.q_up is None:
            assert self.q is not None
            q_BTNH = self.q(x_BTD)
        else:
            q_BTNH = self.q_up(self.q_latent(x_BTD)[0])
        nope_BTNH, rope_BTNH = lax.split(q_BTNH, self._q_sizes, 3)
        rope_BTNH = self._rotated(rope_BTNH, token_info.position_T, token_info)
        return jnp.concatenate([nope_BTNH, rope_BTNH], -1)

    def _latent(self, x_BTD: Array, token_info: TokenInfo) -> tuple[Array, Array]:
        """The latent vector of keys and values, and the rotated key, of the stream's own tokens."""
        latent_BTR, rope_BTH = self.kv_latent(x_BTD)
        tokens = self.tensor_parallel.axes.tokens
        position_T = block_along(token_info.position_T, tokens, -1)
        return latent_BTR, self._rotated(rope_BTH[:, :, None], position_T, token_info)

    def _rotated(self, x_BTNH: Array, position_T: Array, token_info: TokenInfo) -> Array:
        """The part of queries or keys that positions rotate, rotated."""
        turns, length = (of_layer(each, token_info) for each in rotations(self.config))
        number_H = jnp.arange(self.shape.rope_size, dtype=jnp.int32)
        return rotate(x_BTNH, position_T, number_H, turns=turns, length=length)

    def _exchanged(
        self, latent_BTR: Array, rope_BT1H: Array
    ) -> tuple[tuple[Array, Array], Expansion]:
        """Keys and values, or the smaller arrays that they are made of, for attention."""
        if not self.tensor_parallel.ring.latents:
            return self._keys_values(latent_BTR, rope_BT1H), UNCHANGED
        both_BTR, shape = self._vectors(latent_BTR, rope_BT1H), self.shape
        expansion = FromLatents(self.kv_up.w[...], shape.nope_size, shape.head_size)
        return expansion.split(both_BTR[None]), expansion

    def _vectors(self, latent_BTR: Array, rope_BT1H: Array) -> Array:
        """Latent vectors with the rotated keys beside them, of all tokens, for a device's heads."""
        both_BTR = jnp.concatenate([latent_BTR[:, :, None], rope_BT1H], -1)
        return checkpoint_name(self.tensor_parallel.axes.for_heads(both_BTR), SAVED_MATMUL_OUT)

    def _keys_values(self, latent_BTR: Array, rope_BT1H: Array) -> tuple[Array, Array]:
        """Keys and padded values of this device's heads, of all tokens."""
        nope_BTNH, v_BTNH = lax.split(self.kv_up(latent_BTR), self._kv_sizes, 3)
        rope_BT1H = checkpoint_name(
            self.tensor_parallel.axes.for_heads(rope_BT1H), SAVED_MATMUL_OUT
        )
        rope_BTNH = jnp.broadcast_to(rope_BT1H, (*nope_BTNH.shape[:3], self.shape.rope_size))
        padding = self.shape.head_size - self.shape.value_size
        v_BTNH = jnp.pad(v_BTNH, [(0, 0)] * 3 + [(0, padding)])
        return jnp.concatenate([nope_BTNH, rope_BTNH], -1), v_BTNH

    def _absorbed(
        self,
        q_BTNH: Array,
        latent_BTR: Array,
        rope_BT1H: Array,
        token_info: TokenInfo,
        bias_NR: Array | None,
        windowed: Array | None,
    ) -> Array:
        """Attends to latent vectors, which devices that share a sequence exchange."""
        query, expansion = self._on_latents(q_BTNH), Latents()
        kv = expansion.split(self._vectors(latent_BTR, rope_BT1H)[None])
        return self._of_values(self._attend(query, *kv, token_info, bias_NR, windowed, expansion))

    def _attend_latent(
        self,
        q_BTNH: Array,
        cache: Cache,
        token_info: TokenInfo,
        bias_NR: Array | None,
        windowed: Array | None,
    ) -> Array:
        """Attends to cached vectors: a sum of them, weighted by q W_k^T c_kv, times W_v."""
        key = jnp.concatenate([cache.k, cache.v], -1)
        query, both = self._on_latents(q_BTNH), cache._replace(k=key, v=key)
        return self._of_values(self._attend_cache(query, both, token_info, bias_NR, windowed))

    def _on_latents(self, q_BTNH: Array) -> Array:
        """Queries for latent vectors with the rotated key beside them: `[B, T, N, R + rope]`."""
        nope_BTNH, rope_BTNH = lax.split(q_BTNH, self._q_sizes, 3)
        columns = _Columns(0, self.shape.nope_size)
        to_latent_BTNR = to_latents(nope_BTNH, self.kv_up.w[...], columns)
        return jnp.concatenate([to_latent_BTNR, rope_BTNH], -1)

    def _of_values(self, o_BTNR: Array) -> Array:
        """The output of each head from its sum of latent vectors, `[B, T, N, R + rope]`."""
        columns = _Columns(self.shape.nope_size, self.shape.value_size)
        return from_latents(o_BTNR, self.kv_up.w[...], columns)

    @property
    def _q_sizes(self) -> tuple[int, int]:
        """Elements of a head of queries: those without positions, and those that are rotated."""
        return self.shape.nope_size, self.shape.rope_size

    @property
    def _kv_sizes(self) -> tuple[int, int]:
        """Elements of a head in what W_kv yields: of keys and of values."""
        return self.shape.nope_size, self.shape.value_size
