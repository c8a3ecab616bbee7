"""The section `model` of a config."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jaxptd.config.block import (
    Activation,
    BlockOptions,
    FamilyName,
    Kernels,
    LinearBias,
    NormKind,
    NormOrder,
    Positions,
    RopeScaling,
    block_options,
    check_block,
)
from jaxptd.config.checks import (
    require_below_one,
    require_not_negative,
    require_positive,
)
from jaxptd.config.images import PREFIX, Dice, Images, check_images, image_options
from jaxptd.errors import UserError
from jaxptd.fields import check_fields, named_fields

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Products = Literal["native", "fp8"]
Remat = Literal["none", "dots", "attention", "full"]
AttentionKind = Literal["auto", "xla", "cudnn"]

MOST_DROPPED = 0.9999999  # of dropout, whose masks compare 32-bit numbers


@named_fields
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The model.

    Args:
        family: architecture; gpt is GPT-2. It decides the options of a block that are null.
        num_layers: transformer blocks; of an encoder-decoder those of the encoder.
        num_decoder_layers: blocks of an encoder-decoder's decoder; null is num_layers.
        hidden_size: width of the residual stream.
        num_heads: attention heads; a divisor of hidden_size, if head_size is null.
        num_kv_heads: heads of keys and values, a divisor of num_heads; null is num_heads.
        head_size: width of a head; null is hidden_size / num_heads.
        ffn_hidden_size: width inside the MLP; null is 4 * hidden_size.
        mlp: kind of the MLP: dense, or the name of one of your own.
        norm: layernorm or rmsnorm; null is the family's.
        norm_eps: added to the variance; null is the family's.
        norm_order: pre normalises the input of attention and of the MLP, and x at the end; post
            each sum with their output, and x at the beginning; null is the family's.
        activation: of the MLP; null is the family's.
        gated: the MLP multiplies act(x w_gate) with x w_up; null is the family's.
        linear_bias: biases of all products, of qkv only, or none; null is the family's.
        positions: learned, rope (rotated queries and keys), relative (a bias of scores by
            distance, of encoder-decoders) or none; null is the family's.
        rope_theta: base of rope's wavelengths; null is the family's.
        rope_scaling: stretches rope's wavelengths for longer texts, in the way of linear, llama3 or
            yarn; null does not.
        rope_factor: by which rope_scaling stretches.
        rope_original_length: tokens in the sequences before rope_scaling; llama3 and yarn need it.
        rope_range: turns of a wave within the original length between which llama3 and yarn
            interpolate, as low,high; null is 1,4 for llama3 and 1,32 for yarn.
        rope_attention_factor: of turned queries and keys, with yarn; null is yarn's own,
            0.1 ln(rope_factor) + 1.
        relative_buckets: of distances, each with a bias, half of them with a single distance; null
            is the family's.
        relative_distance: tokens that are farther apart share a bias; null is the family's.
        qk_norm: normalises queries and keys of each head; null is the family's.
        causal: a token attends to itself and those before it; false is to all, as in encoders;
            null is the family's.
        token_types: kinds of tokens with an embedding of their own; null is the family's.
        attention_scale: factor of the scores of queries and keys; null is head_size ** -0.5, in
            the family t5 1.
        window: tokens that a token attends to, itself and those before it (sliding window); null
            is no limit.
        seq_length: tokens in a sequence; of an encoder-decoder in a source.
        decoder_seq_length: tokens in the targets of an encoder-decoder; null is seq_length.
        start_token: id that an encoder-decoder's decoder reads first; 0 is padding in T5's
            tokenizers, and a byte that texts do not have.
        max_positions: positions that the model can tell apart, the rows of the table of learned
            ones; null is seq_length.
        vocab_size: number of token ids; null is the tokenizer's.
        vocab_multiple: pads the token table with unused rows, so that each device has a multiple
            of it; GPUs multiply matrices faster when sizes are multiples of 128.
        image_size: pixels in a row of a square image, of families of images; null is the family's,
            as for all image_* fields. Their hidden_size and num_heads are those of the first level.
        image_channels: numbers of a pixel.
        image_classes: classes of pixels (swin-unet) or of images (swin).
        image_patch: pixels in a row of a patch.
        image_window: patches in a row of a window.
        image_depths: blocks of each level, in pairs of plain and shifted windows.
        image_decoder_depths: blocks of each level on the way up, the finest first.
        image_dice: Dice losses of swin-unet are of each image, or of a batch as published.
        dropout: share of values dropped after the embedding, in attention and before each
            residual sum.
        drop_path: share of samples for which the last block of a model of images is left out; it
            grows from 0 at the first block (stochastic depth).
        dtype: compute precision; parameters and optimizer are float32 (float64 for float64);
            float16 scales the loss.
        products: precision of a block's four matrix products: native is dtype, fp8 is 8-bit
            numbers with a scale for each tensor.
        tie_embeddings: use the embedding as output layer.
        output_scale: factor of x before the output layer of an encoder-decoder; null is
            hidden_size ** -0.5 with tie_embeddings, else 1.
        logit_softcap: limit of the logits, as limit * tanh(logits / limit); null has none.
        z_loss: weight of the mean square of log sum exp(logits), added to the training loss.
        remat: recomputed in backward: none, attention (its core), dots (all but matrix products
            and attention), full (the block).
        remat_layers: number of layers that recompute, the first ones (in a pipeline, the first of
            each part of the model); null is all.
        attention: attention kernel; auto is cudnn where the device and the shapes allow it, else
            xla.
        kernels: of norms, activations and the loss over a vocabulary; triton's take less time, on
            NVIDIA GPUs without a grid; auto is triton there, else xla. XLA's in any case: norms of
            over 8192 numbers; gelu, and activations whose input a loop over layers keeps.
        scan_layers: compile one block and run it num_layers times in a loop; false unrolls the
            loop (slower to compile, can run faster).
    """

    family: FamilyName = "gpt"
    num_layers: int = 4
    num_decoder_layers: int | None = None
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_size: int | None = None
    ffn_hidden_size: int | None = None
    mlp: str = "dense"
    norm: NormKind | None = None
    norm_eps: float | None = None
    norm_order: NormOrder | None = None
    activation: Activation | None = None
    gated: bool | None = None
    linear_bias: LinearBias | None = None
    positions: Positions | None = None
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    rope_factor: float | None = None
    rope_original_length: int | None = None
    rope_range: tuple[float, ...] | None = None
    rope_attention_factor: float | None = None
    relative_buckets: int | None = None
    relative_distance: int | None = None
    qk_norm: bool | None = None
    causal: bool | None = None
    token_types: int | None = None
    attention_scale: float | None = None
    window: int | None = None
    seq_length: int = 256
    decoder_seq_length: int | None = None
    start_token: int = 0
    max_positions: int | None = None
    vocab_size: int | None = None
    vocab_multiple: int = 1
    image_size: int | None = None
    image_channels: int | None = None
    image_classes: int | None = None
    image_patch: int | None = None
    image_window: int | None = None
    image_depths: tuple[int, ...] | None = None
    image_decoder_depths: tuple[int, ...] | None = None
    image_dice: Dice | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    dtype: Dtype = "float32"
    products: Products = "native"
    tie_embeddings: bool = True
    output_scale: float | None = None
    logit_softcap: float | None = None
    z_loss: float = 0.0
    remat: Remat = "none"
    remat_layers: int | None = None
    attention: AttentionKind = "auto"
    kernels: Kernels = "xla"
    scan_layers: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "model")
        require_positive("model", self, "num_layers", "hidden_size", "num_heads")
        require_positive("model", self, "ffn_hidden_size", "seq_length", "vocab_size")
        require_positive("model", self, "vocab_multiple", "num_kv_heads", "head_size", "norm_eps")
        require_positive("model", self, "max_positions", "logit_softcap", "window", "output_scale")
        require_positive("model", self, "num_decoder_layers", "decoder_seq_length")
        require_positive("model", self, "relative_buckets", "relative_distance", "attention_scale")
        require_below_one("model", self, "dropout", "drop_path")
        for name in ("dropout", "drop_path"):
            if getattr(self, name) > MOST_DROPPED:
                raise UserError(
                    f"model.{name}={getattr(self, name)} drops everything, as masks are exact to "
                    f"2**-32; use {MOST_DROPPED} or less"
                )
        require_not_negative("model", self, "remat_layers", "z_loss", "token_types", "start_token")
        most = max(self.num_layers, self.decoder_layers)
        if (self.remat_layers or 0) > most:
            raise UserError(
                f"model.remat_layers={self.remat_layers} is more than model.num_layers={most}; use "
                "fewer, or null for all"
            )
        check_block(self)
        check_images(self)
        if self.attention == "cudnn" and self.dropout > 0:
            raise UserError(
                f"model.attention=cudnn has no dropout (model.dropout={self.dropout}); "
                "use model.attention=xla or model.dropout=0"
            )

    @property
    def num_positions(self) -> int:
        """Positions that the model can tell apart."""
        return self.max_positions or self.seq_length

    @property
    def decoder_layers(self) -> int:
        """Blocks of an encoder-decoder's decoder."""
        return self.num_decoder_layers or self.num_layers

    @property
    def target_length(self) -> int:
        """Tokens in the targets of an encoder-decoder."""
        return self.decoder_seq_length or self.seq_length

    @property
    def block(self) -> BlockOptions:
        """The options of a block, those that are set, else the family's."""
        return block_options(self)

    @property
    def images(self) -> Images | None:
        """The options of a model of images: those that are set, else the family's."""
        return image_options(self)

    @property
    def drops(self) -> bool:
        """True if training draws random numbers."""
        return self.dropout > 0 or self.drop_path > 0

    @property
    def mlp_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def reach(self) -> int:
        """Tokens that a token of a sequence attends to at most, itself the last."""
        return min(self.window or self.seq_length, self.seq_length)

    def with_lengths(self, padded: Callable[[int], int]) -> "ModelConfig":
        """The model with longer sequences, whose added tokens at the end nothing else depends on.

        It has the same positions, and no window where the sequence was not longer than it.

        Args:
            padded: rounds a number of tokens up.
        """
        length, targets = self.seq_length, self.decoder_seq_length
        longer, longer_targets = padded(length), targets and padded(targets)
        if (longer, longer_targets) == (length, targets):
            return self
        learned = self.block.positions == "learned"
        return dataclasses.replace(
            self,
            seq_length=longer,
            decoder_seq_length=longer_targets,
            max_positions=self.num_positions if learned else self.max_positions,
            window=self.window if self.reach < length else None,
        )

    def padded_vocab(self, padded: Callable[[int], int]) -> int:
        """Rows of the token table; `padded` rounds a size up to equal shards."""
        return self.vocab_multiple * padded(-(-(self.vocab_size or 0) // self.vocab_multiple))

    @property
    def keeps_inputs(self) -> bool:
        """True if some layers keep for backward what their products take."""
        return self.remat in ("none", "attention") or self.remat_layers is not None

    def remats(self, layers: int) -> tuple[tuple[Remat, int], ...]:
        """Splits a stack of layers by what they recompute: (policy, number of layers), in order."""
        first = layers if self.remat_layers is None else min(self.remat_layers, layers)
        both: tuple[tuple[Remat, int], ...] = ((self.remat, first), ("none", layers - first))
        return tuple((remat, count) for remat, count in both if count)


def itemsize(dtype: Dtype) -> int:
    """Bytes of an element."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def option(model: ModelConfig, name: str) -> Any:
    """A field of a model by its name, or where it is null what its family puts in its place."""
    if name == "ffn_hidden_size":
        return model.mlp_size
    if name == "decoder_seq_length":
        return model.target_length
    if name == "num_decoder_layers":
        return model.decoder_layers
    if name.startswith(PREFIX) and model.images:
        return getattr(model.images, name.removeprefix(PREFIX))
    for kind in ("rope", "relative"):
        if name.startswith(f"{kind}_"):
            return getattr(getattr(model.block, kind), name.removeprefix(f"{kind}_"), None)
    return getattr(model.block, name, getattr(model, name, None))
