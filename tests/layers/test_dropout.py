"""Dropout: the right fraction, the same mask on any device, different masks at every site."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from one_device import case, hold
from turns import slow

from jaxptd.layers.dropout import DropoutSite, TokenInfo, dropout, fold, keep_mask, noise
from jaxptd.mesh import Layout
from jaxptd.models import model
from jaxptd.step.passes import MicroBatches

SEED = jnp.array([1, 2], jnp.uint32)
kept = jax.jit(keep_mask, static_argnums=3)
dropped = jax.jit(dropout, static_argnums=3)


def numbers(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.int32)


def mask(seed: jax.Array, rows: int, columns: int, rate: float) -> np.ndarray:
    return np.asarray(kept(seed, numbers(rows)[:, None], numbers(columns), rate))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_kept_is_one_minus_the_rate(rate: float) -> None:
    keep = mask(SEED, 1000, 1000, rate)
    deviation = (rate * (1 - rate) / keep.size) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 4 * deviation
    for axis in (0, 1):  # no row or column is favoured
        spread = keep.mean(axis).std() / (rate * (1 - rate) / 1000) ** 0.5
        assert 0.9 < spread < 1.1


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 2), (16, 0), (0, 256)])
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    keep = mask(SEED, 1000, 1000, 0.5).astype(float) - 0.5
    other = np.roll(keep, shift, (0, 1))
    assert abs((keep * other).mean()) < 4 * 0.25 / 1000


@pytest.mark.parametrize("other", [(1, 3), (2, 2), (2, 1)])
def test_seeds_layers_and_sites_have_masks_of_their_own(other: tuple[int, int]) -> None:
    keep = mask(SEED, 300, 300, 0.5)
    for seed in (jnp.array(other, jnp.uint32), fold(SEED, *other)):
        agreement = (keep == mask(seed, 300, 300, 0.5)).mean()
        assert abs(agreement - 0.5) < 4 * 0.5 / 300


def test_a_value_is_dropped_the_same_wherever_it_lies() -> None:
    token_info = TokenInfo(numbers(6), numbers(8), SEED)
    x_BTD = jnp.ones((6, 8, 10))
    whole = np.asarray(dropped(x_BTD, token_info, numbers(10), 0.4))
    assert 0 < (whole == 0).mean() < 1
    local = TokenInfo(numbers(6)[3:5], numbers(8)[4:], SEED)
    piece = np.asarray(dropped(x_BTD[3:5, 4:, 5:], local, numbers(10)[5:], 0.4))
    np.testing.assert_array_equal(piece, whole[3:5, 4:, 5:])


def test_what_stays_is_scaled_and_the_gradient_is_the_same_mask() -> None:
    token_info = TokenInfo(numbers(2), numbers(8), SEED)
    x_BTD = jnp.full((2, 8, 16), 3.0)
    y, back = jax.vjp(lambda x: dropped(x, token_info, numbers(16), 0.25), x_BTD)
    keep = np.asarray(y) != 0
    np.testing.assert_allclose(np.asarray(y)[keep], 4.0)
    np.testing.assert_allclose(np.asarray(back(jnp.ones_like(y))[0]), keep / 0.75, rtol=1e-6)


def test_no_seed_or_no_rate_drops_nothing() -> None:
    x_BTD = jnp.ones((2, 8, 16))
    token_info = TokenInfo(numbers(2), numbers(8), None)
    assert dropout(x_BTD, token_info, numbers(16), 0.5) is x_BTD
    assert token_info.at(1, DropoutSite.MLP_OUTPUT) == token_info._replace(layer=1)
    assert dropout(x_BTD, token_info._replace(seed=SEED), numbers(16), 0.0) is x_BTD


def test_the_mask_is_not_kept_for_backward() -> None:
    token_info = TokenInfo(numbers(2), numbers(8), SEED)
    _, back = jax.vjp(lambda x: dropped(x, token_info, numbers(16), 0.25), jnp.ones((2, 8, 16)))
    saved = [x.shape for x in jax.tree.leaves(back) if hasattr(x, "shape")]
    assert (2, 8, 16) not in saved


def test_a_source_has_the_numbers_of_its_samples() -> None:
    source = TokenInfo(numbers(4), numbers(6), SEED)
    token_info = TokenInfo(numbers(4), numbers(8), SEED, source=source)
    half = MicroBatches({}, numbers(2) + 2, (None, None))
    found = half.token_info(token_info)
    assert found.source is not None
    assert found.sample_B.tolist() == found.source.sample_B.tolist() == [2, 3]
    assert found.source.position_T.shape == (6,)


PATHS = {DropoutSite.ATTENTION_PATH, DropoutSite.MLP_PATH}
CROSS = {DropoutSite.CROSS_ATTENTION, DropoutSite.CROSS_ATTENTION_OUTPUT}


@pytest.mark.parametrize(
    ("choice", "others"),
    [(tiny.T5, PATHS), slow({"family": "swin-unet", "images.drop_path": 0.1}, CROSS)],
    ids=["t5", "swin-unet"],
)
def test_a_model_draws_at_every_site(choice: dict, others: set, monkeypatch) -> None:
    """Places that share a site would share a mask. T5 drops no paths, Swin-UNet no sources."""
    at, drawn = TokenInfo.at, set()

    def noted(token_info: TokenInfo, layer: jax.Array | int, site: DropoutSite) -> TokenInfo:
        drawn.add(site)
        return at(token_info, layer, site)

    monkeypatch.setattr(TokenInfo, "at", noted)
    program = tiny.program(Layout(), dropout=0.1, **choice)
    program.train_step.trace(program.abstract_state, program.abstract_batch)
    assert drawn == {*DropoutSite} - others - {DropoutSite.EMBEDDING_NOISE}


# ---- noise of embeddings -------------------------------------------------------------------------

noisy = jax.jit(noise, static_argnums=2)


def test_noise_is_uniform_and_the_same_wherever_it_lies() -> None:
    token_info = TokenInfo(numbers(6), numbers(80), SEED)
    whole = np.asarray(noisy(token_info, numbers(100), 0.3))
    assert np.abs(whole).max() == pytest.approx(0.3, rel=1e-3)
    shares, _ = np.histogram(whole, 10, (-0.3, 0.3))
    np.testing.assert_allclose(shares / whole.size, 0.1, atol=4 * (0.09 / whole.size) ** 0.5)
    local = TokenInfo(numbers(6)[3:5], numbers(80)[40:], SEED)
    piece = np.asarray(noisy(local, numbers(100)[50:], 0.3))
    np.testing.assert_array_equal(piece, whole[3:5, 40:, 50:])
    assert noise(token_info._replace(seed=None), numbers(10), 0.3) == 0


NOISE = {"neftune": 5.0, "positions": "rope"}
PADDED = {"hidden_size": 12, "num_heads": 3}  # the layout makes 12 tokens of 8


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(NOISE | PADDED, 2, cp=2, tp=3, sequence_parallel=True),
        *(
            slow(*each.values)
            for each in (
                case(NOISE, 2, dp=2, cp=2, tp=2, sequence_parallel=True),
                case(NOISE | {"dropout": 0.1}, 2, pp=2, tp=2),
                case(NOISE | {"hidden_size": 12, "num_heads": 3}, 2, row=2, col=2),
                case({"neftune": 5.0, "family": "bert"}, 2, dp=2, tp=2, zero=3),
                case(NOISE | tiny.MOE | {"batch": 8}, 2, dp=2, ep=2),
            )
        ),
    ],
)
def test_a_step_with_noise_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)


def test_noise_is_of_training_and_as_large_as_its_paper_says(monkeypatch) -> None:
    programs = [tiny.program(Layout(), neftune=alpha, positions="rope") for alpha in (0.0, 4.0)]
    batch, states = tiny.batch(), [each.init_state() for each in programs]
    both = [*zip(programs, states, strict=True)]
    found = [jax.device_get(each.eval_step(state["params"], batch)) for each, state in both]
    assert found[0] == found[1]
    losses = [float(each.gradients(state, batch)[0]) for each, state in both]
    assert losses[0] != losses[1]
    sizes = []

    def noted(x: jax.Array, token_info: TokenInfo, *, most: float, **_) -> jax.Array:
        sizes.append(most)
        return x

    monkeypatch.setattr(model, "noise_residual", noted)
    programs[1].train_step.trace(programs[1].abstract_state, programs[1].abstract_batch)
    assert {*sizes} == {4 / (8 * 16) ** 0.5}
