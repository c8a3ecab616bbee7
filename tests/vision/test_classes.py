"""Classes that models of images find, and their scores, are the same on every layout."""

from typing import Any

import jax
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd import Layout, UserError
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.step import Program
from jaxptd.vision.masks import classes_of, of_pixels

ONE: dict[str, tuple[np.ndarray, dict[str, float]]] = {}


def found(layout: Layout, family: str) -> tuple[np.ndarray, dict[str, float]]:
    """The classes of eleven images, more than a batch, and the sums of an evaluation."""
    with jax.enable_x64(True):
        program = tiny.program(layout, family=family, dtype="float64", drop_path=0.3)
        params = program.init_state()["params"]
        params = jax.tree.map(lambda p: 20 * p, params)  # so that classes differ
        image = np.random.default_rng(3).standard_normal((11, 16, 16, 2))
        sums = program.eval_step(params, random_batch(program.config))
        return classes_of(program, params, image), {n: float(x["sum"]) for n, x in sums.items()}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        slow("swin-unet", Layout(cp=2, tp=2, sequence_parallel=True)),
        slow("swin-unet", Layout(dp=2, tp=2, sequence_parallel=True)),
        slow("swin", Layout(dp=2, cp=2)),
        slow("swin-unet", Layout(row=2, col=2)),
        slow("swin-unet", Layout(dp=2, tp=2, zero=3)),
        slow("swin", Layout(dp=2, tp=2, sequence_parallel=True)),
        slow("swin", Layout(row=2, col=4)),
    ],
    ids=str,
)
def test_classes_and_scores_are_those_of_one_device(family: str, layout: Layout) -> None:
    if family not in ONE:
        ONE[family] = found(Layout(), family)
    classes, sums = ONE[family]
    again, others = found(layout, family)
    assert classes.shape == ((11, 16, 16) if family == "swin-unet" else (11,))
    assert len(np.unique(classes)) == 3
    np.testing.assert_array_equal(again, classes)
    assert others == pytest.approx(sums, rel=1e-6)
    if family == "swin-unet":
        names = [f"{score}{of}" for score in ("dice", "hd95") for of in ("", "_1", "_2")]
        assert sums.keys() == {"cross_entropy", "dice_loss", *names}
        assert min(sums.values()) > 0


def program(**fields: Any) -> Program:
    return tiny.program(Layout(), **fields)


def test_images_of_another_size_and_other_models_are_refused() -> None:
    swin, text = program(family="swin-unet"), program()
    assert of_pixels(swin.config) and not of_pixels(program(family="swin").config)
    assert not of_pixels(text.config)
    with pytest.raises(UserError, match=r"images \[1, 8, 16, 2\]; use \['B', 16, 16, 2\], of mod"):
        classes_of(swin, {}, np.zeros((1, 8, 16, 2)))
    with pytest.raises(UserError, match="model.family=gpt gives no classes to images; use swin"):
        classes_of(text, {}, np.zeros((1, 8, 16, 2)))
