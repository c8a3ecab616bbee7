"""Images and what they show, in files: the labels of their pixels, or folders with a class's name.

Labels of pixels are in `.npz` files with both, or in folders with `image/` and `label/` of `.npy`
or `.png`. `.npz` files are those that the preprocessing of Swin-Unet's code writes: a slice each,
`image` `[S, S]` and `label` `[S, S]`. With several channels an image is `[S, S, channels]`.
"""

import dataclasses
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxptd.data.sources import find_files
from jaxptd.errors import UserError
from jaxptd.vision.phantoms import normalised
from jaxptd.vision.png import pillow, read_png

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
            "model.image_size and model.image_channels: resize it first"
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
            f"{path}: label {list(label.shape)}; use {[size, size]}, of model.image_size: resize "
            "it first"
        )
    whole: np.ndarray = label.astype(np.int32)
    if ((whole != label) | (whole < -1) | (whole >= classes)).any():
        raise UserError(
            f"{path}: labels from {label.min()} to {label.max()}; use whole numbers from 0 to "
            f"{classes - 1}, of model.image_classes, or -1 where none counts"
        )
    return whole


def find_images(source: str | Sequence[str]) -> list[ImageFile]:
    """The images with labels of every source: a folder, a path, or a glob; sorted within each.

    Raises:
        UserError: there are none, or a label is missing.
    """
    found = [each for name in _names(source) for each in _of(name)]
    if not found:
        raise UserError(
            f"data.source={source!r} has no images; use folders with .npz files, or with image/ "
            "and label/ of .npy or .png files"
        )
    return found


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
            "model.image_classes"
        )
    found = []
    for number, name in enumerate(names):
        files = [
            path
            for folder in folders
            for path in sorted((folder / name).glob("*"))
            if path.suffix in ENDINGS
        ]
        found += [((place + 0.5) / len(files), number, path) for place, path in enumerate(files)]
    if not found:
        raise UserError(f"data.source={source!r} has no {', '.join(ENDINGS)} file in its folders")
    return [ImageFile(path, number) for _, number, path in sorted(found)]


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
    whole = [ImageFile(path, path) for path in sorted(folder.glob("*.npz"))]
    return whole + [ImageFile(path, folder / "label" / path.name) for path in pairs]


def _array(path: Path, name: str) -> np.ndarray:
    """The array of a file; of a file with several the one of this name."""
    if path.suffix == PNG:
        pillow(f"{path} is a PNG, which")
    try:
        if path.suffix == PNG:
            return _pixels(path, name)
        found = np.load(path, allow_pickle=False)
        array = found[name] if isinstance(found, np.lib.npyio.NpzFile) else found
        return np.asarray(array)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} has no array {name!r}: {error}") from error


def _pixels(path: Path, name: str) -> np.ndarray:
    """The pixels of a `.png`; labels may be the numbers of colors."""
    found = read_png(path.read_bytes())
    if found.palette and name == "image":
        raise ValueError("its pixels are numbers of colors; save it as gray or RGB")
    return found.pixels
