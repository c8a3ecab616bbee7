"""Generation in which MTP modules draft tokens that the model checks several at a time.

In a round the model reads the last drawn token and D drafts, in one pass over its cache. From its
logits it draws the token at each place, with the random numbers of that place, as it would without
drafts. Drafts that equal what it draws are kept, up to the first that does not, and after them the
drawn one. Caches forget the others by their length. So the text is the one without drafts, greedy
or drawn, but for rounding: a matmul of several tokens may add up in another order.

Letters: B one text, T tokens of a pass, V vocabulary, D modules, N generated ids.
Source: Leviathan et al., arXiv 2211.17192 (checking drafts); DeepSeek-V3, arXiv 2412.19437, 2.2.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import as_same
from jaxptd.layers.attention import Cache
from jaxptd.layers.dropout import TokenInfo


@dataclasses.dataclass
class Drafts:
    """The counts of a generation: passes of the model after the prompt's, drafts, and those kept.

    A `Generator` adds to them.
    """

    rounds: int = 0
    drafted: int = 0
    kept: int = 0

    @property
    def share(self) -> float:
        """The share of drafts that were kept."""
        return self.kept / self.drafted if self.drafted else 0.0

    @property
    def per_pass(self) -> float:
        """Tokens for each pass of the model."""
        return (self.rounds + self.kept) / self.rounds if self.rounds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.kept} of {self.drafted} drafts kept ({100 * self.share:.0f}%), "
            f"{self.per_pass:.2f} tokens a pass"
        )


class Carry(NamedTuple):
    """A round's result.

    written: number of ids in the text, which begin `ids_N`. token_B: the token drawn
    last. drafts_BD: drafts of those after it. state: the model's caches. caches: the modules'.
    rounds, kept: as in `Drafts`. ended: whether the text has.
    """

    written: Array
    ids_N: Array
    token_B: Array
    drafts_BD: Array
    state: Any
    caches: list[Cache]
    rounds: Array
    kept: Array
    ended: Array


@dataclasses.dataclass(frozen=True)
class Speculation:
    """The rounds of a generation on one device.

    Args:
        model: its MTP modules, embedding and head.
        forward: (tokens `[B, T]`, position of the first, state) -> (logits and stream, state).
        places: (tokens `[B, T]`, position of the first) -> where they are.
        draw: (logits `[B, 1, V]`, position) -> the token drawn after it, `[B]`.
        ends: ids that end a text.
    """

    model: Any
    forward: Callable[[Array, Array, Any], tuple[tuple[Array, Array], Any]]
    places: Callable[[Array, Array], TokenInfo]
    draw: Callable[[Array, Array], Array]
    ends: Sequence[int]

    @property
    def modules(self) -> int:
        """D."""
        return len(self.model.modules_ahead)

    def run(self, prompt_BT: Array, state: Any, count: int) -> tuple[Array, Array, Array, Array]:
        """A prompt -> (ids[N], how many of them are written, rounds, drafts kept).

        count: ids to write at least, unless the text ends; the last round may write more.
        """
        length, zero = prompt_BT.shape[1], jnp.int32(0)
        (logits_BTV, stream_BTD), state = self.forward(prompt_BT, zero, state)
        token_B = self.draw(logits_BTV[:, -1:], jnp.int32(length - 1))
        following_BT = jnp.concatenate([prompt_BT[:, 1:], token_B[:, None]], 1)
        drafts_BD, caches = self._draft(
            stream_BTD, following_BT, zero, self.model.empty_drafts(1), last=jnp.int32(length - 1)
        )
        ids_N = jnp.zeros(count + self.modules + 1, jnp.int32)
        first = Carry(
            zero, ids_N, token_B, drafts_BD, state, caches, zero, zero, self._ends(token_B).any()
        )

        def goes_on(carry: Carry) -> Array:
            return (carry.written < count) & ~carry.ended

        last = lax.while_loop(goes_on, lambda carry: self._round(carry, length), first)
        return last.ids_N, last.written, last.rounds, last.kept

    def _round(self, carry: Carry, length: int) -> Carry:
        """Checks the drafts, and makes new ones; length: of the prompt."""
        D, start = self.modules, length + carry.written
        tokens_BT = jnp.concatenate([carry.token_B[:, None], carry.drafts_BD], 1)
        (logits_BTV, stream_BTD), state = self.forward(tokens_BT, start, carry.state)
        drawn = [self.draw(logits_BTV[:, i : i + 1], start + i) for i in range(D + 1)]
        drawn_BT = jnp.stack(drawn, 1)
        alike_D = (drawn_BT == jnp.roll(tokens_BT, -1, 1))[0, :D]
        kept = jnp.cumprod(alike_D.astype(jnp.int32)).sum(dtype=jnp.int32)
        drafts_BD, caches = self._draft(stream_BTD, drawn_BT, start, carry.caches, last=kept)
        given = jnp.arange(D + 1) <= kept
        return Carry(
            written=carry.written + kept + 1,
            ids_N=lax.dynamic_update_slice(carry.ids_N, tokens_BT[0], (carry.written,)),
            token_B=lax.dynamic_index_in_dim(drawn_BT, kept, 1, keepdims=False),
            drafts_BD=drafts_BD,
            state=_forgetting(state, D - kept),
            caches=caches,
            rounds=carry.rounds + 1,
            kept=carry.kept + kept,
            ended=(self._ends(drawn_BT)[0] & given).any(),
        )

    def _draft(
        self,
        x_BTD: Array,
        following_BT: Array,
        start: Array,
        caches: list[Cache],
        *,
        last: Array,
    ) -> tuple[Array, list[Cache]]:
        """Drafts the tokens behind the one that follows place `last` of a pass.

        x_BTD: the model's stream. following_BT: the token after each place, up to `last`. start:
        position of the first place. caches: the modules'; those returned end with `last`.
        """
        drafts, new, token_info = [], [], self.places(following_BT, start)
        back = x_BTD.shape[1] - 1 - last
        for number, cache in enumerate(caches, 1):
            logits_BTV, x_BTD, cache = self.model.draft(
                number, x_BTD, following_BT, token_info, cache
            )
            of_last_B1V = lax.dynamic_slice_in_dim(logits_BTV, last, 1, 1)
            # The numbers with which the model will draw at this place make both agree more often.
            drafts.append(self.draw(of_last_B1V, start + last + number))
            new.append(_forgetting(cache, back))
            following_BT = jnp.roll(following_BT, -1, 1)
            following_BT = lax.dynamic_update_slice_in_dim(
                following_BT, drafts[-1][:, None], last, 1
            )
        return jnp.stack(drafts, 1), new

    def _ends(self, ids: Array) -> Array:
        return jnp.isin(ids, jnp.array(self.ends, jnp.int32))


def _forgetting(caches: Any, count: Array) -> Any:
    """Caches without their last tokens, whose places the next ones take."""
    if isinstance(caches, Cache):
        return caches._replace(used=caches.used - as_same(count))
    return {name: _forgetting(each, count) for name, each in caches.items()}
