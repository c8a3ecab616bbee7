"""Opens the images of a run: from `data.source` to samples of training and of validation."""

from functools import partial
from typing import TYPE_CHECKING

from jaxptd.data.sources import STDLIB
from jaxptd.errors import UserError
from jaxptd.vision.data import PNG, find_classes, find_images
from jaxptd.vision.phantoms import CLASSES, FIGURES, HELD_OUT, TRAINING, figure, phantom
from jaxptd.vision.png import pillow
from jaxptd.vision.samples import ENDLESS, ImageSamples, drawn, of_files

if TYPE_CHECKING:
    from jaxptd.config import DataConfig, Images  # imports JAX

SHAPES = "shapes"  # phantoms, which need no file
HELD_OUT_PHANTOMS = 256


def open_images(
    config: "DataConfig", images: "Images", *, seed: int, of_pixels: bool = True
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
                f"data.source=shapes has {classes} classes, and model.image_classes="
                f"{images.classes}; use {classes} or more"
            )
        first, last = (
            drawn(partial(draw, seed, stream, size=images.size), images.channels)
            for stream in (TRAINING, HELD_OUT)
        )
        others = ImageSamples(last, HELD_OUT_PHANTOMS) if held_out else None
        return train(first, ENDLESS), others
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
