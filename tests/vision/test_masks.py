"""Classes predicted by models of images, equal on every layout, and their PNG files."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd import Layout, UserError
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.step import Program
from jaxptd.vision.data import ImageSamples
from jaxptd.vision.masks import (
    Masks,
    classes_of,
    final_picture,
    of_pixels,
    overlay,
    palette,
    write_pictures,
)
from jaxptd.vision.png import read_png

# ---- masks, overlays and pictures of predictions -------------------------------------------------

IMAGE = np.zeros((1, 4, 4, 1))
IMAGE[0, 1, 1] = 9
MASK = np.zeros((1, 4, 4), np.int32)
MASK[0, 2, 2:] = [1, 2]


def test_a_mask_is_its_classes_and_an_overlay_has_their_colors(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "masks"
    write_pictures(Masks(IMAGE, MASK, 3).files(folder, ["a"]))
    assert sorted(path.name for path in folder.iterdir()) == ["a-overlay.png", "a.png"]
    mask = read_png((folder / "a.png").read_bytes())
    assert mask.palette
    np.testing.assert_array_equal(mask.pixels[..., 0], MASK[0])
    over = read_png((folder / "a-overlay.png").read_bytes()).pixels.astype(int)
    assert over[0, 0].tolist() == [128, 128, 128] and over[1, 1].tolist() == [255, 255, 255]
    for place, color in ((2, palette(3)[1]), (3, palette(3)[2])):
        wanted = 127.5 + 0.45 * (np.array(color) - 127.5)
        np.testing.assert_allclose(over[2, place], wanted, atol=0.5)


def test_pixels_that_do_not_count_are_gray() -> None:
    over = overlay(IMAGE[0] - 9, np.full((4, 4), -1), 3)
    np.testing.assert_array_equal(over[0, 0], np.round(0.45 * np.full(3, 128)))


def test_a_mask_has_as_many_classes_as_a_byte(tmp_path: Path) -> None:
    assert len(palette(256)) == 256
    with pytest.raises(UserError, match="model.images.classes=257: a PNG has 256 colors"):
        Masks(IMAGE, MASK, 257).files(tmp_path, ["a"])


def test_a_picture_shows_image_labels_and_what_was_found(tmp_path: Path) -> None:
    """Three columns of enlarged images; a row per held-out image, up to 8."""
    config = tiny.config(Layout(), family="swin-unet")
    samples = ImageSamples(lambda number: (IMAGE[0], MASK[0]), 3)
    line = final_picture(lambda image: 0 * MASK.repeat(3, 0), config, samples, tmp_path / "p.png")
    assert line.startswith(f"{tmp_path / 'p.png'}: 3 held-out images")
    pixels = read_png((tmp_path / "p.png").read_bytes()).pixels
    assert pixels.shape == (3 * 132, 3 * 132, 3)
    first, labels, found = (pixels[:128, place : place + 128] for place in (0, 132, 264))
    np.testing.assert_array_equal(first, found)
    assert ((labels != first).any(-1)).sum() == 2 * 32**2
    many = dataclasses.replace(samples, count=30)
    final_picture(lambda image: 0 * MASK.repeat(8, 0), config, many, tmp_path / "p.png")
    assert read_png((tmp_path / "p.png").read_bytes()).pixels.shape[0] == 8 * 132


def test_a_picture_that_cannot_be_written_ends_no_run(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "p.png").mkdir()
    samples = ImageSamples(lambda number: (IMAGE[0], MASK[0]), 1)
    config = tiny.config(Layout(), family="swin-unet")
    line = final_picture(lambda image: MASK, config, samples, tmp_path / "p.png")
    assert line.startswith(f"no picture of predictions: cannot write {tmp_path / 'p.png'}: Is a d")
    monkeypatch.setitem(sys.modules, "PIL", None)
    line = final_picture(lambda image: MASK, config, samples, tmp_path / "q.png")
    assert line.startswith("no picture of predictions: writing a PNG needs Pillow; in the check")
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]


# ---- classes and their scores on every layout ----------------------------------------------------

ONE: dict[str, tuple[np.ndarray, dict[str, float]]] = {}


def found(layout: Layout, family: str) -> tuple[np.ndarray, dict[str, float]]:
    """Classes of eleven images, more than a batch, and the sums of an evaluation."""
    with jax.enable_x64(True):
        program = tiny.program(layout, family=family, dtype="float64", **{"images.drop_path": 0.3})
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
    with pytest.raises(UserError, match=r"images \[1, 8, 16, 2\]; use \['B', 16, 16, 2\], set by"):
        classes_of(swin, {}, np.zeros((1, 8, 16, 2)))
    with pytest.raises(UserError, match="model.family=gpt does not classify images; use swin"):
        classes_of(text, {}, np.zeros((1, 8, 16, 2)))
