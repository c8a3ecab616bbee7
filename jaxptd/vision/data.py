"""Images and their labels by sample number, from files or drawn.

Images with labels of pixels come from `.npz` files, or from folders with `image/` and `label/` of
`.npy` or `.png`. The `.npz` files are those that Swin-Unet's preprocessing writes: one slice each,
`image` `[S, S]` and `label` `[S, S]`. With several channels an image is `[S, S, channels]`. Whole
images are in a folder named after their class.

Drawn images are functions of a seed and a number. A phantom imitates a slice of a heart's MRI: a
bright chamber in a dark ring (the left ventricle and its muscle), the right ventricle next to them,
on a background with soft stripes and noise. Classes are numbered as in the data set ACDC: 0
background, 1 right ventricle, 2 muscle, 3 left ventricle.

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
from jaxptd.stores import is_url
from jaxptd.vision.png import pillow, read_png

# ---- phantoms of a heart -------------------------------------------------------------------------

CLASSES = 4
NOISE = 0.15  # standard deviation; a figure and its surroundings differ by about 0.6
TRAINING, HELD_OUT, ORDER, TURN = range(4)  # random streams: samples, and draws for all data


def phantom(seed: int, stream: int, number: int, *, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The image, float32[S, S] with mean 0 and variance 1, and the labels, int32[S, S].

    Args:
        seed: of the run, 0 or more.
        stream: of numbers; two streams have no phantom in common.
        number: of the sample.
        size: S.
    """
    rng = drawing(seed, stream, number)
    axis = (np.arange(size) + 0.5) / size - 0.5
    turn, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0.15, 0.21)
    x, y = turned(axis - rng.uniform(-0.08, 0.08), axis - rng.uniform(-0.08, 0.08), turn)
    shape = rng.uniform(0.85, 1.0)
    thickness = rng.uniform(0.3, 0.45)
    heart = (x / radius) ** 2 + (y / (radius * shape)) ** 2
    chamber = heart < (1 - thickness) ** 2
    beside, wide = rng.uniform(0.8, 1.0) * radius, rng.uniform(0.75, 0.95) * radius
    right = ((x - beside) / wide) ** 2 + (y / (1.25 * wide)) ** 2 < 1
    label = np.zeros((size, size), np.int32)
    label[right] = 1
    label[heart < 1] = 2
    label[chamber] = 3
    levels = np.array([0.35, 0.95, 0.25, 1.0]) + rng.uniform(-0.08, 0.08, CLASSES)
    waves = rng.uniform(-6, 6, (3, 2)), rng.uniform(0, 2 * np.pi, 3)
    stripes = sum(
        np.cos(2 * np.pi * (a * axis[:, None] + b * axis) + phase)
        for (a, b), phase in zip(*waves, strict=True)
    )
    image = levels[label] + 0.06 * stripes + NOISE * rng.standard_normal((size, size))
    return normalised(image), label


def drawing(seed: int, stream: int, number: int) -> np.random.Generator:
    """The random generator of a stream's sample, or of an epoch."""
    # The counter's highest word, which no number of draws reaches, holds the sample's number.
    counter = np.array([0, 0, stream, number], np.uint64)
    return np.random.Generator(np.random.Philox(key=seed, counter=counter))


def normalised(image: np.ndarray) -> np.ndarray:
    """The image with mean 0 and variance 1, float32; without contrast it is 0."""
    spread = float(image.std())
    return ((image - image.mean()) / (spread or 1.0)).astype(np.float32)


def turned(down: np.ndarray, right: np.ndarray, turn: float) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of all pixels, rotated by an angle, `[S, S]` each."""
    y, x = np.meshgrid(down, right, indexing="ij")
    return x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)


# ---- figures with one class each -----------------------------------------------------------------

# A disc, a square, a triangle or a ring of any size and place, slightly rotated, with noise.

FIGURES = ("disc", "square", "triangle", "ring")
TILT = 0.3  # a figure's largest rotation to either side


def figure(seed: int, stream: int, number: int, *, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The image, float32[S, S] with mean 0 and variance 1, and the number of its kind, int32[].

    Args:
        seed: of the run, 0 or more.
        stream: of numbers; two streams have no figure in common.
        number: of the sample.
        size: S.
    """
    rng = drawing(seed, stream, number)
    kind = int(rng.integers(len(FIGURES)))
    axis = (np.arange(size) + 0.5) / size - 0.5
    down, right = rng.uniform(-0.15, 0.15, 2)
    x, y = turned(axis - down, axis - right, rng.uniform(-TILT, TILT))
    radius = rng.uniform(0.22, 0.34)
    x, y = x / radius, y / radius
    around = x**2 + y**2
    insides = (
        around < 0.8,
        np.maximum(abs(x), abs(y)) < 0.75,
        np.maximum(-y, y / 2 + abs(x) * 0.75**0.5) < 0.5,
        (around < 1) & (around > 0.35),
    )
    bright = rng.choice([-1, 1]) * rng.uniform(0.6, 1.0)
    image = bright * insides[kind] + NOISE * rng.standard_normal((size, size))
    return normalised(image), np.array(kind, np.int32)


# ---- images and their labels, in files -----------------------------------------------------------

PNG = ".png"
PAIRED = (".npy", PNG)  # extensions of files with an image, or with its labels
ENDINGS = (".npz", *PAIRED)


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """An image in a file, and its label.

    Args:
        image: the file with the image, or with both.
        label: the file with the labels of its pixels, or the class of the whole image.
    """

    image: Path
    label: Path | int

    def read(self, size: int, channels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """The image, float32[S, S, channels] with mean 0 and variance 1, and int32[S, S] or [].

        Raises:
            UserError: a file is broken, or has other sizes or classes.
        """
        image = read_image(self.image, size, channels)
        if isinstance(self.label, int):
            return image, np.array(self.label, np.int32)
        return image, read_label(self.label, size, classes)


def read_image(path: Path, size: int, channels: int) -> np.ndarray:
    """The image of a file, float32[S, S, channels] with mean 0 and variance 1.

    A gray image is the same in every channel.

    Raises:
        UserError: the file is broken, or has another size.
    """
    image = _array(path, "image")
    image = image[..., None] if image.ndim == 2 else image
    image = image.repeat(channels, -1) if image.shape[2:] == (1,) else image
    if image.shape != (size, size, channels):
        raise UserError(
            f"{path}: image {list(image.shape)}; use {[size, size, channels]}, set by "
            "model.images.size and model.images.channels: resize it first"
        )
    if image.dtype.kind not in "fiu" or not np.isfinite(image).all():
        raise UserError(f"{path}: an image of {image.dtype}; use finite numbers")
    return normalised(image.astype(np.float64))


def read_label(path: Path, size: int, classes: int) -> np.ndarray:
    """The labels of the pixels of an image, int32[S, S].

    Raises:
        UserError: the file is broken, or has another size or other classes.
    """
    label = _array(path, "label")
    label = label[..., 0] if label.shape[2:] == (1,) else label
    if label.shape != (size, size):
        raise UserError(
            f"{path}: label {list(label.shape)}; use {[size, size]}, set by model.images.size: "
            "resize it first"
        )
    integers: np.ndarray = label.astype(np.int32)
    if ((integers != label) | (integers < -1) | (integers >= classes)).any():
        raise UserError(
            f"{path}: labels from {label.min()} to {label.max()}; use whole numbers from 0 to "
            f"{classes - 1}, set by model.images.classes, or -1 to ignore a pixel"
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
    """The images of every source: a folder with a folder for each class, in the order of names.

    They are interleaved, so any part of the list has about the same share of each class.

    Raises:
        UserError: there are none, or more classes than the model has.
    """
    folders = [_folder(name) for name in _names(source)]
    inside = [each for folder in folders if folder.is_dir() for each in folder.iterdir()]
    names = sorted({each.name for each in inside if each.is_dir()})
    if not 2 <= len(names) <= classes:
        raise UserError(
            f"data.source={source!r} has folders of {len(names)} classes; use 2 to {classes}, set "
            "by model.images.classes"
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


def _folder(name: str) -> Path:
    if is_url(name):
        raise UserError(f"data.source={name!r}: images are read from a disk only; copy them here")
    return Path(name)


def _of(name: str) -> list[ImageFile]:
    folder = _folder(name)
    if not folder.is_dir():
        return [ImageFile(path, path) for path in find_files(name) if isinstance(path, Path)]
    pairs = sorted(path for each in PAIRED for path in (folder / "image").glob(f"*{each}"))
    for path in pairs:
        if not (folder / "label" / path.name).is_file():
            raise UserError(f"{path} has no label; {folder / 'label' / path.name} is missing")
    archives = [ImageFile(path, path) for path in sorted(folder.glob("*.npz"))]
    return archives + [ImageFile(path, folder / "label" / path.name) for path in pairs]


def _array(path: Path, name: str) -> np.ndarray:
    """The array of a file; if it holds several, the one of this name."""
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
    """The pixels of a `.png`; labels may be palette indices."""
    png = read_png(path.read_bytes())
    if png.palette and name == "image":
        raise ValueError("its pixels are palette indices; save it as gray or RGB")
    return png.pixels


# ---- samples by their numbers --------------------------------------------------------------------

# A sample depends only on its seed and number.


ENDLESS = 2**40  # phantoms before one repeats
RECALLED = 512  # samples cached in memory
TURNS = 8  # quarter turns of an image and of its mirror image
Pair = tuple[np.ndarray, np.ndarray]  # image[S, S, channels], label[S, S] or [] per image


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSamples(Samples):
    """Images and labels.

    Args:
        read: the number of an image -> the image and its labels.
        count: number of images.
        seed: for order and turns; None: original order, unturned.
        augment: whether images are turned and mirrored.
    """

    read: Callable[[int], Pair]
    count: int
    seed: int | None = None
    augment: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of images."""
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
        """True if each epoch has its own order; phantoms have none."""
        return self.seed is not None and self.count != ENDLESS

    @cached_property
    def _order(self) -> Callable[[int], np.ndarray]:
        def order(epoch: int) -> np.ndarray:
            return drawing(self.seed or 0, ORDER, epoch).permutation(self.count)

        return lru_cache(maxsize=2)(order)

    # ---- only for tokens ----

    def rows(self, indices: np.ndarray) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")

    def targets(self, indices: np.ndarray) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")

    def first_tokens(self, count: int) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")


def drawn(draw: Callable[[int], Pair], channels: int) -> Callable[[int], Pair]:
    """Reads drawn images, the same in every channel.

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
    """x[S, S, ..] after `turn` quarter turns, mirrored from 4 on."""
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
        seed: the run's.
        of_pixels: whether labels are of pixels, or of whole images.

    Raises:
        UserError: no images, or too few to hold any out; a mixture; a wrong number of classes; PNG
            files without Pillow.
    """
    if isinstance(config.source, dict):
        raise UserError("data.source: images support no mixture; name folders or files in a list")
    train = partial(ImageSamples, seed=seed, augment=config.augment)
    held_out = config.validation_fraction > 0
    if config.source == SHAPES:
        draw, classes = (phantom, CLASSES) if of_pixels else (figure, len(FIGURES))
        if images.classes < classes:
            raise UserError(
                f"data.source=shapes has {classes} classes, but model.images.classes="
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
            f"{count}; use another fraction, or more images"
        )
    reads = partial(of_files, size=images.size, channels=images.channels, classes=images.classes)
    kept, tested = files[: len(files) - count], files[len(files) - count :]
    validation = ImageSamples(reads(tested), count) if held_out else None
    return train(reads(kept), len(kept)), validation
