"""Images and their labels by sample number: from files, or drawn.

Labels of pixels are in `.npz` files with both, or in folders with `image/` and `label/` of `.npy`
or `.png`. `.npz` files are those that the preprocessing of Swin-Unet's code writes: a slice each,
`image` `[S, S]` and `label` `[S, S]`. With several channels an image is `[S, S, channels]`. Whole
images have a folder with the name of their class.

Letters: B samples, S rows and columns.
"""

import dataclasses
import zipfile
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np

from jaxptd.config import DataConfig, Images
from jaxptd.data.batches import Samples
from jaxptd.data.sources import STDLIB, find_files
from jaxptd.errors import UserError
from jaxptd.vision.phantoms import (
    CLASSES,
    FIGURES,
    HELD_OUT,
    ORDER,
    TRAINING,
    TURN,
    drawing,
    figure,
    normalised,
    phantom,
)
from jaxptd.vision.png import pillow, read_png

# ---- images and what they show, in files ---------------------------------------------------------

PNG = ".png"
PAIRED = (".npy", PNG)  # endings of files with an image, or with its labels
ENDINGS = (".npz", *PAIRED)


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """An image in a file, and what it shows.

    Args:
        image: with the image, or with both.
        label: the file with the labels of its pixels, or the class of the whole image.
    """

    image: Path
    label: Path | int

    def read(self, size: int, channels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """The image, float32[S, S, channels] with mean 0 and variance 1, and int32[S, S] or [].

        Raises:
            UserError: a file is broken, of other sizes, or has other classes.
        """
        image = read_image(self.image, size, channels)
        if isinstance(self.label, int):
            return image, np.array(self.label, np.int32)
        return image, read_label(self.label, size, classes)


def read_image(path: Path, size: int, channels: int) -> np.ndarray:
    """The image of a file, float32[S, S, channels] with mean 0 and variance 1.

    A gray image has the same numbers in every channel.

    Raises:
        UserError: the file is broken, or of another size.
    """
    image = _array(path, "image")
    image = image[..., None] if image.ndim == 2 else image
    image = image.repeat(channels, -1) if image.shape[2:] == (1,) else image
    if image.shape != (size, size, channels):
        raise UserError(
            f"{path}: image {list(image.shape)}; use {[size, size, channels]}, of "
            "model.images.size and model.images.channels: resize it first"
        )
    if image.dtype.kind not in "fiu" or not np.isfinite(image).all():
        raise UserError(f"{path}: an image of {image.dtype}; use finite numbers")
    return normalised(image.astype(np.float64))


def read_label(path: Path, size: int, classes: int) -> np.ndarray:
    """The labels of the pixels of an image, int32[S, S].

    Raises:
        UserError: the file is broken, of another size, or has other classes.
    """
    label = _array(path, "label")
    label = label[..., 0] if label.shape[2:] == (1,) else label
    if label.shape != (size, size):
        raise UserError(
            f"{path}: label {list(label.shape)}; use {[size, size]}, of model.images.size: resize "
            "it first"
        )
    integers: np.ndarray = label.astype(np.int32)
    if ((integers != label) | (integers < -1) | (integers >= classes)).any():
        raise UserError(
            f"{path}: labels from {label.min()} to {label.max()}; use whole numbers from 0 to "
            f"{classes - 1}, of model.images.classes, or -1 where none counts"
        )
    return integers


def find_images(source: str | Sequence[str]) -> list[ImageFile]:
    """The images with labels of every source: a folder, a path, or a glob; sorted within each.

    Raises:
        UserError: there are none, or a label is missing.
    """
    paths = [each for name in _names(source) for each in _of(name)]
    if not paths:
        raise UserError(
            f"data.source={source!r} has no images; use folders with .npz files, or with image/ "
            "and label/ of .npy or .png files"
        )
    return paths


def find_classes(source: str | Sequence[str], classes: int) -> list[ImageFile]:
    """The images of every source, a folder with a folder for each class, in the order of names.

    They are shuffled like cards: any part of the list has a like share of each class.

    Raises:
        UserError: there are none, or more classes than the model has.
    """
    folders = [Path(name) for name in _names(source)]
    inside = [each for folder in folders if folder.is_dir() for each in folder.iterdir()]
    names = sorted({each.name for each in inside if each.is_dir()})
    if not 2 <= len(names) <= classes:
        raise UserError(
            f"data.source={source!r} has folders of {len(names)} classes; use 2 to {classes}, of "
            "model.images.classes"
        )
    ranked = []
    for number, name in enumerate(names):
        files = [
            path
            for folder in folders
            for path in sorted((folder / name).glob("*"))
            if path.suffix in ENDINGS
        ]
        ranked += [((place + 0.5) / len(files), number, path) for place, path in enumerate(files)]
    if not ranked:
        raise UserError(f"data.source={source!r} has no {', '.join(ENDINGS)} file in its folders")
    return [ImageFile(path, number) for _, number, path in sorted(ranked)]


def _names(source: str | Sequence[str]) -> Sequence[str]:
    return [source] if isinstance(source, str) else source


def _of(name: str) -> list[ImageFile]:
    folder = Path(name)
    if not folder.is_dir():
        return [ImageFile(path, path) for path in find_files(name)]
    pairs = sorted(path for each in PAIRED for path in (folder / "image").glob(f"*{each}"))
    for path in pairs:
        if not (folder / "label" / path.name).is_file():
            raise UserError(f"{path} has no label; {folder / 'label' / path.name} is missing")
    archives = [ImageFile(path, path) for path in sorted(folder.glob("*.npz"))]
    return archives + [ImageFile(path, folder / "label" / path.name) for path in pairs]


def _array(path: Path, name: str) -> np.ndarray:
    """The array of a file; of a file with several the one of this name."""
    if path.suffix == PNG:
        pillow(f"{path} is a PNG, which")
    try:
        if path.suffix == PNG:
            return _pixels(path, name)
        loaded = np.load(path, allow_pickle=False)
        array = loaded[name] if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
        return np.asarray(array)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} has no array {name!r}: {error}") from error


def _pixels(path: Path, name: str) -> np.ndarray:
    """The pixels of a `.png`; labels may be the numbers of colors."""
    png = read_png(path.read_bytes())
    if png.palette and name == "image":
        raise ValueError("its pixels are numbers of colors; save it as gray or RGB")
    return png.pixels


# ---- samples by their numbers --------------------------------------------------------------------

# A sample is a function of its seed and number alone.


ENDLESS = 2**40  # phantoms before one is drawn again
RECALLED = 512  # samples that are kept in memory
TURNS = 8  # turns by quarters, of an image and of its mirror image
Pair = tuple[np.ndarray, np.ndarray]  # image[S, S, channels], label[S, S] or of the image, []


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSamples(Samples):
    """Images and labels.

    Args:
        read: the number of an image -> the image and its labels.
        count: of images.
        seed: of the order and of turns; None: in their order, as they are.
        augment: whether images are turned and mirrored.
    """

    read: Callable[[int], Pair]
    count: int
    seed: int | None = None
    augment: bool = False

    @property
    def num_tokens(self) -> int:
        """Images."""
        return self.count

    @property
    def amount(self) -> str:
        return f"{self.count:,} training images" if self.count < ENDLESS else "endless phantoms"

    @property
    def windows_per_epoch(self) -> int:
        return self.count

    def field(self, name: str, indices: np.ndarray) -> np.ndarray:
        """`image` float32[B, S, S, channels], or `label` int32[B, S, S] or [B], of numbers[B]."""
        position = ("image", "label").index(name)
        return np.stack([self._sample(int(number))[position] for number in indices])

    @cached_property
    def _sample(self) -> Callable[[int], Pair]:
        return lru_cache(maxsize=RECALLED)(self._make)

    def _make(self, number: int) -> Pair:
        epoch, place = divmod(number, self.count)
        image, label = self.read(self._order(epoch)[place] if self.shuffled else place)
        if not self.augment or self.seed is None:
            return image, label
        turn = int(drawing(self.seed, TURN, number).integers(TURNS))
        return _turned(image, turn), _turned(label, turn) if label.ndim else label

    @property
    def shuffled(self) -> bool:
        """True if each epoch has an order of its own; phantoms are in none."""
        return self.seed is not None and self.count != ENDLESS

    @cached_property
    def _order(self) -> Callable[[int], np.ndarray]:
        def order(epoch: int) -> np.ndarray:
            return drawing(self.seed or 0, ORDER, epoch).permutation(self.count)

        return lru_cache(maxsize=2)(order)

    # ---- what only tokens have ----

    def rows(self, indices: np.ndarray) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")

    def targets(self, indices: np.ndarray) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")

    def first_tokens(self, count: int) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")


def drawn(draw: Callable[[int], Pair], channels: int) -> Callable[[int], Pair]:
    """Reads images that are drawn, the same numbers in every channel.

    draw: the number of an image -> image[S, S] and label.
    """

    def read(number: int) -> Pair:
        image, label = draw(number)
        return np.repeat(image[..., None], channels, -1), label

    return read


def of_files(
    files: Sequence[ImageFile], *, size: int, channels: int, classes: int
) -> Callable[[int], Pair]:
    """Reads files."""
    return lambda number: files[number].read(size, channels, classes)


def _turned(x: np.ndarray, turn: int) -> np.ndarray:
    """x[S, S, ..] turned by so many quarters, and mirrored from 4 on."""
    return np.rot90(x[:, ::-1] if turn >= TURNS // 2 else x, turn % (TURNS // 2))


# ---- from `data.source` to samples of training and of validation ---------------------------------

SHAPES = "shapes"  # phantoms, which need no file
HELD_OUT_PHANTOMS = 256


def open_images(
    config: DataConfig, images: Images, *, seed: int, of_pixels: bool = True
) -> tuple[ImageSamples, ImageSamples | None]:
    """Opens the samples of training, and of validation if `data.validation_fraction` is above 0.

    Args:
        config: names the sources.
        images: sizes, channels and classes of the model.
        seed: of the run.
        of_pixels: whether labels are of pixels, or of whole images.

    Raises:
        UserError: no images, or too few to hold any out; a mixture; other classes than there are;
            PNG files without Pillow.
    """
    if isinstance(config.source, dict):
        raise UserError("data.source: images have no mixture; name folders or files in a list")
    train = partial(ImageSamples, seed=seed, augment=config.augment)
    held_out = config.validation_fraction > 0
    if config.source == SHAPES:
        draw, classes = (phantom, CLASSES) if of_pixels else (figure, len(FIGURES))
        if images.classes < classes:
            raise UserError(
                f"data.source=shapes has {classes} classes, and model.images.classes="
                f"{images.classes}; use {classes} or more"
            )
        first, last = (
            drawn(partial(draw, seed, stream, size=images.size), images.channels)
            for stream in (TRAINING, HELD_OUT)
        )
        held_out_samples = ImageSamples(last, HELD_OUT_PHANTOMS) if held_out else None
        return train(first, ENDLESS), held_out_samples
    if config.source == STDLIB:
        raise UserError("data.source=stdlib is text; use shapes, or folders of images")
    files = find_images(config.source) if of_pixels else find_classes(config.source, images.classes)
    if png := [each.image for each in files if each.image.suffix == PNG]:
        pillow(f"data.source: {png[0]} is a PNG, which")  # before a step is compiled
    count = round(len(files) * config.validation_fraction)
    if held_out and not 0 < count < len(files):
        raise UserError(
            f"data.validation_fraction={config.validation_fraction} of {len(files)} images is "
            f"{count}; use another one, or more images"
        )
    reads = partial(of_files, size=images.size, channels=images.channels, classes=images.classes)
    kept, tested = files[: len(files) - count], files[len(files) - count :]
    validation = ImageSamples(reads(tested), count) if held_out else None
    return train(reads(kept), len(kept)), validation
