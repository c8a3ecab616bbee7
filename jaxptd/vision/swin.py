"""Swin, which classifies images, and Swin-Unet, which classifies their pixels.

They name no axis or collective. Letters: B images, R rows, Q columns, C hidden units, K classes.
Source: Liu et al., arXiv 2103.14030; Cao et al., Swin-Unet, arXiv 2105.05537, and its code.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxptd.config import Images, ModelConfig
from jaxptd.layers.dropout import DropoutSite, TokenInfo
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.models.model import check_arguments
from jaxptd.vision.block import Level, Skipping, WindowPair, drop_patches, make_pairs
from jaxptd.vision.family import (
    ACCURACY,
    CROSS_ENTROPY,
    DICE,
    DICE_LOSS,
    HD95,
    level_parts,
    score_names,
)
from jaxptd.vision.losses import (
    batch_dice_loss,
    cross_entropy,
    dice_loss,
    dice_scores,
    hausdorff_scores,
    right,
)
from jaxptd.vision.patches import (
    Classes,
    PatchEmbedding,
    PatchExpanding,
    PatchMerging,
    SkipConnection,
)
from jaxptd.vision.windows import Strips


class Swin(nnx.Module):
    """An encoder of images in levels, with a classifier of whole images.

    Args:
        config: sizes and choices.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial parameters.
        offload: whether what `remat: dots` saves for backward goes to host memory.
    """

    common: nnx.Module | None = None  # layers share no parameters

    def __init__(
        self,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        offload: bool = False,
    ) -> None:
        check_arguments(self, config, tensor_parallel)
        assert config.images is not None
        self.config, self.tensor_parallel, self.offload = config, tensor_parallel, offload
        self.strips = Strips.of(tensor_parallel)
        self.images: Images = config.images
        options, size = config.block, config.hidden_size
        self.patches = PatchEmbedding(
            self.images, size, options=options, tensor_parallel=tensor_parallel, rngs=rngs
        )
        self.names: tuple[str, ...] = ()
        self.pairs = 0
        for number in range(len(self.images.depths)):
            self._add(f"down{number}", level(config, number), rngs)
            if number:
                merge = PatchMerging(
                    self._size(number - 1),
                    options=options,
                    tensor_parallel=tensor_parallel,
                    rngs=rngs,
                )
                setattr(self, f"merge{number}", merge)
        last = self._size(len(self.images.depths) - 1)
        self.norm = Norm(last, options=options, tensor_parallel=tensor_parallel, rngs=rngs)
        self._add_head(rngs)

    def _add_head(self, rngs: nnx.Rngs) -> None:
        """Declares what follows the way down."""
        last = self._size(len(self.images.depths) - 1)
        self.head = Classes(
            last, self.images.classes, tensor_parallel=self.tensor_parallel, rngs=rngs, bias=True
        )

    def _add(self, name: str, level: Level, rngs: nnx.Rngs) -> None:
        """Declares the stack of a level."""
        setattr(
            self,
            name,
            make_pairs(level, self.pairs, tensor_parallel=self.tensor_parallel, rngs=rngs),
        )
        self.names += (name,)
        self.pairs += len(level.paths) // 2

    def _size(self, level: int) -> int:
        return self.config.hidden_size * 2**level

    @property
    def stacks(self) -> Mapping[str, WindowPair]:
        """The pairs of blocks of each level."""
        return {name: getattr(self, name) for name in self.names}

    @jax.named_scope("embedding")
    def embed(self, batch: Mapping[str, Array], token_info: TokenInfo) -> Skipping:
        """A batch with image[B, rows, columns, channels] -> x before the first level."""
        x = self.patches(batch["image"], jnp.dtype(self.config.dtype))
        token_info = token_info.at_rows(self.images.patch).at(0, DropoutSite.EMBEDDING)
        return Skipping(drop_patches(x, token_info, self.tensor_parallel, self.config.dropout))

    def enter(self, stack: str, x: Skipping) -> Skipping:
        """x -> x for a level's first layer: from the second level on, with merged patches."""
        number = int(stack.removeprefix("down"))
        if number == 0:
            return x
        stream = x.stream if self._in_strips(number) else self.strips.as_whole(x.stream)
        return x._replace(stream=getattr(self, f"merge{number}")(stream))

    def _in_strips(self, level: int) -> bool:
        """True if devices that share a level's images hold strips of them."""
        return self.images.in_strips(level, self.strips.devices)

    def output(self, x: Skipping) -> Array:
        """x after all levels -> logits[B, K] of images of which this device holds a part."""
        return self.head(self.strips.mean(self.norm(x.stream)))

    @jax.named_scope("loss")
    def losses(
        self, x: Skipping, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """x after all levels -> the sums that training needs; see the family's losses."""
        return self._losses(self.output(x), self.tensor_parallel.axes.local_images(batch["label"]))

    @jax.named_scope("loss")
    def evaluated(
        self, x: Skipping, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """x after all levels -> these sums, and the sums of scores."""
        logits, label = self.output(x), self.tensor_parallel.axes.local_images(batch["label"])
        return self._losses(logits, label) | self._scores(logits, label)

    def _losses(self, logits: Array, label: Array) -> dict[str, Array]:
        """The sum of -log probability of the images' classes."""
        return {CROSS_ENTROPY: self.strips.once(cross_entropy(logits, label))}

    def _scores(self, logits: Array, label: Array) -> dict[str, Array]:
        """The number of correctly classified images."""
        return {ACCURACY: self.strips.once(right(logits, label))}

    def empty_state(self, batch: int) -> dict[str, Any]:
        """Empty: image models generate nothing."""
        return {}


class SwinUnet(Swin):
    """Levels down and up again with skip connections, and a classifier of pixels."""

    def _add_head(self, rngs: nnx.Rngs) -> None:
        config, images = self.config, self.images
        options, size = config.block, config.hidden_size
        make = partial(
            PatchExpanding, options=options, tensor_parallel=self.tensor_parallel, rngs=rngs
        )
        for number in reversed(range(len(images.decoder_depths))):
            wide, narrow = self._size(number + 1), self._size(number)
            setattr(self, f"expand{number}", make(wide, narrow, 2))
            setattr(
                self,
                f"skip{number}",
                SkipConnection(narrow, tensor_parallel=self.tensor_parallel, rngs=rngs),
            )
            self._add(f"up{number}", level(config, number, up=True), rngs)
        self.last_norm = Norm(
            size, options=options, tensor_parallel=self.tensor_parallel, rngs=rngs
        )
        self.pixels = make(size, size, images.patch)
        self.head = Classes(
            size, images.classes, tensor_parallel=self.tensor_parallel, rngs=rngs, bias=False
        )

    def enter(self, stack: str, x: Skipping) -> Skipping:
        """x -> x for a level's first layer.

        On the way down x is also added to the skips; on the way up it is joined with the last of
        them.
        """
        last = len(self.images.depths) - 1
        if stack.startswith("down"):
            x = super().enter(stack, x)
            return x if stack == f"down{last}" else x._replace(skips=(*x.skips, x.stream))
        number = int(stack.removeprefix("up"))
        stream = self.norm(x.stream) if number == last - 1 else x.stream
        *skips, skip = x.skips
        stream = getattr(self, f"expand{number}")(stream)
        stream = self.strips.as_strips(stream, skip.shape[1])
        return Skipping(getattr(self, f"skip{number}")(stream, skip), tuple(skips))

    def output(self, x: Skipping) -> Array:
        """x after all levels -> logits[B, rows, columns, K] of this device's images or strips."""
        return self.head(self.pixels(self.last_norm(x.stream)))

    def _losses(self, logits: Array, label: Array) -> dict[str, Array]:
        """Sums of -log probability of pixels, and of Dice losses."""
        if self.images.dice == "batch":
            dice = batch_dice_loss(logits, label, self.strips.summed_batch)
        else:
            dice = dice_loss(logits, label, self.strips.summed)
        return {CROSS_ENTROPY: cross_entropy(logits, label), DICE_LOSS: dice}

    def _scores(self, logits: Array, label: Array) -> dict[str, Array]:
        """Sums of the scores of whole images."""
        strips, classes = self.strips, self.images.classes
        masks = strips.gathered(jnp.argmax(logits, -1)), strips.gathered(label)
        return {
            name: strips.once(each)
            for score, make in ((DICE, dice_scores), (HD95, hausdorff_scores))
            for name, each in zip(score_names(score, classes), make(*masks, classes), strict=True)
        }


def level(config: ModelConfig, number: int, *, up: bool = False) -> Level:
    """The blocks of a level on the way down or up; both are skipped equally often."""
    images, factor = config.images, 2**number
    assert images is not None
    rates = np.linspace(0, images.drop_path, sum(images.depths)).tolist()
    before, depth = sum(images.depths[:number]), images.depths[number]
    paths = rates[before : before + depth]
    if up:
        paths = np.interp(
            np.linspace(0, 1, images.decoder_depths[number]), np.linspace(0, 1, depth), paths
        ).tolist()
    sizes = {name: getattr(config, name) * factor for name in ("hidden_size", "num_heads")}
    inner = config.ffn_hidden_size and config.ffn_hidden_size * factor
    _, _, attention, mlp = level_parts(config, number)
    return Level(
        dataclasses.replace(config, ffn_hidden_size=inner, remat_layers=None, **sizes),
        attention,
        mlp,
        images.patch * factor,
        tuple(paths),
    )
