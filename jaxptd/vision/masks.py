"""Predicts classes with a trained model of images, as arrays and as PNG files.

A mask is a PNG with a palette: its pixels are class numbers, so it can be read as labels, and
viewers show them in colors. An overlay draws the colors over the image.

Letters: B images, S rows and columns.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.atomic_files import explained, shown, write_whole
from jaxptd.config import Config
from jaxptd.data import NOT_COUNTED, Samples
from jaxptd.distributed import coordination
from jaxptd.errors import UserError
from jaxptd.models.families import family_of, open_data_of, tokenizer_of
from jaxptd.params import Params
from jaxptd.plot import COLORS
from jaxptd.step import Program
from jaxptd.vision.data import ENDINGS, read_image
from jaxptd.vision.family import images_of
from jaxptd.vision.png import Color, pillow, write_png

# ---- classes, and pictures of them ---------------------------------------------------------------

Inputs = tuple[list[str], np.ndarray]  # names, and images[B, S, S, channels]
PREDICTIONS = "predictions.png"  # in a run's directory
SHOWN = 8  # most images in it
DEPTH = 0.45  # opacity of a class's color over an image; class 0, the background, has none
SPREAD = 2.5  # standard deviations from the mean that become black and white
SIDE = 128  # least pixels in a row of an image of a picture
COLORS_OF_PNG = 256
GAP = 4  # pixels between images
LEFT_OUT = (128, 128, 128)  # color of ignored pixels


def classes_field(config: Config) -> str:
    """The field of a batch with the classes of images. Raises UserError for other models."""
    field = family_of(config.model).classes
    if field is None:
        raise UserError(
            f"model.family={config.model.family} does not classify images; use swin-unet or swin"
        )
    return field


def of_pixels(config: Config) -> bool:
    """True if a model classifies each pixel of an image."""
    family = family_of(config.model)
    field = None if family.classes is None else family.fields(config)[family.classes]
    return field is not None and field.length is not None


def classes_of(program: Program, params: Params, image_BSS: np.ndarray) -> np.ndarray:
    """The most likely classes, int32[B, S, S], or `[B]` for whole images.

    Args:
        program: that of a model of images, on any layout.
        params: in the program's form.
        image_BSS: any number of images, `[B, S, S, channels]`.

    Raises:
        UserError: the model does not classify images, or the images have another size.
    """
    label = classes_field(program.config)
    shapes = {name: shape[1:] for name, shape in program.batches.shapes.items()}
    if image_BSS.shape[1:] != shapes["image"] or not len(image_BSS):
        raise UserError(
            f"images {list(image_BSS.shape)}; use {['B', *shapes['image']]}, set by "
            "model.images.size and model.images.channels"
        )
    size, classes = program.config.train.global_batch_size, []
    for first in range(0, len(image_BSS), size):
        image = image_BSS[first : first + size].astype(np.float32)
        missing = [(0, size - len(image))] + [(0, 0)] * 3
        unknown = np.full((size, *shapes[label]), NOT_COUNTED, np.int32)
        batch: Any = {"image": np.pad(image, missing), label: unknown}  # placed by the step
        classes.append(np.asarray(program.classes(params, batch))[: len(image)])
    return np.concatenate(classes)


def palette(classes: int) -> list[Color]:
    """The colors of classes: black, then those of all figures in a cycle."""
    bright = [_rgb(color) for color in COLORS]
    return [(0, 0, 0), *(bright[number % len(bright)] for number in range(classes - 1))]


def _rgb(color: str) -> Color:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue


def overlay(image: np.ndarray, mask: np.ndarray, classes: int) -> np.ndarray:
    """The first channel of an image in gray, with the colors of its mask: uint8[S, S, 3].

    Args:
        image: `[S, S, channels]` with mean 0 and variance 1.
        mask: the class of each pixel, `[S, S]`; below 0 is ignored.
        classes: of the model.
    """
    gray = np.clip((image[..., 0] / SPREAD + 1) / 2, 0, 1) * 255
    colors = np.array([*palette(classes), LEFT_OUT], np.float64)
    share = np.where(mask == 0, 0.0, DEPTH)[..., None]
    mixed = gray[..., None] * (1 - share) + colors[mask] * share  # -1 takes the last color
    return np.round(mixed).astype(np.uint8)


def picture(rows: list[list[np.ndarray]]) -> np.ndarray:
    """Arranges images `[S, S, 3]` in rows, enlarges small ones, with white in between."""
    side = rows[0][0].shape[0]
    times = -(-SIDE // side)

    def framed(image: np.ndarray) -> np.ndarray:
        large = image.repeat(times, 0).repeat(times, 1)
        return np.pad(large, ((0, GAP), (0, GAP), (0, 0)), constant_values=255)

    return np.concatenate([np.concatenate([framed(x) for x in row], 1) for row in rows])


@dataclasses.dataclass(frozen=True)
class Masks:
    """Images with the classes of their pixels.

    Args:
        image: `[B, S, S, channels]`.
        found: the predicted classes, `[B, S, S]`.
        classes: of the model.
    """

    image: np.ndarray
    found: np.ndarray
    classes: int

    def files(self, folder: Path, names: list[str]) -> Mapping[Path, bytes]:
        """A mask and an overlay for each image, as PNG files.

        Raises:
            UserError: there are more classes than colors.
        """
        if self.classes > COLORS_OF_PNG:
            raise UserError(
                f"model.images.classes={self.classes}: a PNG has {COLORS_OF_PNG} colors; use "
                "Run.classes"
            )
        colors, files = palette(self.classes), {}
        for name, image, mask in zip(names, self.image, self.found, strict=True):
            files[folder / f"{name}.png"] = write_png(mask, colors)
            over = write_png(overlay(image, mask, self.classes))
            files[folder / f"{name}-overlay.png"] = over
        return files

    def comparison(self, label: np.ndarray) -> bytes:
        """A PNG with a row per image: the image, its labels, and the predicted classes."""
        plain = np.zeros_like(self.found)
        each = zip(self.image, plain, label, self.found, strict=True)
        rows = [[overlay(image, mask, self.classes) for mask in masks] for image, *masks in each]
        return write_png(picture(rows))


def final_picture(
    classes: Callable[[np.ndarray], np.ndarray], config: Config, validation: Samples, path: Path
) -> str:
    """Writes the picture of predictions that a run ends with, and returns a line about it.

    Args:
        classes: `Run.classes`.
        config: the run's.
        validation: held-out images.
        path: the picture's.
    """
    count = min(SHOWN, validation.windows_per_epoch)
    image, label = (held_out(config, validation, name, count) for name in ("image", "label"))
    masks = Masks(image, classes(image), images_of(config.model).classes)
    try:
        if coordination.is_first():
            write_pictures({path: masks.comparison(label)})
    except UserError as error:
        return f"no picture of predictions: {error}"
    return f"{path}: {count} held-out images, their labels, and the classes that were found"


def held_out(config: Config, validation: Samples, field: str, count: int) -> np.ndarray:
    """A field of the first held-out images."""
    batch = family_of(config.model).rows(validation, field, np.arange(count))
    return np.asarray(batch)


def write_pictures(files: Mapping[Path, bytes]) -> None:
    """Writes all PNG files or none, and creates their folders.

    Raises:
        UserError: the system refuses.
    """
    explain: Callable[[Path], AbstractContextManager[None]] = partial(_explained)
    for folder in {path.parent for path in files}:
        with explain(folder):
            folder.mkdir(parents=True, exist_ok=True)
    write_whole(files, explain)


def write_classes(
    program: Program, params: Params, images: Inputs, *, folder: Path
) -> list[dict[str, Any]]:
    """Classifies images; writes classes of pixels as masks and overlays, all or none.

    Args:
        program: that of a model of images, on any layout.
        params: in the program's form.
        images: names, and images.
        folder: the files' folder, created if missing.

    Returns:
        For each image its name `image`, and its `class`, or the paths of its `mask` and `overlay`.

    Raises:
        UserError: as `classes_of` and `Masks.files`; Pillow is missing; a file cannot be written.
    """
    names, image = images
    if has_masks := of_pixels(program.config):
        pillow("a mask is a PNG, which")  # before any is computed
    classes = classes_of(program, params, image)
    if not has_masks:
        return [{"image": n, "class": int(each)} for n, each in zip(names, classes, strict=True)]
    files = Masks(image, classes, images_of(program.config.model).classes).files(folder, names)
    write_pictures(files)
    paths = [str(path) for path in files]
    rows = zip(names, paths[::2], paths[1::2], strict=True)
    return [{"image": name, "mask": mask, "overlay": over} for name, mask, over in rows]


def _explained(path: Path) -> Any:
    return explained(f"cannot write {shown(path)}", "name another directory")


# ---- the images to classify: held-out samples of a run, or files ---------------------------------


def held_out_inputs(config: Config, count: int) -> Inputs:
    """The first held-out images of a run, at most `count`.

    Raises:
        UserError: its data cannot be opened, or it holds out no image.
    """
    data = open_data_of(config, tokenizer_of(config)).validation
    if data is None:
        raise UserError("data.validation_fraction=0: the run holds out no image; use --images")
    count = min(count, data.windows_per_epoch)
    names = [f"held-out-{number:04d}" for number in range(count)]
    return names, held_out(config, data, "image", count)


def inputs_of(config: Config, paths: Sequence[Path]) -> Inputs:
    """The images of files and of all files in folders, named like the files without extension.

    Raises:
        UserError: there are none, two share a name, or they are not images of the model's size.
    """
    files = [each for path in paths for each in _files(path)]
    names = [path.stem for path in files]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"two images are named {twice[0]}, as would be their masks; give them one by one"
        )
    images = images_of(config.model)
    images_read = [read_image(path, images.size, images.channels) for path in files]
    return names, np.stack(images_read)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    paths = sorted(each for each in path.iterdir() if each.suffix in ENDINGS)
    if not paths:
        raise UserError(f"{path} has no {', '.join(ENDINGS)} file; name another folder")
    return paths
