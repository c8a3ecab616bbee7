"""Images and labels in files: `.npz` with both, or a folder with `image/` and `label/` of `.npy`.

`.npz` files are those that the preprocessing of Swin-Unet's code writes: a slice each, `image`
`[S, S]` and `label` `[S, S]`. With several channels an image is `[S, S, channels]`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxptd.data.images.phantoms import normalised
from jaxptd.data.sources import find_files
from jaxptd.errors import UserError


@dataclasses.dataclass(frozen=True)
class ImageFile:
    """An image and its labels, as files.

    Args:
        image: with the image, or with both.
        label: with the labels.
    """

    image: Path
    label: Path

    def read(self, size: int, channels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """The image, float32[S, S, channels] with mean 0 and variance 1, and int32[S, S] labels.

        Raises:
            UserError: a file is broken, of other sizes, or has other classes.
        """
        image, label = _array(self.image, "image"), _array(self.label, "label")
        image = image[..., None] if image.ndim == 2 else image
        shape = (size, size, channels)
        if image.shape != shape or label.shape != shape[:2]:
            raise UserError(
                f"{self.image}: image {list(image.shape)} and label {list(label.shape)}; use "
                f"{list(shape)} and {list(shape[:2])}, of model.image_size and "
                "model.image_channels: resize them first"
            )
        if image.dtype.kind not in "fiu" or not np.isfinite(image).all():
            raise UserError(f"{self.image}: an image of {image.dtype}; use finite numbers")
        whole: np.ndarray = label.astype(np.int32)
        if ((whole != label) | (whole < -1) | (whole >= classes)).any():
            raise UserError(
                f"{self.label}: labels from {label.min()} to {label.max()}; use whole numbers from "
                f"0 to {classes - 1}, of model.image_classes, or -1 where none counts"
            )
        return normalised(image.astype(np.float64)), whole


def find_images(source: str | Sequence[str]) -> list[ImageFile]:
    """The images of every source: a folder, a path, or a glob; sorted within each.

    Raises:
        UserError: there are none, or a label is missing.
    """
    names = [source] if isinstance(source, str) else source
    found = [each for name in names for each in _of(name)]
    if not found:
        raise UserError(f"data.source={source!r} has no images; use folders with .npz files")
    return found


def _of(name: str) -> list[ImageFile]:
    folder = Path(name)
    if not folder.is_dir():
        return [ImageFile(path, path) for path in find_files(name)]
    pairs = sorted((folder / "image").glob("*.npy"))
    for path in pairs:
        if not (folder / "label" / path.name).is_file():
            raise UserError(f"{path} has no label; {folder / 'label' / path.name} is missing")
    whole = [ImageFile(path, path) for path in sorted(folder.glob("*.npz"))]
    return whole + [ImageFile(path, folder / "label" / path.name) for path in pairs]


def _array(path: Path, name: str) -> np.ndarray:
    """The array of a file; of a file with several the one of this name."""
    try:
        found = np.load(path, allow_pickle=False)
        array = found[name] if isinstance(found, np.lib.npyio.NpzFile) else found
        return np.asarray(array)
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise UserError(f"{path} has no array {name!r}: {error}") from error
