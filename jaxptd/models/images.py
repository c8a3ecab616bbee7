"""Models of images: their batches and losses, for the families that they have.

Letters: B images, K classes.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxptd.config import Config, DataConfig, Images, ModelConfig
from jaxptd.data import NOT_COUNTED, Data
from jaxptd.data.images import open_images
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.models.family import Family, Field, Loss, Sequence, Work, imported

CROSS_ENTROPY, DICE_LOSS = "cross_entropy", "dice_loss"  # terms of the loss
# Scores of all classes but the first, the background; of class 1 dice_1, hd95_1.
DICE, HD95 = "dice", "hd95"
ACCURACY = "accuracy"  # of classes of images
SHARE = {CROSS_ENTROPY: 0.4, DICE_LOSS: 0.6}  # of the loss; source: Swin-Unet's code
NOT_COUNTED_PIXELS = 0.2  # share of random labels


def images_of(model: ModelConfig) -> Images:
    """The options of a model of images."""
    assert model.images is not None
    return model.images


def fields(config: Config, *, of_pixels: bool) -> Mapping[str, Field]:
    """image, and the label of each pixel, or of each image; labels below 0 do not count."""
    end = images_of(config.model).classes
    whole = Field(
        "image_size", others=("image_size", "image_channels"), dtype="float32", ring=False
    )
    label = Field("image_size" if of_pixels else None, end=end, ring=False)
    return {"image": whole, "label": label._replace(others=("image_size",) * of_pixels)}


def draw(config: Config, rng: np.random.Generator, *, of_pixels: bool) -> dict[str, np.ndarray]:
    """Random images; the share of labels that do not count differs from image to image."""
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
    """A field of samples by their numbers."""
    found: np.ndarray = samples.field(field, number_B)
    return found


# Fields that only models of tokens have, with what a config has where it says nothing.
_OF_TOKENS = (
    *("num_layers", "num_decoder_layers", "num_kv_heads", "head_size", "norm_order", "linear_bias"),
    *("positions", "qk_norm", "causal", "token_types", "window", "seq_length"),
    *("decoder_seq_length", "start_token", "max_positions", "vocab_size", "vocab_multiple"),
    *("products", "tie_embeddings", "output_scale", "logit_softcap", "z_loss", "attention"),
    *("remat_layers",),
)


def check(config: Config) -> None:
    """Raises UserError for what a model of images does not have, or not yet."""
    model, layout = config.model, config.layout
    default = {f.name: f.default for f in dataclasses.fields(model)}
    given = [name for name in _OF_TOKENS if getattr(model, name) != default[name]]
    if given:
        raise UserError(
            f"model.{given[0]}={getattr(model, given[0])} has no effect with the family "
            f"{model.family}, which has model.image_* instead; leave it out"
        )
    if layout.pp > 1:
        raise UserError(
            f"layout.pp={layout.pp}: levels of the family {model.family} are not split over stages "
            "yet; use layout.pp=1 and more of dp, tp or row and col"
        )
    if layout.cp > 1:
        raise UserError(
            f"layout.cp={layout.cp}: images of the family {model.family} are not cut into strips "
            "yet; use layout.cp=1 and more of dp, tp or row and col"
        )
    _check_images(config)
    for name in ("tokenizer", "documents", "prompt_field"):
        if (value := getattr(config.data, name)) != getattr(DataConfig, name):
            raise UserError(f"data.{name}={value} is of text, and images have none; leave it out")


def sharing(layout: Layout) -> int:
    """Devices that share the images of a micro-batch: those that share sequences elsewhere."""
    return layout.row if layout.has_grid else layout.tp**layout.sequence_parallel


def _check_images(config: Config) -> None:
    """Raises UserError unless each device has as many whole images of a micro-batch."""
    layout, train = config.layout, config.train
    shared = sharing(layout)
    each = train.global_batch_size // (layout.dp * train.micro_batches)
    if each % shared:
        axis = "row" if layout.has_grid else "tp"
        sequence = "" if layout.has_grid else " with layout.sequence_parallel=true"
        raise UserError(
            f"layout.{axis}={shared}{sequence} shares the images of a micro-batch, and there "
            f"are {each}; use a train.global_batch_size that is a multiple of "
            f"{layout.dp * train.micro_batches * shared}"
        )


def work(model: ModelConfig) -> Work:
    """Patches of level 0; six FLOPs a patch and a weight of a product, three times those of scores.

    Patches are those that each product has, and scores are within windows.
    """
    images, size = images_of(model), model.hidden_size
    patches = [images.rows(level) ** 2 for level in range(len(images.depths))]
    found = patches[0] * images.channels * images.patch**2 * size
    blocks = itertools.zip_longest(images.depths, images.decoder_depths, fillvalue=0)
    for level, depths in enumerate(blocks):
        width, inner = size * 2**level, model.mlp_size * 2**level
        each = 2 * width * (2 * width + inner + images.window_at(level) ** 2)
        found += sum(depths) * patches[level] * each
        if level:
            found += patches[level] * 4 * (width // 2) * width  # merging
        if depths[1]:
            found += patches[level + 1] * 2 * width * 4 * width  # expanding
            found += patches[level] * 2 * width * width  # the skip connection
    if images.decoder_depths:
        found += patches[0] * (size * images.patch) ** 2 + images.size**2 * size * images.classes
    else:
        found += size * 2 ** (len(images.depths) - 1) * images.classes
    return Work(patches[0], 6 * found)


def losses(model: ModelConfig, *, of_pixels: bool) -> Mapping[str, Loss]:
    """0.4 of the cross-entropy of pixels and 0.6 of an image's Dice loss; of images the first.

    Scores are the share of classes that are right; of pixels Dice coefficients, and 95 % Hausdorff
    distances.
    """
    shares = SHARE if of_pixels else {CROSS_ENTROPY: 1.0}
    trained = {name: Loss("label", weight=share) for name, share in shares.items()}
    classes = images_of(model).classes
    of_each = [name for score in (DICE, HD95) for name in score_names(score, classes)]
    scores = of_each if of_pixels else [ACCURACY]
    return trained | {name: Loss("label", weight=0.0, trained=False) for name in scores}


def score_names(score: str, classes: int) -> tuple[str, ...]:
    """The mean of a score, and that of each class but the first."""
    return (score, *(f"{score}_{number}" for number in range(1, classes)))


def open_samples(config: Config, *, of_pixels: bool) -> Data:
    """Opens the images of a config.

    Raises:
        UserError: as `open_images`, or options of text are set.
    """
    images = images_of(config.model)
    found = open_images(config.data, images, seed=config.train.seed, of_pixels=of_pixels)
    return Data(*found)


def _family(name: str, *, of_pixels: bool) -> Family:
    return Family(
        make=imported("jaxptd.models.swin", name),
        fields=partial(fields, of_pixels=of_pixels),
        losses=partial(losses, of_pixels=of_pixels),
        rows=rows,
        sequences=(Sequence("image"),),
        draw=partial(draw, of_pixels=of_pixels),
        inventory=None,
        last=("norm", "last_norm", "pixels", "head"),
        check=check,
        has_vocabulary=False,
        work=work,
        open=partial(open_samples, of_pixels=of_pixels),
        classes="label",
        sharing=sharing,
    )


IMAGES, PIXELS = _family("Swin", of_pixels=False), _family("SwinUnet", of_pixels=True)
