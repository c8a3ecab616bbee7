"""Groups of query heads that share keys and values, as rows of the same scores.

The queries of a group's heads follow one after the other, so that one product makes all their
scores. `Rows` is all that an attention needs which makes whole rows of scores at once.

Letters: B batch, T query position, S key position, N heads, K heads of keys and values, H head
size, G query heads of a kv head.
Source: Ainslie et al., arXiv 2305.13245.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxptd.attention.bias import add_bias
from jaxptd.attention.kernel import KEPT, Dropout, Lengths, Scores, Sites, drop, visible


@dataclasses.dataclass(frozen=True)
class Rows:
    """Whole rows of scores `[B, K, G * T, S]`: the steps that do not depend on who makes them.

    Args:
        sites: of the queries of one head, and of the keys.
        scores: which of them a query sees.
        dropout: dropout of the probabilities.
        groups: G.
        run: numbers of queries and keys that follow one another without a gap; None: all.
    """

    sites: Sites
    scores: Scores
    dropout: Dropout
    groups: int
    run: Lengths | None = None

    def queries(self, q_BTNH: Array) -> Array:
        """q[B, T, N, H] -> `[B, G * T, K, H]`."""
        return join_groups(q_BTNH, q_BTNH.shape[2] // self.groups)

    def add_bias(self, s_BKTS: Array) -> Array:
        """Scaled scores with the bias by distance, if there is one."""
        return add_bias(s_BKTS, self.sites, self.groups, self.run)

    def seen(self) -> Array:
        """Mask of the keys that each row sees; broadcasts to the rows."""
        return of_groups(visible(self.sites, self.scores), self.groups)

    def drop(self, p_BKTS: Array, dtype: DTypeLike) -> Array:
        """Probabilities after dropout, in `dtype`. Backward drops again, so no mask is saved."""
        drop_again = jax.checkpoint(partial(drop_groups, dropout=self.dropout))
        return drop_again(p_BKTS, self.sites).astype(dtype)

    def output(self, o_BTKH: Array) -> Array:
        """Output `[B, G * T, K, H]` -> o[B, T, N, H], with the name of what remat keeps."""
        return checkpoint_name(part_groups(o_BTKH, self.groups), KEPT)


def join_groups(x_BTN: Array, heads: int) -> Array:
    """`[B, T, N, ..]` -> `[B, G * T, K, ..]`: queries that share a kv head, one after the other.

    Partner: `part_groups`.
    """
    batch, length, queries, *rest = x_BTN.shape
    if queries == heads:
        return x_BTN
    x_BTKG = x_BTN.reshape(batch, length, heads, queries // heads, *rest)
    return jnp.moveaxis(x_BTKG, 3, 1).reshape(batch, -1, heads, *rest)


def part_groups(x_BTK: Array, groups: int) -> Array:
    """`[B, G * T, K, ..]` -> `[B, T, N, ..]`. Undoes `join_groups`; groups: G."""
    batch, length, heads, *rest = x_BTK.shape
    if groups == 1:
        return x_BTK
    x_BGTK = x_BTK.reshape(batch, groups, length // groups, heads, *rest)
    return jnp.moveaxis(x_BGTK, 1, 3).reshape(batch, length // groups, -1, *rest)


def of_groups(seen_TS: Array, groups: int) -> Array:
    """A mask of queries for those of groups one after the other: `[.., T, S]`, or of all alike."""
    alike = groups == 1 or seen_TS.ndim == 1 or seen_TS.shape[-2] == 1
    return seen_TS if alike else jnp.concatenate([seen_TS] * groups, -2)


def drop_groups(p_BKTS: Array, sites: Sites, dropout: Dropout) -> Array:
    """`drop` of probabilities `[B, K, G * T, S]`."""
    if sites.seed_BN2 is None:
        return p_BKTS
    batch, queries = sites.seed_BN2.shape[:2]
    p_BNTS = p_BKTS.reshape(batch, queries, -1, p_BKTS.shape[-1])
    return drop(p_BNTS, sites, dropout).reshape(p_BKTS.shape)
