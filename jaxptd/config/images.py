"""The options of models of images, and the presets of their families.

Source of the presets: Cao et al., Swin-Unet, arXiv 2105.05537; Liu et al., Swin, arXiv 2103.14030.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxptd.errors import UserError, quoted

Dice = Literal["image", "batch"]
PREFIX = "image_"  # of the fields of `ModelConfig` that only these models have


@dataclasses.dataclass(frozen=True)
class Images:
    """The options of a model of images, none of them open; `ModelConfig` has them as `image_*`.

    Level l has patches of `patch * 2**l` pixels, hidden_size * 2**l numbers each, and
    num_heads * 2**l heads.

    Args:
        size: pixels in a row of an image, and rows.
        channels: numbers of a pixel.
        classes: of pixels, or of whole images.
        patch: pixels in a row of a patch of level 0.
        window: patches in a row of a window, in which attention is.
        depths: blocks of each level on the way down, in pairs.
        decoder_depths: the same on the way up, from level 0 on; none of an encoder.
        dice: whether a Dice loss is of each image or of a batch; None of whole images' classes.
    """

    size: int
    channels: int
    classes: int
    patch: int
    window: int
    depths: tuple[int, ...]
    decoder_depths: tuple[int, ...]
    dice: Dice | None

    def rows(self, level: int) -> int:
        """Rows of patches of a level, and patches in a row."""
        return self.size // (self.patch * 2**level)

    def window_at(self, level: int) -> int:
        """Patches in a row of a level's windows: a smaller level is one window."""
        return min(self.window, self.rows(level))

    def in_strips(self, level: int, devices: int) -> bool:
        """True if so many devices can share a level's images in strips of rows of windows."""
        return windows_split(self.rows(level), self.window_at(level), devices)

    def shift(self, level: int) -> int:
        """Patches by which every second block shifts its windows: none where there is only one."""
        return self.window // 2 if self.rows(level) > self.window else 0


def windows_split(rows: int, window: int, devices: int) -> bool:
    """True if whole windows, rows of them, split over devices."""
    return rows % (window * devices) == 0


_SWIN: Mapping[str, Any] = {
    "size": 224,
    "channels": 3,
    "classes": 1000,
    "patch": 4,
    "window": 7,
    "depths": (2, 2, 6, 2),
    "decoder_depths": (),
    "dice": None,
}
_SWIN_UNET: Mapping[str, Any] = {
    **_SWIN,
    "channels": 1,
    "classes": 4,
    "depths": (2, 2, 2, 2),
    "decoder_depths": None,  # as `depths`
    "dice": "image",
}
# What the families of images have where a config says nothing; other families have no row.
IMAGES: Mapping[str, Mapping[str, Any]] = {"swin": _SWIN, "swin-unet": _SWIN_UNET}


def image_options(model: Any) -> Images | None:
    """The options of a `ModelConfig`, those that are null as its family has them, or None."""
    presets = IMAGES.get(model.family)
    if presets is None:
        return None
    options = {
        name: preset if (given := getattr(model, PREFIX + name)) is None else given
        for name, preset in presets.items()
    }
    if options["decoder_depths"] is None:
        options["decoder_depths"] = options["depths"][:-1]
    return Images(**options)


def check_images(model: Any) -> None:
    """Raises UserError for options of images that do not fit each other, or have no effect."""
    images = image_options(model)
    if images is None:
        _refuse_any(model)
        return
    names = ("size", "channels", "classes", "patch", "window")
    if wrong := [name for name in names if getattr(images, name) < 1]:
        raise UserError(
            f"model.{PREFIX}{wrong[0]}={getattr(images, wrong[0])} must be positive; use 1 or more"
        )
    if images.classes < 2:
        raise UserError(f"model.image_classes={images.classes} tells nothing apart; use 2 or more")
    if images.dice and not IMAGES[model.family]["dice"]:
        raise UserError(
            f"model.image_dice={images.dice} has no effect with the family {model.family}, whose "
            "loss has no Dice coefficient; leave it out"
        )
    _check_depths(model, images)
    _check_levels(images)


def _refuse_any(model: Any) -> None:
    """Raises UserError for options that only models of images have."""
    names = [f.name for f in dataclasses.fields(model) if f.name.startswith(PREFIX)]
    given = [name for name in (*names, "drop_path") if getattr(model, name)]
    if given:
        raise UserError(
            f"model.{given[0]}={quoted(getattr(model, given[0]))} has no effect with the family "
            f"{model.family}; leave it out, or use model.family=swin-unet"
        )


def _check_depths(model: Any, images: Images) -> None:
    both = {"image_depths": images.depths, "image_decoder_depths": images.decoder_depths}
    for name, depths in both.items():
        if any(depth < 2 or depth % 2 for depth in depths):
            raise UserError(
                f"model.{name}={quoted(list(depths))}: every second block of a level shifts its "
                "windows; use even numbers, 2 or more"
            )
    levels, ups = len(images.depths), len(images.decoder_depths)
    has_decoder = IMAGES[model.family]["decoder_depths"] is None
    if levels < 1 + has_decoder:
        raise UserError(
            f"model.image_depths={quoted(list(images.depths))} has {levels} levels; use "
            f"{1 + has_decoder} or more"
        )
    if ups != (levels - 1) * has_decoder:
        raise UserError(
            f"model.image_decoder_depths={quoted(list(images.decoder_depths))}: "
            f"model.image_depths has {levels} levels, so the family {model.family} has "
            f"{(levels - 1) * has_decoder} on the way up; use as many numbers, or null"
        )


def _windows(images: Images) -> str:
    """Lists the largest windows, up to six, into which the rows of each level split."""
    levels = [images.rows(level) for level in range(len(images.depths))]
    sizes = [
        size
        for size in range(1, max(levels) + 1)
        if all(rows <= size or rows % size == 0 for rows in levels)
    ]
    return ", ".join(map(str, sizes[-6:]))


def _check_levels(images: Images) -> None:
    """Raises UserError unless each level splits into patches, and these into windows."""
    unit_of_all = images.patch * 2 ** (len(images.depths) - 1)
    for level in range(len(images.depths)):
        unit, rows = images.patch * 2**level, images.rows(level)
        if images.size % unit:
            raise UserError(
                f"model.image_size={images.size} does not split into patches of {unit} pixels at "
                f"level {level}; use a multiple of {unit_of_all * images.window} (whole windows of "
                "each level), or fewer model.image_depths"
            )
        if rows > images.window and rows % images.window:
            raise UserError(
                f"model.image_size={images.size} makes {rows} rows of patches at level {level}, "
                f"which windows of model.image_window={images.window} do not divide; use a "
                f"model.image_window of {_windows(images)}"
            )
