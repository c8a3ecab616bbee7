"""Samples of images by their numbers. A sample is a function of its seed and number alone.

Letters: B samples, S rows and columns.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from jaxptd.data.mapped import Samples
from jaxptd.errors import UserError
from jaxptd.vision.data import ImageFile
from jaxptd.vision.phantoms import ORDER, TURN, drawing

ENDLESS = 2**40  # phantoms before one is drawn again
RECALLED = 512  # samples that are kept in memory
TURNS = 8  # turns by quarters, of an image and of its mirror image
Pair = tuple[np.ndarray, np.ndarray]  # image[S, S, channels], label[S, S] or of the image, []


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSamples(Samples):
    """Images and labels.

    Args:
        read: the number of an image -> the image and its labels.
        count: of images.
        seed: of the order and of turns; None: in their order, as they are.
        augment: whether images are turned and mirrored.
    """

    read: Callable[[int], Pair]
    count: int
    seed: int | None = None
    augment: bool = False

    @property
    def num_tokens(self) -> int:
        """Images."""
        return self.count

    @property
    def amount(self) -> str:
        return f"{self.count:,} training images" if self.count < ENDLESS else "endless phantoms"

    @property
    def windows_per_epoch(self) -> int:
        return self.count

    def field(self, name: str, indices: np.ndarray) -> np.ndarray:
        """`image` float32[B, S, S, channels], or `label` int32[B, S, S] or [B], of numbers[B]."""
        which = ("image", "label").index(name)
        return np.stack([self._sample(int(number))[which] for number in indices])

    @functools.cached_property
    def _sample(self) -> Callable[[int], Pair]:
        return functools.lru_cache(maxsize=RECALLED)(self._make)

    def _make(self, number: int) -> Pair:
        epoch, place = divmod(number, self.count)
        image, label = self.read(self._order(epoch)[place] if self.shuffled else place)
        if not self.augment or self.seed is None:
            return image, label
        turn = int(drawing(self.seed, TURN, number).integers(TURNS))
        return _turned(image, turn), _turned(label, turn) if label.ndim else label

    @property
    def shuffled(self) -> bool:
        """True if each epoch has an order of its own; phantoms are in none."""
        return self.seed is not None and self.count != ENDLESS

    @functools.cached_property
    def _order(self) -> Callable[[int], np.ndarray]:
        def order(epoch: int) -> np.ndarray:
            return drawing(self.seed or 0, ORDER, epoch).permutation(self.count)

        return functools.lru_cache(maxsize=2)(order)

    # ---- what only tokens have ----

    def rows(self, indices: np.ndarray) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")

    def targets(self, indices: np.ndarray) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")

    def first_tokens(self, count: int) -> np.ndarray:
        raise UserError("images have no tokens; use `field`")


def drawn(draw: Callable[[int], Pair], channels: int) -> Callable[[int], Pair]:
    """Reads images that are drawn, the same numbers in every channel.

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
    """x[S, S, ..] turned by so many quarters, and mirrored from 4 on."""
    return np.rot90(x[:, ::-1] if turn >= TURNS // 2 else x, turn % (TURNS // 2))
