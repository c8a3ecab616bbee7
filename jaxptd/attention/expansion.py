"""Exchanges of attention that move keys and values, or smaller vectors from which both follow.

Most attention exchanges keys and values themselves. In latent attention both follow from a small
vector of each token, the same for all heads, by a matrix of which every device has its own heads.
So devices may exchange vectors, and each expands those that it visits: fewer bytes, but the matmul
runs on every device, and again in backward. The gradient of a vector returns to its owner, as those
of keys and values do; that of the matrix adds up where the matrix is, over all tokens that a
device's queries visit.

Letters: P parts, B batch, S key position, K heads of what is exchanged, N heads, R elements of a
latent vector, H head size.
Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

import abc
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.attention.ulysses import to_heads
from jaxptd.collectives import all_gather, local_block


class Expansion(abc.ABC):
    """Makes keys and values of what devices exchange; a pytree of the matrices for it.

    k and v are this device's, each `[B, S, K, H]` with an H of its own. Joined they are one array
    that moves, `[P, B, S, K, H]`.
    """

    @abc.abstractmethod
    def join(self, k: Array, v: Array) -> Array:
        """The array that moves."""

    @abc.abstractmethod
    def split(self, x: Array) -> tuple[Array, Array]:
        """Undoes `join`."""

    @abc.abstractmethod
    def heads(self, x: Array) -> Array:
        """Joined arrays -> keys and values of all heads, `[2, B, S, N, H]`."""

    @abc.abstractmethod
    def gradients(self, x: Array, dkv: Array) -> tuple[Array, Any]:
        """Gradients of `heads`: of x, and of the expansion, in the precision of `dkv`."""

    def expand(self, k: Array, v: Array) -> tuple[Array, Array]:
        """`heads` of arrays that are not joined."""
        k, v = self.heads(self.join(k, v))
        return k, v

    def contract(self, of: tuple[Array, Array], dk: Array, dv: Array) -> tuple[Array, Array, Any]:
        """Gradients of `expand`: of both arrays, and of the expansion."""
        dx, expansion = self.gradients(self.join(*of), jnp.stack((dk, dv)))
        return *self.split(dx), expansion

    # ---- devices that share heads in attention, and tokens elsewhere ----

    @abc.abstractmethod
    def all_tokens(self, k: Array, v: Array, axis: str) -> tuple[Array, Array]:
        """k and v for this device's share of the heads along `axis`, of all tokens there."""

    @abc.abstractmethod
    def of_heads(self, axis: str) -> "Expansion":
        """The expansion for this device's share of the heads along `axis`."""


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Unchanged(Expansion):
    """Keys and values move themselves."""

    def join(self, k: Array, v: Array) -> Array:
        return jnp.stack((k, v))

    def split(self, x: Array) -> tuple[Array, Array]:
        k, v = x
        return k, v

    def heads(self, x: Array) -> Array:
        return x

    def gradients(self, x: Array, dkv: Array) -> tuple[Array, Any]:
        return dkv, self

    def expand(self, k: Array, v: Array) -> tuple[Array, Array]:
        return k, v

    def contract(self, of: tuple[Array, Array], dk: Array, dv: Array) -> tuple[Array, Array, Any]:
        return dk, dv, self

    def all_tokens(self, k: Array, v: Array, axis: str) -> tuple[Array, Array]:
        """One all-to-all of both."""
        return self.split(to_heads(self.join(k, v), axis))

    def of_heads(self, axis: str) -> "Unchanged":
        return self


@partial(
    jax.tree_util.register_dataclass, data_fields=["w_RNH"], meta_fields=["nope_size", "head_size"]
)
@dataclasses.dataclass(frozen=True)
class FromLatents(Expansion):
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

    def heads(self, x: Array) -> Array:
        latent, shared = self.split(x)
        w_RNH = self.w_RNH.astype(x.dtype)
        made_BSNH = jnp.einsum("BSR,RNH->BSNH", latent[:, :, 0], w_RNH)
        nope_BSNH, v_BSNH = lax.split(made_BSNH, self._sizes, 3)
        shared = jnp.broadcast_to(shared, (*nope_BSNH.shape[:3], shared.shape[-1]))
        padding = self.head_size - v_BSNH.shape[-1]
        v_BSNH = jnp.pad(v_BSNH, [(0, 0)] * 3 + [(0, padding)])
        return jnp.stack((jnp.concatenate([nope_BSNH, shared], -1), v_BSNH))

    def gradients(self, x: Array, dkv: Array) -> tuple[Array, Any]:
        (dk, dv), (nope_size, value_size) = dkv, self._sizes
        dmade_BSNH = jnp.concatenate([dk[..., :nope_size], dv[..., :value_size]], -1)
        dmade_BSNH = dmade_BSNH.astype(x.dtype)
        product = partial(jnp.einsum, preferred_element_type=dkv.dtype)
        dlatent = product("BSNH,RNH->BSR", dmade_BSNH, self.w_RNH.astype(x.dtype))
        dw_RNH = product("BSR,BSNH->RNH", self.split(x)[0][:, :, 0], dmade_BSNH)
        dshared = dk[..., nope_size:].sum(2, keepdims=True)
        return self.join(dlatent[:, :, None], dshared), dataclasses.replace(self, w_RNH=dw_RNH)

    def all_tokens(self, k: Array, v: Array, axis: str) -> tuple[Array, Array]:
        """One all-gather: heads share vectors."""
        return self.split(all_gather(self.join(k, v), axis, 2))

    def of_heads(self, axis: str) -> "FromLatents":
        return dataclasses.replace(self, w_RNH=local_block(self.w_RNH, axis, 1))

    @property
    def _sizes(self) -> tuple[int, int]:
        """Elements of a head in what the matrix yields: of keys and of values."""
        return self.nope_size, self.w_RNH.shape[-1] - self.nope_size
