"""Opens the images of a run: from `data.source` to samples of training and of validation."""

from functools import partial
from typing import TYPE_CHECKING

from jaxptd.data.images.files import find_images
from jaxptd.data.images.phantoms import CLASSES, HELD_OUT, TRAINING
from jaxptd.data.images.samples import ENDLESS, ImageSamples, of_files, of_phantoms
from jaxptd.data.sources import STDLIB
from jaxptd.errors import UserError

if TYPE_CHECKING:
    from jaxptd.config import DataConfig, Images  # imports JAX

SHAPES = "shapes"  # phantoms, which need no file
HELD_OUT_PHANTOMS = 256


def open_images(
    config: "DataConfig", images: "Images", seed: int
) -> tuple[ImageSamples, ImageSamples | None]:
    """Opens the samples of training, and of validation if `data.validation_fraction` is above 0.

    Args:
        config: names the sources.
        images: sizes, channels and classes of the model.
        seed: of the run.

    Raises:
        UserError: no images, or too few to hold any out; a mixture; other classes than phantoms'.
    """
    if isinstance(config.source, dict):
        raise UserError("data.source: images have no mixture; name folders or files in a list")
    train = partial(ImageSamples, seed=seed, augment=config.augment)
    held_out = config.validation_fraction > 0
    if config.source == SHAPES:
        if images.classes < CLASSES:
            raise UserError(
                f"data.source=shapes has {CLASSES} classes, and model.image_classes="
                f"{images.classes}; use {CLASSES} or more"
            )
        draw = partial(of_phantoms, seed, size=images.size, channels=images.channels)
        others = ImageSamples(draw(HELD_OUT), HELD_OUT_PHANTOMS) if held_out else None
        return train(draw(TRAINING), ENDLESS), others
    if config.source == STDLIB:
        raise UserError("data.source=stdlib is text; use shapes, or folders of images")
    files = find_images(config.source)
    count = round(len(files) * config.validation_fraction)
    if held_out and not 0 < count < len(files):
        raise UserError(
            f"data.validation_fraction={config.validation_fraction} of {len(files)} images is "
            f"{count}; use another one, or more images"
        )
    reads = partial(of_files, size=images.size, channels=images.channels, classes=images.classes)
    first, last = files[: len(files) - count], files[len(files) - count :]
    validation = ImageSamples(reads(last), count) if held_out else None
    return train(reads(first), len(first)), validation
