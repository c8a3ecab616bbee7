"""The parts that only models of images have; see `parts.py`.

Letters: D numbers of a patch, N heads, H head size, T patches of an image, K classes.
"""

import dataclasses

from jaxptd.config.images import windows_split


@dataclasses.dataclass(frozen=True)
class Windows:
    """A pair of products, of which the first makes q, k, v, with attention in windows of an image.

    Args:
        hidden: D.
        heads: N.
        head_size: H.
        rows: of patches in an image, and patches in a row.
        window: patches in a row of a window.
        shift: rows, and columns, by which the windows are moved; 0 for none.
        bias: whether both products have one.
    """

    hidden: int
    heads: int
    head_size: int
    rows: int
    window: int
    shift: int
    bias: bool

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows**2

    def in_strips(self, devices: int) -> bool:
        """True if so many devices share its images in strips; else each has whole ones."""
        return windows_split(self.rows, self.window, devices)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values: N."""
        return self.heads

    @property
    def reach(self) -> int:
        """Patches of a window: all that one attends to."""
        return self.window**2

    @property
    def weights(self) -> int:
        """Elements of the matrices: D N H four times."""
        return 4 * self.hidden * self.heads * self.head_size

    def multiplications(self, tokens: int) -> int:
        """Multiplications with weights in an image of so many patches."""
        return tokens * self.weights

    @property
    def score_flops(self) -> int:
        """FLOPs of a patch's scores and of their product with the values, forward."""
        return 4 * self.heads * self.head_size * self.reach


@dataclasses.dataclass(frozen=True)
class Resampling:
    """A product of the residual stream between levels of patches, or of two streams.

    Args:
        tokens: patches of an image in the product.
        hidden: D.
        joined: patches, or streams, that become one.
        out: D of the result.
        parted: patches that one becomes.
    """

    tokens: int
    hidden: int
    joined: int
    out: int
    parted: int

    @property
    def multiplications(self) -> int:
        """Multiplications with weights in an image."""
        return self.tokens * self.hidden * self.joined * self.out * self.parted


@dataclasses.dataclass(frozen=True)
class ImageEnds:
    """The parts of a model of images outside of its levels, and between them.

    Args:
        patches: of an image at level 0.
        pixels: numbers of such a patch.
        hidden: D of level 0.
        resamplings: between levels, and behind them.
        norms: patches of an image in each norm.
        last: D before the classes.
        logits: vectors of logits of an image: one, or one for each pixel.
        classes: K.
        statistics: of a patch that each norm keeps.
    """

    patches: int
    pixels: int
    hidden: int
    resamplings: tuple[Resampling, ...]
    norms: tuple[int, ...]
    last: int
    logits: int
    classes: int
    statistics: int

    @property
    def multiplications(self) -> int:
        """Multiplications with weights in an image."""
        ends = self.patches * self.pixels * self.hidden + self.logits * self.last * self.classes
        return ends + sum(each.multiplications for each in self.resamplings)
