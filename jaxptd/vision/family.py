"""Models of images: batches and losses of their families.

Letters: B images, K classes.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxptd.config import Config, DataConfig, Images, ModelConfig, with_fields
from jaxptd.context_parallel import Imported
from jaxptd.data import NOT_COUNTED, Data, Field
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.models.family import Family, Loss, Sequence, Work
from jaxptd.parts.architecture import Architecture, Stack
from jaxptd.parts.mlp import MLPShape
from jaxptd.vision.architecture import ImageEnds, Resampling, WindowShape
from jaxptd.vision.data import open_images

CROSS_ENTROPY, DICE_LOSS = "cross_entropy", "dice_loss"  # terms of the loss
# Scores of all classes but the first, the background; class 1's are dice_1 and hd95_1.
DICE, HD95 = "dice", "hd95"
ACCURACY = "accuracy"  # for classes of images
SHARE = {CROSS_ENTROPY: 0.4, DICE_LOSS: 0.6}  # weights in the loss; source: Swin-Unet's code
NOT_COUNTED_PIXELS = 0.2  # share of ignored random labels


def images_of(model: ModelConfig) -> Images:
    """The options of a model of images."""
    assert model.images is not None
    return model.images


def fields(config: Config, *, of_pixels: bool) -> Mapping[str, Field]:
    """Fields image, and label per pixel or per image; labels below 0 are ignored."""
    end = images_of(config.model).classes
    image = Field(
        "images.size", others=("images.size", "images.channels"), dtype="float32", ring=False
    )
    label = Field("images.size" if of_pixels else None, end=end, ring=False)
    return {"image": image, "label": label._replace(others=("images.size",) * of_pixels)}


def draw(config: Config, rng: np.random.Generator, *, of_pixels: bool) -> dict[str, np.ndarray]:
    """Random images; the share of ignored labels differs from image to image."""
    B, images = config.train.global_batch_size, images_of(config.model)
    sides = (images.size, images.size)
    shape = (B, *sides) if of_pixels else (B,)
    ignored = rng.random((B, *[1] * (len(shape) - 1))) * 2 * NOT_COUNTED_PIXELS * of_pixels
    label = np.where(
        rng.random(shape) < ignored, NOT_COUNTED, rng.integers(0, images.classes, shape)
    )
    image = rng.standard_normal((B, *sides, images.channels))
    return {"image": image.astype(np.float32), "label": label.astype(np.int32)}


def rows(samples: Any, field: str, number_B: np.ndarray, **_: Any) -> np.ndarray:
    """A field of the samples with these numbers."""
    values: np.ndarray = samples.field(field, number_B)
    return values


# Fields that only models of tokens use, with their default values.
_OF_TOKENS = (
    *("num_layers", "num_kv_heads", "head_size", "head_sizes", "norm_order", "linear_bias"),
    *("positions", "qk_norm", "causal", "token_types", "window", "seq_length"),
    *("max_positions", "vocab_size", "vocab_multiple", "neftune"),
    *("products", "tie_embeddings", "logit_softcap", "z_loss", "attention"),
    *("attention_sinks", "attention_softcap"),
    *("remat_layers", "embedding_scale", "residual_scale", "logit_divisor"),
)


def check(config: Config) -> None:
    """Raises UserError for settings that models of images do not support, or not yet."""
    model, layout = config.model, config.layout
    default = {f.name: f.default for f in dataclasses.fields(model)}
    given = [name for name in _OF_TOKENS if getattr(model, name) != default[name]]
    if given:
        raise UserError(
            f"model.{given[0]}={getattr(model, given[0])} has no effect with the family "
            f"{model.family}, which uses model.images instead; leave it out"
        )
    if layout.pp > 1:
        raise UserError(
            f"layout.pp={layout.pp}: levels of the family {model.family} do not split over stages "
            "yet; use layout.pp=1 and more of dp, tp or row and col"
        )
    if layout.ring != Layout.ring:
        raise UserError(
            f"layout.ring={layout.ring} is for keys of a sequence, which images lack; leave it out"
        )
    if model.mlp != "dense":
        raise UserError(f"model.mlp={model.mlp}: blocks of images support only dense; leave it out")
    _check_dice(config)
    _check_strips(config)
    _check_images(config)
    names = ("tokenizer", "validation", "documents", "prompt_field", "messages_field", "format")
    for name in (*names, "too_long"):
        if (value := getattr(config.data, name)) != getattr(DataConfig, name):
            raise UserError(f"data.{name}={value} applies to text, not to images; leave it out")


def sharing(model: ModelConfig, layout: Layout) -> int:
    """Number of devices that share a micro-batch's images: those that share sequences elsewhere.

    Those along cp hold strips, and share whole images only in levels without strips.
    """
    along_cp = 1 if first_whole(model, layout) is None else layout.cp
    return _before_strips(layout) * along_cp


def _before_strips(layout: Layout) -> int:
    """Number of devices that share a micro-batch's images before cp does."""
    return layout.row if layout.has_grid else layout.tp**layout.sequence_parallel


def first_whole(model: ModelConfig, layout: Layout) -> int | None:
    """The first level whose images the devices along cp share whole, not in strips, or None."""
    images = images_of(model)
    levels = range(len(images.depths))
    return next((level for level in levels if not images.in_strips(level, layout.cp)), None)


def _check_dice(config: Config) -> None:
    """Raises UserError if a batch's Dice loss would only cover a micro-batch."""
    images, parts = images_of(config.model), config.train.micro_batches
    if images.dice == "batch" and parts > 1:
        raise UserError(
            f"model.images.dice=batch covers all images of a step, but train.micro_batches={parts} "
            "computes them in parts; use train.micro_batches=1, or model.images.dice=image"
        )


def _check_strips(config: Config) -> None:
    """Raises UserError unless level 0 splits into strips, and others into strips or images."""
    layout, model = config.layout, config.model
    images, level = images_of(model), first_whole(model, layout)
    if level is None:
        return
    rows = f"level {level} has {images.rows(level) // images.window_at(level)} rows of windows"
    if level == 0:
        raise UserError(
            f"layout.cp={layout.cp} cuts images into strips of whole windows, and {rows}; use a "
            f"layout.cp that divides {images.rows(0) // images.window_at(0)}"
        )
    unit = layout.sample_shards * config.train.micro_batches * sharing(model, layout)
    if config.train.global_batch_size % unit:
        raise UserError(
            f"layout.cp={layout.cp}: {rows}, too few for strips, so devices hold whole images of "
            f"it; use a train.global_batch_size that is a multiple of {unit}, or fewer "
            "model.images.depths"
        )


def _check_images(config: Config) -> None:
    """Raises UserError unless a micro-batch's images, or their strips, split over the devices."""
    layout, train = config.layout, config.train
    shared = _before_strips(layout)
    each = train.global_batch_size // (layout.sample_shards * train.micro_batches)
    if each % shared:
        axis = "row" if layout.has_grid else "tp"
        sequence = "" if layout.has_grid else " with layout.sequence_parallel=true"
        raise UserError(
            f"layout.{axis}={shared}{sequence} shares the images of a micro-batch, but there "
            f"are {each}; use a train.global_batch_size that is a multiple of "
            f"{layout.sample_shards * train.micro_batches * shared}"
        )


def architecture(model: ModelConfig, *, of_pixels: bool) -> Architecture:
    """Stacks of pairs of window blocks, one per level, and the matmuls between the levels."""
    images = images_of(model)
    down = tuple(
        _stack(model, f"down{level}", level, depth) for level, depth in enumerate(images.depths)
    )
    up = tuple(
        _stack(model, f"up{level}", level, depth)
        for level, depth in reversed([*enumerate(images.decoder_depths)])
    )
    patches, size = [stack.tokens for stack in down], model.hidden_size
    merging = [
        Resampling(after.tokens, before.hidden, 4, after.hidden, 1)
        for before, after in itertools.pairwise(down)
    ]
    expanding = [
        each
        for before, after in itertools.pairwise((*down[-1:], *up))
        for each in (
            Resampling(before.tokens, before.hidden, 1, after.hidden, 4),
            Resampling(after.tokens, after.hidden, 2, after.hidden, 1),
        )
    ]
    pixels = [Resampling(patches[0], size, 1, size, images.patch**2)] * of_pixels
    pixel = images.size**2
    levels = (*down, *up)
    ends = ImageEnds(
        levels,
        patches[0],
        images.channels * images.patch**2,
        size,
        resamplings=(*merging, *expanding, *pixels),
        # Norms of patches, merged ones, the last level, expanded ones, x before pixels, and pixels.
        norms=(*patches, patches[-1], *(s.tokens for s in up), *(patches[0], pixel) * of_pixels),
        last=size if of_pixels else down[-1].hidden,
        logits=pixel if of_pixels else 1,
        classes=images.classes,
        statistics=_statistics(model),
        dice=images.dice,
    )
    return Architecture(size, before=(), stacks=levels, behind=(ends,))


def _stack(model: ModelConfig, name: str, level: int, depth: int) -> Stack:
    """The pairs of blocks of a level."""
    parts, norms = level_parts(model, level), _statistics(model)
    return Stack(name, depth // 2, parts, norms)


def level_parts(
    model: ModelConfig, level: int
) -> tuple[WindowShape, MLPShape, WindowShape, MLPShape]:
    """The parts of a pair of blocks, the second with shifted windows."""
    images, factor, options = images_of(model), 2**level, model.block
    size, bias = model.hidden_size * factor, options.linear_bias == "all"
    heads = model.num_heads * factor
    where = images.rows(level), images.window_at(level)
    plain = WindowShape(size, heads, size // heads, *where, 0, bias)
    shifted = dataclasses.replace(plain, shift=images.shift(level))
    mlp = MLPShape(size, model.mlp_size * factor, options.gated, bias=bias)
    return plain, mlp, shifted, mlp


def _statistics(model: ModelConfig) -> int:
    return 2 if model.block.norm == "layernorm" else 1


def work(model: ModelConfig, *, of_pixels: bool) -> Work:
    """Patches of level 0, and the FLOPs of all matmuls."""
    return Work(images_of(model).rows(0) ** 2, architecture(model, of_pixels=of_pixels).flops)


def deeper(model: ModelConfig) -> ModelConfig:
    """The model with one more pair of blocks in each level."""
    down, up = (
        tuple(depth + 2 for depth in depths)
        for depths in (images_of(model).depths, images_of(model).decoder_depths)
    )
    return with_fields(model, {"images.depths": down, "images.decoder_depths": up})


def losses(model: ModelConfig, *, of_pixels: bool) -> Mapping[str, Loss]:
    """Pixels: 0.4 of the cross-entropy and 0.6 of a Dice loss; whole images: cross-entropy.

    Scores are accuracy for images, Dice coefficients and 95 % Hausdorff distances for pixels.
    """
    shares = SHARE if of_pixels else {CROSS_ENTROPY: 1.0}
    trained = {name: Loss("label", weight=share) for name, share in shares.items()}
    classes = images_of(model).classes
    of_each = [name for score in (DICE, HD95) for name in score_names(score, classes)]
    scores = of_each if of_pixels else [ACCURACY]
    return trained | {name: Loss("label", weight=0.0, trained=False) for name in scores}


def score_names(score: str, classes: int) -> tuple[str, ...]:
    """Names of a score's mean, and of each class's score but the first."""
    return (score, *(f"{score}_{number}" for number in range(1, classes)))


def open_samples(config: Config, *, of_pixels: bool) -> Data:
    """Opens the images of a config.

    Raises:
        UserError: as `open_images`, or options of text are set.
    """
    images = images_of(config.model)
    data = open_images(config.data, images, seed=config.train.seed, of_pixels=of_pixels)
    return Data(*data)


def _family(name: str, *, of_pixels: bool) -> Family:
    return Family(
        make=Imported("jaxptd.vision.swin", name),
        fields=partial(fields, of_pixels=of_pixels),
        losses=partial(losses, of_pixels=of_pixels),
        rows=rows,
        sequences=(Sequence("image"),),
        draw=partial(draw, of_pixels=of_pixels),
        architecture=partial(architecture, of_pixels=of_pixels),
        last=("norm", "last_norm", "pixels", "head"),
        check=check,
        has_vocabulary=False,
        work=partial(work, of_pixels=of_pixels),
        deeper=deeper,
        has_times=False,
        open=partial(open_samples, of_pixels=of_pixels),
        classes="label",
        sharing=sharing,
    )


IMAGES, PIXELS = _family("Swin", of_pixels=False), _family("SwinUnet", of_pixels=True)
