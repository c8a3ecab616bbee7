"""Steps of Swin and Swin-UNet, with dropout and dropped paths, equal the reference's."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from reference.cases import SEED
from reference.draws import Masks
from reference.families import PRESETS
from reference.images import Model, Sizes, swin, swin_unet
from reference.layers import Options
from reference.tape import Value, gradients
from turns import slow

from jaxptd.config import Config
from jaxptd.mesh import Layout, make_mesh
from jaxptd.models.families import family_of

TOLERANCE = 1e-12
DROPS = {"dropout": 0.2, "images.drop_path": 0.3}
OPTIONS = Options(2, 0, 2, **PRESETS["gpt"] | {"activation": "gelu"})
ENCODER = Sizes(patch=2, window=4, depths=(4, 2), decoder_depths=(), classes=3, drop_path=0.3)
UNET = dataclasses.replace(ENCODER, decoder_depths=(4,))


def config(family: str, layout: Layout, choice: dict) -> Config:
    """A model of two levels, the last of which is one window."""
    fields = {"family": family, "images.decoder_depths": None, "dtype": "float64", **DROPS}
    made = tiny.config(layout, **fields | {"batch": 4} | choice)
    return dataclasses.replace(made, train=dataclasses.replace(made.train, seed=SEED))


def expected(
    family: str, params: dict, batch: dict, *, together: bool
) -> tuple[dict[str, float], dict]:
    """The reference's terms of the loss, and the gradients of their weighted sum."""
    values = {name: Value(p) for name, p in params.items()}
    sizes = UNET if family == "swin-unet" else ENCODER
    model = Model(values, sizes, OPTIONS, Masks(SEED, 0, DROPS["dropout"]))
    if family == "swin":
        loss = swin(model, batch)
        return {"cross_entropy": float(loss.x)}, gradients(loss, values)
    cross_entropy, dice = swin_unet(model, batch, together)
    terms = {"cross_entropy": 0.4 * float(cross_entropy.x), "dice_loss": 0.6 * float(dice.x)}
    return terms, gradients(cross_entropy * 0.4 + dice * 0.6, values)


def hold(family: str, layout: Layout, **choice: Any) -> None:
    """Asserts that terms of the loss and all gradients are equal."""
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        made = config(family, layout, choice)
        program = tiny.FromZeros(made, make_mesh(layout))
        params = {
            name: 0.1 * rng.standard_normal(info.shape) + name.endswith("norm.w")
            for name, info in sorted(program.infos.items())
        }
        batch = family_of(made.model).draw(made, rng)
        placed = jax.jit(
            lambda p: {n: program.states.stored[n].from_canonical(x) for n, x in p.items()}
        )
        state = {**program.init_state(), "params": jax.tree.map(np.asarray, placed(params))}
        state = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), state, program.abstract_state
        )
        _, terms, grads = program.gradients(state, batch)
        found = jax.tree.map(np.asarray, jax.jit(program.canonical)(grads))
    together = choice.get("images.dice") == "batch"
    losses, wanted = expected(family, params, batch, together=together)
    for name, loss in losses.items():
        assert float(terms[name]) == pytest.approx(loss, rel=TOLERANCE), name
    assert found.keys() == wanted.keys()
    far = {name: np.linalg.norm(found[name] - g) / np.linalg.norm(g) for name, g in wanted.items()}
    assert {name: error for name, error in far.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        slow("swin-unet", Layout()),
        ("swin", Layout()),
        slow("swin-unet", Layout(tp=2, sequence_parallel=True)),
        slow("swin-unet", Layout(row=2, col=2, attention2d="blocks")),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_reference(family: str, layout: Layout) -> None:
    hold(family, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, cp=2, row=2)], ids=str)
def test_a_step_with_the_dice_loss_of_a_batch_is_that_of_the_reference(layout: Layout) -> None:
    hold("swin-unet", layout, micro_batches=1, batch=8, **{"images.dice": "batch"})
