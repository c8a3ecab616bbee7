"""The loss of pairs of answers, of which one is better: DPO and IPO.

A sequence holds pairs one after another as documents: document 2 p is the chosen text of pair p,
document 2 p + 1 the rejected one, each with its prompt. Attention stays within a document, so each
is as if it were alone.

Letters: B batch, T position, P pairs, K = 2 P documents of a sequence.
Source: Rafailov et al., arXiv 2305.18290, equation 7; Azar et al., arXiv 2310.12036, equation 17,
with the mean over an answer's tokens in place of the sum, as its authors compute it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.config.preference import ACCURACY, CHOSEN, LOSS, REJECTED, Preference, most_pairs
from jaxptd.layers.tensor_parallel import ShardingAxes


class Documents(NamedTuple):
    """Sums over the tokens of each document.

    gain_BK: log-probabilities of its targets, less the reference's. size_BK: its targets.
    """

    gain_BK: Array
    size_BK: Array


def document_sums(x_BT: Array, segment_BT: Array, seq_length: int) -> Array:
    """Adds up a number of this device's tokens by document: `[B, K]`.

    Args:
        x_BT: the number.
        segment_BT: the document of each token; below 0 is padding.
        seq_length: of the whole sequence, which limits K.
    """
    rows, count = len(x_BT), 2 * most_pairs(seq_length)
    column_BT = jnp.where(segment_BT < 0, count, segment_BT)  # beyond the last one: left out
    empty_BK = jnp.zeros((rows, count), x_BT.dtype)
    return empty_BK.at[jnp.arange(rows)[:, None], column_BT].add(x_BT, mode="drop")


def preference_sums(own: Documents, preference: Preference, axes: ShardingAxes) -> dict[str, Array]:
    """Adds up the loss and the scores of all pairs: this device's part of each sum.

    All devices that share a sequence hold the loss of its pairs. Each returns an equal part of it,
    with the gradients of its own sums: no gradient is sent.

    Args:
        own: the sums over this device's tokens.
        preference: chooses the loss.
        axes: which shard the logits' tokens.
    """
    every = Documents(*axes.sum_over_sequence(jnp.stack(lax.stop_gradient(own))))
    (loss, scores), gradient = jax.value_and_grad(_of_pairs, has_aux=True)(every, preference)
    sums = {LOSS: loss, **scores}
    parts = {name: x / axes.sequence_devices() for name, x in sums.items()}
    change_BK = own.gain_BK - lax.stop_gradient(own.gain_BK)  # zeros, with a gradient
    parts[LOSS] += jnp.sum(gradient.gain_BK * change_BK)
    return parts


def _of_pairs(every: Documents, preference: Preference) -> tuple[Array, dict[str, Array]]:
    """The sums of all pairs' losses and of their scores."""
    chosen, rejected = (Documents(*(x[:, first::2] for x in every)) for first in (0, 1))
    there_BP = chosen.size_BK > 0
    if preference.loss == "ipo":
        gains = (x.gain_BK / jnp.maximum(x.size_BK, 1) for x in (chosen, rejected))
        margin_BP = next(gains) - next(gains)
        loss_BP = jnp.square(margin_BP - 1 / (2 * preference.beta))
    else:
        margin_BP = chosen.gain_BK - rejected.gain_BK
        loss_BP = -jax.nn.log_sigmoid(preference.beta * margin_BP)
    scores = {
        ACCURACY: (chosen.gain_BK > rejected.gain_BK).astype(loss_BP.dtype),
        CHOSEN: preference.beta * chosen.gain_BK,
        REJECTED: preference.beta * rejected.gain_BK,
    }
    sums = {name: jnp.sum(jnp.where(there_BP, x, 0)) for name, x in scores.items()}
    return jnp.sum(jnp.where(there_BP, loss_BP, 0)), sums
