"""The section `model` of a config."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from jaxptd.config.block import (
    SECTIONS,
    Activation,
    BlockOptions,
    EncoderDecoder,
    FamilyName,
    Kernels,
    LinearBias,
    NormKind,
    NormOrder,
    Positions,
    QKNorm,
    Rope,
    block_options,
    check_block,
    section_of,
)
from jaxptd.config.checks import require_not_negative, require_positive, require_share
from jaxptd.config.images import Images
from jaxptd.config.latent import Latent
from jaxptd.config.lora import LoRA, check_lora
from jaxptd.config.moe import MoE, check_layers
from jaxptd.config.mtp import MTP, check_mtp
from jaxptd.config.patterns import by_layer, period_of, repeated, shortest
from jaxptd.config.preference import Preference, check_preference
from jaxptd.errors import UserError
from jaxptd.fields import check_fields, named_fields

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Products = Literal["native", "fp8"]
Remat = Literal["none", "dots", "attention", "full"]
AttentionKind = Literal["auto", "xla", "cudnn"]


@named_fields
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a model, and how its layers compute.

    Args:
        family: architecture; gpt is GPT-2. It sets every option of a block that is null, and which
            of the sections below, from rope on, the model can have.
        num_layers: transformer blocks; in an encoder-decoder, those of the encoder.
        hidden_size: width of the residual stream.
        num_heads: attention heads; a divisor of hidden_size, if head_size is null.
        num_kv_heads: heads of keys and values, a divisor of num_heads; null is num_heads.
        head_size: width of a head; null is hidden_size / num_heads.
        head_sizes: width of a head in each layer, as a period that repeats, or an entry for each
            layer; null is head_size in all.
        ffn_hidden_size: width inside the MLP; null is 4 * hidden_size.
        mlp: kind of MLP: dense, or one that you registered with register_mlp.
        norm: layernorm or rmsnorm; null is the family's.
        norm_eps: added to the variance; null is the family's.
        norm_order: pre normalises the input of attention and of the MLP, and x at the end; output
            their output, and x at the end; both their input, their output, and x at the end; post
            each sum with their output, and x at the beginning; null is the family's.
        activation: function inside the MLP; clamped-swiglu, with gated, is min(g, 7) sigmoid(1.702
            min(g, 7)) (clip(u, -7, 7) + 1) of the gate g and what it multiplies, u; null is the
            family's.
        gated: gated MLP, act(x w_gate) * (x w_up); null is the family's.
        linear_bias: biases of all matmuls in layers, also of experts, of qkv only, or none; null is
            the family's.
        positions: learned, rope (rotated queries and keys), relative (a bias of scores by
            distance, of encoder-decoders) or none; null is the family's.
        qk_norm: normalises queries and keys: true those of each head, whole those of all heads of a
            token together; null is the family's.
        attention_sinks: each head has a trained logit beside its scores, which takes a share of its
            probabilities and gives nothing; null is the family's.
        causal: a token attends only to itself and earlier tokens; false attends to all, as encoders
            do; null is the family's.
        token_types: number of token types (segments), each with an embedding; null is the family's.
        attention_scale: factor on attention scores; null is head_size ** -0.5 (1 in the family t5,
            1 / 64 in granitemoe).
        attention_softcap: caps attention scores, as limit * tanh(scores / limit); null does not.
        softcap_layers: which layers cap attention scores, as a period that repeats, or an entry for
            each layer; null is all.
        embedding_scale: factor on x after the embedding; null is the family's (hidden_size ** 0.5
            in gemma2 and gemma3_text).
        residual_scale: factor on what attention and MLP add to the residual stream; null is the
            family's.
        logit_divisor: divides logits; null is the family's.
        window: sliding window: tokens a token attends to, counting itself; null is no limit.
        window_layers: which layers have the window, as a period that repeats, or an entry for each
            layer; null is all.
        seq_length: tokens in a sequence; in an encoder-decoder, in a source.
        max_positions: rows of the learned position table, the longest sequence the model can take;
            null is seq_length.
        vocab_size: size of the vocabulary; null is the tokenizer's.
        vocab_multiple: pads the token table with unused rows so that each device holds a multiple
            of this; GPU matmuls are faster at multiples of 128.
        dropout: rate after the embedding, in attention and before each residual sum.
        dtype: compute precision; parameters and optimizer are float32 (float64 for float64);
            float16 scales the loss.
        products: precision of a block's four matmuls: native is dtype, fp8 is 8-bit with one scale
            per tensor, or in experts per block.
        tie_embeddings: share the embedding table with the output layer.
        logit_softcap: caps logits, as limit * tanh(logits / limit); null does not.
        z_loss: weight of the mean square of log sum exp(logits), added to the training loss.
        remat: what backward recomputes: none, attention (its core), dots (all but matmuls and
            attention), full (the whole block).
        remat_layers: how many layers recompute, counted from the first (in a pipeline, from the
            first of each chunk); null is all.
        attention: its kernel; auto is cudnn where device and shapes allow it, else xla.
        kernels: those of norms, activations and the loss over a vocabulary: triton's are faster, on
            NVIDIA GPUs without a grid; auto is triton there, else xla. Always XLA's: norms over
            more than 8192 elements; gelu, clamped-swiglu, and activations whose input a loop over
            layers saves.
        scan_layers: compile one block and loop over it num_layers times; false unrolls the loop
            (slower to compile, can run faster).
        rope: rotary positions; null is the family's.
        encoder_decoder: the decoder of an encoder-decoder; null is the family's.
        images: levels of an image model; hidden_size and num_heads are those of the first level;
            null is the family's.
        moe: experts, and the router that chooses among them; null is the family's.
        latent: sizes of multi-head latent attention, from which head_size follows; null is the
            family's.
        mtp: modules that predict tokens further ahead; null has none.
        lora: low-rank adapters, which train instead of the model's parameters; null has none.
        preference: trains on pairs of a better and a worse answer; null predicts the next token.
    """

    family: FamilyName = "gpt"
    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 8
    num_kv_heads: int | None = None
    head_size: int | None = None
    head_sizes: tuple[int, ...] | None = None
    ffn_hidden_size: int | None = None
    mlp: str = "dense"
    norm: NormKind | None = None
    norm_eps: float | None = None
    norm_order: NormOrder | None = None
    activation: Activation | None = None
    gated: bool | None = None
    linear_bias: LinearBias | None = None
    positions: Positions | None = None
    qk_norm: QKNorm | None = None
    attention_sinks: bool | None = None
    causal: bool | None = None
    token_types: int | None = None
    attention_scale: float | None = None
    attention_softcap: float | None = None
    softcap_layers: tuple[bool, ...] | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_divisor: float | None = None
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    seq_length: int = 256
    max_positions: int | None = None
    vocab_size: int | None = None
    vocab_multiple: int = 1
    dropout: float = 0.0
    dtype: Dtype = "float32"
    products: Products = "native"
    tie_embeddings: bool = True
    logit_softcap: float | None = None
    z_loss: float = 0.0
    remat: Remat = "none"
    remat_layers: int | None = None
    attention: AttentionKind = "auto"
    kernels: Kernels = "xla"
    scan_layers: bool = True
    rope: Rope | None = dataclasses.field(default=None, metadata={"sections": True})
    encoder_decoder: EncoderDecoder | None = dataclasses.field(
        default=None, metadata={"sections": True}
    )
    images: Images | None = dataclasses.field(default=None, metadata={"sections": True})
    moe: MoE | None = dataclasses.field(default=None, metadata={"sections": True})
    latent: Latent | None = dataclasses.field(default=None, metadata={"sections": True})
    mtp: MTP | None = dataclasses.field(default=None, metadata={"sections": True})
    lora: LoRA | None = dataclasses.field(default=None, metadata={"sections": True})
    preference: Preference | None = dataclasses.field(default=None, metadata={"sections": True})

    def __post_init__(self) -> None:
        check_fields(self, "model")
        for name in SECTIONS:
            object.__setattr__(self, name, section_of(self, name))
        require_positive("model", self, "num_layers", "hidden_size", "num_heads")
        require_positive("model", self, "ffn_hidden_size", "seq_length", "vocab_size")
        require_positive("model", self, "vocab_multiple", "num_kv_heads", "head_size", "norm_eps")
        require_positive("model", self, "max_positions", "logit_softcap", "window")
        require_positive("model", self, "attention_scale", "embedding_scale", "residual_scale")
        require_positive("model", self, "logit_divisor", "attention_softcap")
        require_share("model", self, "dropout")
        require_not_negative("model", self, "remat_layers", "z_loss", "token_types")
        most = max(self.num_layers, self.decoder_layers)
        if (self.remat_layers or 0) > most:
            raise UserError(
                f"model.remat_layers={self.remat_layers} is more than model.num_layers={most}; use "
                "fewer, or null for all"
            )
        check_block(self)
        if self.moe:
            check_layers(self.moe, self.num_layers)
        if self.mtp:
            check_mtp(self)
        if self.lora:
            check_lora(self)
        if self.preference:
            check_preference(self)
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
        return (self.encoder_decoder and self.encoder_decoder.num_layers) or self.num_layers

    @property
    def target_length(self) -> int:
        """Tokens in the targets of an encoder-decoder."""
        return (self.encoder_decoder and self.encoder_decoder.seq_length) or self.seq_length

    @property
    def block(self) -> BlockOptions:
        """The options of a block, those that are set, else the family's; made once a model."""
        return _options(self)

    @property
    def drops(self) -> bool:
        """True if training draws random numbers."""
        return self.dropout > 0 or bool(self.images and self.images.drop_path > 0)

    @property
    def mlp_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def reach(self) -> int:
        """Tokens that a token attends to at most in layers with a window, itself the last."""
        return min(self.window or self.seq_length, self.seq_length)

    @property
    def ahead(self) -> int:
        """Modules that predict tokens further ahead."""
        return self.mtp.layers if self.mtp else 0

    @property
    def routed_layers(self) -> int:
        """Layers that can have a router, with those of modules that predict tokens ahead."""
        return self.num_layers + self.ahead

    @property
    def windowed(self) -> tuple[bool, ...]:
        """For each layer, whether it has the window."""
        return by_layer(self.window_layers, self.num_layers)

    @property
    def capped(self) -> tuple[bool, ...]:
        """For each layer, whether it caps scores if the model has a cap."""
        return by_layer(self.softcap_layers, self.num_layers)

    @property
    def period(self) -> int:
        """Layers that one iteration of the loop over layers runs: a period of their shapes."""
        if not self.head_sizes:
            return 1
        return len(shortest(repeated(self.head_sizes, self.num_layers), whole=True))

    def in_periods(self, layers: Sequence[int]) -> tuple[int, ...]:
        """The layers of a pipeline's parts (`layout.stage_layers`) as numbers of periods.

        Raises:
            UserError: a part has some layers of a period, or they are not all layers.
        """
        uneven = any(count % self.period for count in layers)
        if self.period > 1 and (uneven or sum(layers) != self.num_layers):
            raise UserError(
                f"layout.stage_layers={list(layers)} with model.head_sizes: a part of the model "
                f"has whole periods of {self.period} layers; use multiples of {self.period} that "
                f"add up to model.num_layers={self.num_layers}"
            )
        return tuple(count // self.period for count in layers)

    def head_size_of(self, layer: int) -> int:
        """The width of a head in one layer."""
        sizes = self.head_sizes
        return sizes[layer % len(sizes)] if sizes else self.block.head_size

    @property
    def every_head_size(self) -> tuple[int, ...]:
        """The widths of heads that some layers have."""
        return tuple(dict.fromkeys(self.head_sizes or (self.block.head_size,)))

    def with_heads_of(self, head_size: int) -> "ModelConfig":
        """The model as a layer with heads of this width reads it."""
        if not self.head_sizes:
            return self
        return dataclasses.replace(self, head_size=head_size, head_sizes=None)

    def of_layers(self, layers: slice) -> "ModelConfig":
        """The model as these layers read it, which have heads of one width.

        What all of them have, or none, holds for all layers, so that nothing is chosen by number.
        They run in the loop of this model: its iterations, not theirs, say whether there is one.
        """
        windowed, capped = (set(each[layers]) for each in (self.windowed, self.capped))
        changes: dict[str, Any] = {"scan_layers": self.block.looped}
        if self.window and len(windowed) == 1:
            changes["window_layers"] = None
            if windowed == {False}:
                rope = self.rope and dataclasses.replace(self.rope, window_theta=None)
                changes |= {"window": None, "rope": rope}
        if self.attention_softcap and len(capped) == 1:
            cap = self.attention_softcap if capped == {True} else None
            changes |= {"attention_softcap": cap, "softcap_layers": None}
        heads = self.with_heads_of(self.head_size_of(layers.start))
        return dataclasses.replace(heads, **changes)

    def with_lengths(self, padded: Callable[[int], int]) -> "ModelConfig":
        """The model with longer sequences, whose added tokens at the end nothing else depends on.

        It has the same positions, and a window as long as the sequence where it was that before.

        Args:
            padded: rounds a number of tokens up.
        """
        length, both = self.seq_length, self.encoder_decoder
        if both and both.seq_length:
            both = dataclasses.replace(both, seq_length=padded(both.seq_length))
        longer = padded(length)
        if (longer, both) == (length, self.encoder_decoder):
            return self
        learned, window = self.block.positions == "learned", self.window
        if window and self.reach == length:
            window = max(window, longer)
        return dataclasses.replace(
            self,
            seq_length=longer,
            encoder_decoder=both,
            max_positions=self.num_positions if learned else self.max_positions,
            window=window,
        )

    def padded_vocab(self, padded: Callable[[int], int]) -> int:
        """Rows of the token table; `padded` rounds a size up to equal shards."""
        return self.vocab_multiple * padded(-(-(self.vocab_size or 0) // self.vocab_multiple))

    @property
    def recomputing(self) -> int | None:
        """Iterations of the loop over layers that recompute, counted from the first; None: all."""
        return None if self.remat_layers is None else self.remat_layers // self.period

    @property
    def keeps_inputs(self) -> bool:
        """True if some layers save the inputs of their matmuls for backward."""
        return self.remat in ("none", "attention") or self.remat_layers is not None

    def remats(self, layers: int) -> tuple[tuple[Remat, int], ...]:
        """Splits a stack of layers by what they recompute: (policy, number of layers), in order.

        Where layers differ in shape, a period of them counts as one.
        """
        first = layers if self.recomputing is None else min(self.recomputing, layers)
        both: tuple[tuple[Remat, int], ...] = ((self.remat, first), ("none", layers - first))
        return tuple((remat, count) for remat, count in both if count)


def itemsize(dtype: Dtype) -> int:
    """Bytes of an element."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def option(model: ModelConfig, name: str) -> Any:
    """A field of a model by its name, or where it is null what its family puts in its place.

    Args:
        model: that has it.
        name: the field's; one of a section has the section's before it, as `rope.theta`.
    """
    rules = {
        "ffn_hidden_size": model.mlp_size,
        "moe.ffn_hidden_size": (model.moe and model.moe.ffn_hidden_size) or model.mlp_size,
        "encoder_decoder.num_layers": model.decoder_layers,
        "encoder_decoder.seq_length": model.target_length,
        "encoder_decoder.output_scale": model.block.output_scale,
        "window_layers": period_of(model.windowed),
        "softcap_layers": period_of(model.capped),
        "head_size": None if model.head_sizes else model.block.head_size,
        "head_sizes": model.head_sizes and shortest(repeated(model.head_sizes, model.num_layers)),
    }
    if name in rules:
        return rules[name]
    if name == "rope.range" and model.rope:
        return model.rope.turns
    section, _, field = name.rpartition(".")
    if section:
        return getattr(getattr(model, section), field, None)
    return getattr(model.block, name, getattr(model, name, None))


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by names such as `rope.theta` as a dict of each section.

    >>> nested({"num_layers": 2, "rope.theta": 5e5})
    {'num_layers': 2, 'rope': {'theta': 500000.0}}
    """
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        first, dot, rest = name.partition(".")
        if dot:
            tree.setdefault(first, {})[rest] = value
        else:
            tree[first] = value
    return {
        name: nested(value) if any(key.startswith(f"{name}.") for key in fields) else value
        for name, value in tree.items()
    }


def with_fields(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """The model with other values of some fields, also of sections: `{"rope.theta": 5e5}`.

    Of another family it has that family's sections.

    Raises:
        UserError: the fields do not fit each other, or have no effect.
    """
    changes = nested(fields)
    if fields.get("family", model.family) != model.family:
        changes = dict.fromkeys(SECTIONS) | changes
    for name in SECTIONS:
        section, values = getattr(model, name), changes.get(name)
        if section is not None and isinstance(values, Mapping):
            given = {key: value for key, value in values.items() if value is not None}
            left = {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
            changes[name] = {**{k: v for k, v in left.items() if k not in values}, **given}
    return dataclasses.replace(model, **changes)


_options = lru_cache(maxsize=4096)(block_options)  # a cache on a model would be among its `vars`


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """The fields of a dataclass and of its sections, by names such as `rope.theta`.

    A section that the family lacks is None.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), f"{prefix}{field.name}"
        values |= flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return values
