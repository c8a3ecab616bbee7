"""Generation with drafts of MTP modules writes the text that the model writes alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd.errors import UserError
from jaxptd.layers.attention import Cache
from jaxptd.mesh import Layout
from jaxptd.params import shardings
from jaxptd.run.generator import Generator, Sampling
from jaxptd.run.speculative import Drafts, Speculation
from jaxptd.step import Program

GREEDY, WARM = Sampling(temperature=0), Sampling(temperature=1.0, seed=3)
END, TOKENS = 9, 33  # the text fills the model's length, and goes on from its last half
PATTERN = (3, 1, 4, 1, 5, 9, 2, 6)  # which a model learns in a few steps
STEPS = 60
WINDOWS = {"family": "gemma3_text", "window": 3, "window_layers": (True, False)}


def program(layout: Layout, modules: int, **model: Any) -> Program:
    own = {"mtp.layers": modules, "seq_length": 24, **model}
    return tiny.program(layout, batch=layout.sample_shards, micro_batches=1, **own)


def both(made: Program, params: Any, prompt: list[int], sampling: Sampling) -> Drafts:
    """Asserts that drafts change no token; returns their counts."""
    vocab, drafts = tiny.VOCAB, Drafts()
    alone = Generator(made, vocab, sampling, (END,))(params, prompt, TOKENS)
    found = Generator(made, vocab, sampling, (END,), drafts)(params, prompt, TOKENS)
    assert found == alone
    assert drafts.rounds + drafts.kept >= len(found)
    return drafts


@pytest.mark.parametrize("sampling", [GREEDY, slow(WARM)], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("layout", "modules", "model"),
    [
        (Layout(tp=2), 1, tiny.LATENT),
        slow(Layout(), 2, {}),
        slow(Layout(pp=2), 1, WINDOWS),
        slow(Layout(row=2, col=2), 2, {"norm_order": "output"}),
        slow(Layout(pp=2, tp=2, cp=2), 2, tiny.LATENT),
        slow(Layout(dp=2, ep=2, zero=3), 1, tiny.LATENT),
        slow(Layout(tp=2), 2, WINDOWS),
    ],
    ids=str,
)
def test_drafts_of_a_random_model_change_no_token(
    layout: Layout, modules: int, model: dict, sampling: Sampling
) -> None:
    made = program(layout, modules, **model)
    params = made.init_state()["params"]
    for prompt in ([1, 2, 3], [5, 0, 4]):
        both(made, params, prompt, sampling)


@functools.cache
def trained() -> dict[str, np.ndarray]:
    """Canonical parameters of a model with two modules that continues the pattern."""
    made = tiny.program(Layout(), **{"mtp.layers": 2, "seq_length": 24, "micro_batches": 1})
    text = np.tile(np.array(PATTERN, np.int32), 8)
    rows = np.stack([text[i : i + 25] for i in range(8)])
    state, step = made.init_state(), made.train_step
    for _ in range(STEPS):
        state, metrics = step(state, {"tokens": rows[:, :-1], "targets": rows[:, 1:]})
    assert float(metrics["mtp_loss_2"]) < 0.2
    return jax.tree.map(np.asarray, dict(made.canonical(state["params"])))


@pytest.mark.parametrize("layout", [Layout(), slow(Layout(pp=2, tp=2))], ids=str)
def test_a_trained_model_keeps_drafts(layout: Layout) -> None:
    made = program(layout, 2)
    stored = made.states.stored
    held = jax.jit(lambda p: {n: stored[n].from_canonical(x) for n, x in p.items()})(trained())
    params = jax.device_put(jax.tree.map(np.asarray, held), shardings(stored, made.mesh))
    drafts = Drafts()
    prompt = [*PATTERN, *PATTERN][:11]
    alone = Generator(made, tiny.VOCAB, GREEDY)(params, prompt, TOKENS)
    found = Generator(made, tiny.VOCAB, GREEDY, drafts=drafts)(params, prompt, TOKENS)
    assert found == alone
    assert alone[:8] == [*PATTERN, *PATTERN][3:11]
    assert drafts.share > 0.8
    assert drafts.per_pass > 2.5


def follows(token: Any) -> Any:
    """The token that a scripted model draws after one."""
    return (3 * token + 1) % 13


class Scripted:
    """Two modules: the first is always wrong, and the second drafts what would follow its draft."""

    modules_ahead = (1, 2)

    def empty_drafts(self, batch: int) -> list[Cache]:
        return [Cache(jnp.zeros(0), jnp.zeros(0), jnp.int32(0)) for _ in self.modules_ahead]

    def draft(self, number: int, x: Any, following: Any, info: None, cache: Cache) -> Any:
        drafted = follows(following) + (number == 1)
        return jax.nn.one_hot(drafted % 13, 13), x, cache


def test_no_draft_behind_a_wrong_one_is_kept() -> None:
    rounds = Speculation(
        Scripted(),
        lambda tokens, start, state: ((jax.nn.one_hot(follows(tokens), 13), tokens), state),
        lambda tokens, start: None,  # type: ignore[arg-type, return-value]
        lambda logits, place: jnp.argmax(logits[:, -1], -1).astype(jnp.int32),
        ends=(),
    )
    ids, written, passes, kept = rounds.run(jnp.array([[1, 2]], jnp.int32), {}, 6)
    expected = [follows(2)]
    while len(expected) < 6:
        expected.append(follows(expected[-1]))
    assert ids[:6].tolist() == expected
    assert (int(written), int(passes), int(kept)) == (6, 6, 0)


def test_a_model_without_modules_is_refused() -> None:
    with pytest.raises(UserError, match=r"speculative generation needs the modules of model.mtp"):
        Generator(tiny.program(Layout()), tiny.VOCAB, GREEDY, drafts=Drafts())


def test_counts_in_words() -> None:
    assert str(Drafts(10, 20, 15)) == "15 of 20 drafts kept (75%), 2.50 tokens a pass"
    assert str(Drafts()) == "0 of 0 drafts kept (0%), 0.00 tokens a pass"
