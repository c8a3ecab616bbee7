"""Images by sample number: phantoms, files and rotations; mismatches are refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxptd.config import DataConfig, Images, ModelConfig
from jaxptd.errors import UserError
from jaxptd.vision.data import HELD_OUT, TRAINING, ImageSamples, figure, open_images, phantom
from jaxptd.vision.png import write_png

IMAGES = ModelConfig(
    family="swin-unet", images={"size": 16, "patch": 2, "window": 4, "depths": (2, 2)}
).images
SHAPES = DataConfig(source="shapes")


def test_a_phantom_is_a_function_of_its_seed_and_number() -> None:
    image, label = phantom(3, TRAINING, 7, size=64)
    again = phantom(3, TRAINING, 7, size=64)
    np.testing.assert_array_equal(image, again[0])
    np.testing.assert_array_equal(label, again[1])
    for other in ((4, TRAINING, 7), (3, HELD_OUT, 7), (3, TRAINING, 8)):
        assert (phantom(*other, size=64)[0] != image).any()


def test_a_phantom_has_a_chamber_in_a_ring_and_one_beside_it() -> None:
    for number in range(20):
        image, label = phantom(0, TRAINING, number, size=64)
        assert image.dtype == np.float32 and label.dtype == np.int32
        assert abs(image.mean()) < 1e-5 and image.std() == pytest.approx(1, abs=1e-4)
        assert (np.bincount(label.ravel(), minlength=4) >= 40).all()
        chamber = np.pad(label == 3, 1)
        ring = np.pad(np.isin(label, (2, 3)), 1)
        for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            assert ring[np.roll(chamber, (down, right), (0, 1))].all()


def test_samples_do_not_depend_on_the_order_in_which_they_are_read() -> None:
    config = DataConfig(source="shapes", augment=True)
    first, _ = open_images(config, IMAGES, seed=1)
    second, _ = open_images(config, IMAGES, seed=1)
    one = first.field("image", np.array([5, 2]))
    second.field("image", np.array([9, 2]))
    np.testing.assert_array_equal(second.field("image", np.array([2, 5])), one[::-1])
    assert one.shape == (2, 16, 16, 1)


def test_an_image_and_its_labels_are_turned_alike() -> None:
    """All eight rotations and flips occur, and a label moves with its pixel."""
    number = np.arange(16).reshape(4, 4)
    samples = ImageSamples(lambda _: (number[..., None], number), 1, seed=0, augment=True)
    several = np.arange(64)
    image, label = samples.field("image", several), samples.field("label", several)
    np.testing.assert_array_equal(image[..., 0], label)
    assert len({each.tobytes() for each in label}) == 8


def test_each_epoch_has_every_image_once() -> None:
    samples = ImageSamples(lambda i: (np.full((1, 1, 1), i), np.full((1, 1), i)), 7, seed=0)
    epochs = samples.field("label", np.arange(21)).reshape(3, 7)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(7), (3, 1)))
    assert (epochs[0] != epochs[1]).any()
    held_out = ImageSamples(samples.read, 7)
    np.testing.assert_array_equal(held_out.field("label", np.arange(7)).ravel(), np.arange(7))


def write(folder: Path, count: int, **changes: np.ndarray) -> str:
    """A folder with npz files."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        arrays = {"image": rng.normal(size=(16, 16)), "label": rng.integers(0, 4, (16, 16))}
        np.savez(folder / f"slice{number}.npz", **arrays | changes)
    return str(folder)


def test_files_are_split_by_their_names(tmp_path: Path) -> None:
    source = write(tmp_path / "all", 10)
    data = DataConfig(source=source, validation_fraction=0.2)
    train, validation = open_images(data, IMAGES, seed=0)
    assert validation is not None
    assert (train.windows_per_epoch, validation.windows_per_epoch) == (8, 2)
    assert train.amount == "8 training images"
    last = np.load(tmp_path / "all" / "slice9.npz")
    found = validation.field("image", np.array([1]))[0, ..., 0]
    wanted = (last["image"] - last["image"].mean()) / last["image"].std()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_array_equal(validation.field("label", np.array([1]))[0], last["label"])


def test_pairs_of_npy_files_are_read(tmp_path: Path) -> None:
    for name in ("image", "label"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.eye(16, dtype=int))
    train, _ = open_images(DataConfig(source=str(tmp_path), validation_fraction=0), IMAGES, seed=0)
    np.testing.assert_array_equal(train.field("label", np.array([0]))[0], np.eye(16))
    gray = train.field("image", np.array([0]))
    colored, _ = open_images(
        DataConfig(source=str(tmp_path), validation_fraction=0),
        dataclasses.replace(IMAGES, channels=3),
        seed=0,
    )
    np.testing.assert_array_equal(colored.field("image", np.array([0])), gray.repeat(3, -1))
    (tmp_path / "label" / "a.npy").unlink()
    with pytest.raises(UserError, match=r"a.npy has no label; .*label/a.npy is missing"):
        open_images(DataConfig(source=str(tmp_path), validation_fraction=0), IMAGES, seed=0)


def test_pairs_of_png_files_are_read(tmp_path: Path) -> None:
    """Images in gray or color, and labels in gray or as palette indices."""
    rng = np.random.default_rng(1)
    gray, label = rng.integers(0, 256, (16, 16)), rng.integers(0, 4, (16, 16))
    for name, pixels, palette in (
        ("image/a.png", gray, ()),
        ("label/a.png", label, ()),
        ("image/b.png", gray, ()),
        ("label/b.png", label[::-1], [(n, n, n) for n in range(4)]),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(write_png(pixels, palette))
    data = DataConfig(source=str(tmp_path), validation_fraction=0.5)
    train, validation = open_images(data, IMAGES, seed=0)
    assert validation is not None
    first = np.array([0])
    np.testing.assert_array_equal(train.field("label", first)[0], label)
    np.testing.assert_array_equal(validation.field("label", first)[0], label[::-1])
    wanted = (gray - gray.mean()) / gray.std()
    np.testing.assert_allclose(train.field("image", first)[0, ..., 0], wanted, rtol=1e-6)
    (tmp_path / "image" / "a.png").write_bytes(write_png(label, [(0, 0, 0)] * 4))
    again, _ = open_images(data, IMAGES, seed=0)
    with pytest.raises(UserError, match=r"a.png has no array 'image': its pixels are palette ind"):
        again.field("image", first)


CLASSES = ModelConfig(
    family="swin",
    images=Images(size=16, channels=1, classes=4, patch=2, window=4, depths=(2, 2)),
).images


def test_figures_have_a_class_each() -> None:
    """Phantoms of one kind look alike, those of different kinds do not: rings are hollow."""
    train, held = open_images(SHAPES, CLASSES, seed=1, of_pixels=False)
    assert held is not None
    numbers = np.arange(200)
    image, label = train.field("image", numbers), train.field("label", numbers)
    assert image.shape == (200, 16, 16, 1) and label.shape == (200,) and label.dtype == np.int32
    assert (np.bincount(label, minlength=4) > 30).all()
    assert (held.field("image", numbers[:1]) != image[:1]).any()
    again, _ = open_images(SHAPES, CLASSES, seed=1, of_pixels=False)
    np.testing.assert_array_equal(again.field("image", numbers[7:8]), image[7:8])
    for number in numbers[:20]:
        one, kind = figure(1, TRAINING, int(number), size=64)
        inside = abs(one) > 1.2 * np.abs(one).std()
        assert kind == label[number] and inside.mean() > 0.02


def test_folders_are_classes_and_each_has_a_part_held_out(tmp_path: Path) -> None:
    for name, count in (("dog", 10), ("cat", 20)):
        (tmp_path / name).mkdir()
        for number in range(count):
            image = np.eye(16) * (number + 1) + (name == "cat")
            np.save(tmp_path / name / f"{number:02d}.npy", image)
    data = DataConfig(source=str(tmp_path), validation_fraction=0.2)
    train, validation = open_images(data, CLASSES, seed=0, of_pixels=False)
    assert validation is not None
    assert (train.windows_per_epoch, validation.windows_per_epoch) == (24, 6)
    label = validation.field("label", np.arange(6))
    assert np.bincount(label).tolist() == [4, 2]  # cat before dog
    assert np.bincount(train.field("label", np.arange(24))).tolist() == [16, 8]
    turned = dataclasses.replace(data, augment=True)
    whole, _ = open_images(turned, CLASSES, seed=0, of_pixels=False)
    assert whole.field("label", np.arange(3)).shape == (3,)


def test_folders_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    data = DataConfig(source=str(tmp_path))
    with pytest.raises(
        UserError, match="has folders of 0 classes; use 2 to 4, set by model.images.c"
    ):
        open_images(data, CLASSES, seed=0, of_pixels=False)
    for name in "abcde":
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="has folders of 5 classes; use 2 to 4"):
        open_images(data, CLASSES, seed=0, of_pixels=False)
    (tmp_path / "e").rmdir()
    with pytest.raises(UserError, match="has no .npz, .npy, .png file in its folders"):
        open_images(data, CLASSES, seed=0, of_pixels=False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"image": np.ones((8, 8))},
            r"image \[8, 8, 1\]; use \[16, 16, 1\], set by model.images.size",
        ),
        ({"label": np.full((16, 16), 4)}, "labels from 4 to 4; use whole numbers from 0 to 3"),
        ({"label": np.full((16, 16), 0.5)}, "labels from 0.5 to 0.5; use whole numbers"),
        ({"image": np.full((16, 16), np.nan)}, "an image of float64; use finite numbers"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, np.ndarray], line: str
) -> None:
    data = DataConfig(source=write(tmp_path, 1, **changes), validation_fraction=0)
    train, _ = open_images(data, IMAGES, seed=0)
    with pytest.raises(UserError, match=line):
        train.field("image", np.array([0]))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (DataConfig(), "data.source=stdlib is text; use shapes, or folders of images"),
        (DataConfig(source={"a": 1.0}), "data.source: images support no mixture; name folders"),
    ],
)
def test_sources_without_images_are_refused(data: DataConfig, line: str) -> None:
    with pytest.raises(UserError, match=line):
        open_images(data, IMAGES, seed=0)


def test_too_few_images_to_hold_any_out_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path, 2)
    with pytest.raises(UserError, match=r"data.validation_fraction=0.05 of 2 images is 0; use an"):
        open_images(DataConfig(source=source), IMAGES, seed=0)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="has no images; use folders with .npz files"):
        open_images(DataConfig(source=str(tmp_path / "none")), IMAGES, seed=0)
