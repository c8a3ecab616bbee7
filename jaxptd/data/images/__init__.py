"""Images and the labels of their pixels, by sample number: from files, or phantoms of a heart."""

from jaxptd.data.images.opening import SHAPES, open_images
from jaxptd.data.images.samples import ImageSamples

__all__ = ["SHAPES", "ImageSamples", "open_images"]
