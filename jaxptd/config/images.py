"""The section `model.images` of a config, and what the families of images have in it.

Source of the presets: Cao et al., Swin-Unet, arXiv 2105.05537; Liu et al., Swin, arXiv 2103.14030.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Self

from jaxptd.config.checks import Section, require_positive, require_share
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields

NAME = "model.images"

Dice = Literal["image", "batch"]


@named_fields
@dataclasses.dataclass(frozen=True)
class Images(Section):
    """An image model: its levels of patches and windows.

    Level l has patches of `patch * 2**l` pixels, hidden size hidden_size * 2**l, and
    num_heads * 2**l heads.

    Args:
        size: side of a square image in pixels.
        channels: channels of a pixel.
        classes: number of classes, of pixels (swin-unet) or images (swin).
        patch: side of a patch at level 0 in pixels.
        window: side of an attention window in patches.
        depths: blocks of each level on the way down, in pairs of plain and shifted windows.
        decoder_depths: blocks of each level on the way up, finest level first; an encoder has none;
            null is as many as on the way down.
        dice: swin-unet's Dice loss, per image, or per batch as published.
        drop_path: stochastic depth: fraction of samples that skip the last block; it grows from 0
            at the first block.
    """

    size: int = 224
    channels: int = 3
    classes: int = 1000
    patch: int = 4
    window: int = 7
    depths: tuple[int, ...] = (2, 2, 6, 2)
    decoder_depths: tuple[int, ...] = ()
    dice: Dice | None = None
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, NAME)
        require_positive(NAME, self, "size", "channels", "classes", "patch", "window")
        require_share(NAME, self, "drop_path")
        if self.classes < 2:
            raise UserError(f"{NAME}.classes={self.classes}: use 2 or more")
        for name in ("depths", "decoder_depths"):
            depths = getattr(self, name)
            if any(depth < 2 or depth % 2 for depth in depths):
                raise UserError(
                    f"{NAME}.{name}={quoted(list(depths))}: every second block of a level "
                    "shifts its windows; use even numbers, 2 or more"
                )

    def filled(self, values: Mapping[str, Any]) -> Self:
        """These options with others, and as many blocks on the way up as on the way down."""
        depths = values.get("depths", self.depths)
        if self.decoder_depths and isinstance(depths, list | tuple):
            values = {"decoder_depths": tuple(depths[:-1]), **values}
        return super().filled(values)

    def rows(self, level: int) -> int:
        """Rows of patches of a level, and patches in a row."""
        return self.size // (self.patch * 2**level)

    def window_at(self, level: int) -> int:
        """Patches per side of a level's windows; a smaller level is a single window."""
        return min(self.window, self.rows(level))

    def in_strips(self, level: int, devices: int) -> bool:
        """True if this many devices can share a level's images in strips of rows of windows."""
        return windows_split(self.rows(level), self.window_at(level), devices)

    def shift(self, level: int) -> int:
        """Patches by which every second block shifts its windows; 0 if there is only one window."""
        return self.window // 2 if self.rows(level) > self.window else 0


def windows_split(rows: int, window: int, devices: int) -> bool:
    """True if whole rows of windows split over devices."""
    return rows % (window * devices) == 0


# What the families of images have where a config says nothing.
SWIN = Images()
SWIN_UNET = Images(
    channels=1, classes=4, depths=(2, 2, 2, 2), decoder_depths=(2, 2, 2), dice="image"
)


def check_images(family: str, images: Images, *, preset: Images) -> None:
    """Raises UserError for options of images that do not fit each other, or have no effect.

    Args:
        family: its name, for messages.
        images: the options.
        preset: those of the family.
    """
    if images.dice and not preset.dice:
        raise UserError(
            f"{NAME}.dice={images.dice} has no effect with the family {family}, whose loss has "
            "no Dice coefficient; leave it out"
        )
    levels, ups = len(images.depths), len(images.decoder_depths)
    has_decoder = bool(preset.decoder_depths)
    if levels < 1 + has_decoder:
        raise UserError(
            f"{NAME}.depths={quoted(list(images.depths))} has {levels} levels; use "
            f"{1 + has_decoder} or more"
        )
    if ups != (levels - 1) * has_decoder:
        raise UserError(
            f"{NAME}.decoder_depths={quoted(list(images.decoder_depths))}: {NAME}.depths has "
            f"{levels} levels, so the family {family} has {(levels - 1) * has_decoder} on the way "
            "up; use as many numbers, or null"
        )
    _check_levels(images)


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
                f"{NAME}.size={images.size} does not split into patches of {unit} pixels at "
                f"level {level}; use a multiple of {unit_of_all * images.window} (whole windows of "
                f"each level), or fewer {NAME}.depths"
            )
        if rows > images.window and rows % images.window:
            raise UserError(
                f"{NAME}.size={images.size} makes {rows} rows of patches at level {level}, "
                f"which windows of {NAME}.window={images.window} do not divide; use a "
                f"{NAME}.window of {_windows(images)}"
            )
