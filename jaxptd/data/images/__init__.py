"""Images and their labels by sample number: from files, or drawn."""

from jaxptd.data.images.files import ENDINGS, read_image
from jaxptd.data.images.opening import SHAPES, open_images
from jaxptd.data.images.samples import ImageSamples

__all__ = ["ENDINGS", "SHAPES", "ImageSamples", "open_images", "read_image"]
