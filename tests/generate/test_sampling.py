"""Draws from logits: which tokens are left, in the order of transformers' processors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxptd.run.sampling import Sampling

SHARES = [0.05, 0.5, 0.15, 0.2, 0.1]
ALL = Sampling(1.0, top_k=0)


def left(sampling: Sampling, shares: list[float] = SHARES) -> dict[int, float]:
    """The probability of each token that is left."""
    scores, ids = sampling.candidates(jnp.log(jnp.array([shares], jnp.float32)))
    pairs = zip(np.asarray(ids)[0].tolist(), np.asarray(jax.nn.softmax(scores))[0], strict=True)
    return {token: float(share) for token, share in pairs if share}


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 2}),
        ({"top_p": 0.49}, {1}),
        ({"top_p": 1e-6}, {1}),
        ({"min_p": 0.29}, {1, 3, 2}),
        ({"min_p": 0.31}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        ({"top_p": 0.9, "min_p": 0.35}, {1, 3}),
        # Of the shares after the temperature, which makes them 0.25, 0.22, 0.2, ...:
        ({"top_p": 0.69, "temperature": 4.0}, {1, 3, 2, 4}),
        # Of the shares among the two likeliest, 0.71 and 0.29:
        ({"top_p": 0.7, "top_k": 2}, {1}),
        ({"top_p": 0.72, "top_k": 2}, {1, 3}),
    ],
    ids=str,
)
def test_only_likely_tokens_are_left(settings, tokens) -> None:
    found = left(dataclasses.replace(ALL, **settings))
    assert set(found) == tokens
    assert sum(found.values()) == pytest.approx(1)


def test_what_is_left_keeps_its_proportions() -> None:
    found = left(dataclasses.replace(ALL, top_p=0.69))
    assert found[1] / found[3] == pytest.approx(0.5 / 0.2, rel=1e-5)


def test_a_token_that_is_left_out_is_never_drawn() -> None:
    sampling = dataclasses.replace(ALL, top_p=0.69)
    logits = jnp.log(jnp.array([SHARES], jnp.float32))
    keys = jax.random.split(jax.random.key(0), 300)
    drawn = jax.vmap(lambda key: sampling.draw(logits, key)[0])(keys)
    assert set(np.asarray(drawn).tolist()) == {1, 3}


def test_a_penalty_divides_what_is_above_0_and_multiplies_what_is_below() -> None:
    sampling = Sampling(0, repetition_penalty=2.0)
    key, text = jax.random.key(0), jnp.array([[True, False, False]])
    for logits, token in (([3.0, 1.4, 0.0], 0), ([3.0, 1.6, 0.0], 1), ([-1.0, -1.9, -9.0], 1)):
        assert sampling.draw(jnp.array([logits]), key, text)[0] == token
    assert sampling.draw(jnp.array([[-1.0, -2.1, -9.0]]), key, text)[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_probabilities_are_those_of_transformers(seed) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 3, (1, 50)).astype(np.float32)
    text = draw.integers(0, 50, (1, 12))
    sampling = Sampling(0.9, 30, top_p=0.8, min_p=0.03, repetition_penalty=1.4)
    scores, ids = torch.tensor(logits), torch.tensor(text)
    for each in (
        process.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        process.TemperatureLogitsWarper(sampling.temperature),
        process.TopKLogitsWarper(sampling.top_k),
        process.TopPLogitsWarper(sampling.top_p),
        process.MinPLogitsWarper(sampling.min_p),
    ):
        scores = each(ids, scores)
    expected = torch.softmax(scores, -1).numpy()[0]
    seen = np.isin(np.arange(50), text)[None]
    penalised = jnp.where(seen, sampling._less_likely(jnp.array(logits)), logits)
    found, tokens = sampling.candidates(penalised)
    shares = np.zeros(50)
    shares[np.asarray(tokens)[0]] = np.asarray(jax.nn.softmax(found))[0]
    np.testing.assert_allclose(shares, expected, atol=1e-6)
    assert ((shares > 0) == (expected > 0)).all()
