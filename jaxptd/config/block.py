"""The options of a block, and the presets of its family.

A family is only a row of `FAMILIES`: layers and formulas read `BlockOptions`, never a name.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxptd.config.checks import Section, require_divides, require_not_negative, require_positive
from jaxptd.config.images import SWIN, SWIN_UNET, check_images
from jaxptd.config.latent import Latent, check_latent
from jaxptd.config.lora import LoRA
from jaxptd.config.moe import DEEPSEEK_V2, DEEPSEEK_V3, MoE
from jaxptd.config.mtp import MTP
from jaxptd.config.patterns import by_layer, check_patterns
from jaxptd.config.preference import Preference
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, named_fields

# ---- wavelengths of rotary positions, and the scalings that stretch them for longer texts --------
# Letters: H head size, P pairs of H.
# Source: Su et al., arXiv 2104.09864; Peng et al., arXiv 2309.00071 (yarn); Llama 3.1 (llama3).

RopeScaling = Literal["linear", "llama3", "yarn"]
_RANGES: Mapping[RopeScaling, tuple[float, float]] = {"llama3": (1, 4), "yarn": (1, 32)}


@named_fields
@dataclasses.dataclass(frozen=True)
class Rope(Section):
    """Rotary positions: their wavelengths, and how these are stretched for longer texts.

    Args:
        theta: base of the wavelengths.
        scaling: stretches the wavelengths for longer texts: linear, llama3 or yarn; null does not.
        factor: how much scaling stretches.
        original_length: sequence length before scaling; llama3 and yarn need it.
        range: turns of a wave within the original length between which llama3 and yarn
            interpolate, as [low, high]; null is [1, 4] for llama3 and [1, 32] for yarn.
        attention_factor: with yarn, factor on rotated queries and keys; null is yarn's own, 0.1
            ln(factor) + 1.
        truncate: with yarn, whether interpolation begins and ends at whole pairs; null is true.
        window_theta: base of the wavelengths in layers with a window, which scaling does not
            stretch there; null is as in other layers.
        layers: which layers rotate, as a period that repeats, or an entry for each layer; null is
            all.
    """

    theta: float = 1e4
    scaling: RopeScaling | None = None
    factor: float | None = None
    original_length: int | None = None
    range: tuple[float, ...] | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    window_theta: float | None = None
    layers: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "model.rope")

    @property
    def turns(self) -> tuple[float, ...]:
        """The range, or that of the scaling."""
        return self.range or ((0, 0) if self.scaling is None else _RANGES.get(self.scaling, (0, 0)))


def rotations(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Angles `[L, P]` of each pair at position 1, and factors `[L]` on rotated vectors, by layer.

    One row if all layers of the model rotate alike; zeros where a layer does not rotate.
    """
    rope, size = model.rope, model.block.rotated_size
    of_window = rope if rope.window_theta is None else Rope(rope.window_theta)
    kinds = zip(model.windowed, by_layer(rope.layers, model.num_layers), strict=True)
    rows = []
    for windowed, rotated in kinds:
        turn_P, length = frequencies(of_window if windowed else rope, size)
        rows.append((turn_P, length) if rotated else (0 * turn_P, 1.0))
    turn_LP, length_L = (np.array(each) for each in zip(*rows, strict=True))
    if (turn_LP == turn_LP[0]).all() and (length_L == length_L[0]).all():
        return turn_LP[:1], length_L[:1]
    return turn_LP, length_L


def frequencies(rope: Rope, size: int) -> tuple[np.ndarray, float]:
    """The angle of each pair at position 1, `[P]` in radians, and the factor on rotated vectors."""
    turn_P = rope.theta ** -(np.arange(0, size, 2) / size)
    scaled_P = turn_P / (rope.factor or 1.0)
    if rope.scaling in (None, "linear"):
        return scaled_P, 1.0
    low, high = rope.turns
    if rope.scaling == "llama3":
        turns_P = (rope.original_length or 0) * turn_P / (2 * math.pi)  # within the original length
        kept_P = np.clip((turns_P - low) / (high - low), 0, 1)
        return kept_P * turn_P + (1 - kept_P) * scaled_P, 1.0
    return _yarn(rope, turn_P, scaled_P, size)


def _yarn(
    rope: Rope, turn_P: np.ndarray, scaled_P: np.ndarray, size: int
) -> tuple[np.ndarray, float]:
    """Interpolates by the index of the pairs, and scales vectors, as published."""

    def pair_of(turns: float) -> float:  # the pair with this many turns in the original length
        length = (rope.original_length or 0) / (2 * math.pi * turns)
        return size * math.log(length) / (2 * math.log(rope.theta))

    low, high = rope.turns
    first, last = pair_of(high), pair_of(low)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    number_P = np.arange(size // 2)
    scaled = np.clip((number_P - first) / ((last - first) or 1e-3), 0, 1)
    length = rope.attention_factor or 0.1 * math.log(max(rope.factor or 1, 1)) + 1
    return scaled * scaled_P + (1 - scaled) * turn_P, length


# ---- the options of a block ----------------------------------------------------------------------

FamilyName = Literal[
    "gpt",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "bert",
    "t5",
    "swin",
    "swin-unet",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "dots1",
    "granitemoe",
    "olmoe",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
]
NormKind = Literal["layernorm", "rmsnorm"]
Kernels = Literal["auto", "xla", "triton"]
NormOrder = Literal["pre", "post", "output", "both"]
Activation = Literal["gelu", "gelu-tanh", "relu", "silu", "clamped-swiglu"]
OF_GATES: frozenset[Activation] = frozenset({"clamped-swiglu"})  # functions of gate and up together
LinearBias = Literal["all", "qkv", "none"]
Positions = Literal["learned", "rope", "relative", "none"]
QKNorm = bool | Literal["whole"]


@dataclasses.dataclass(frozen=True)
class Relative:
    """Biases of scores by distance: a number for each head and each bucket of distances.

    Args:
        buckets: of distances; those of near tokens have one distance each.
        distance: tokens that are farther apart share the last bucket.
    """

    buckets: int
    distance: int


@named_fields
@dataclasses.dataclass(frozen=True)
class EncoderDecoder(Section):
    """An encoder-decoder: its decoder, and what both stacks share.

    Args:
        num_layers: blocks of the decoder; null is model.num_layers.
        seq_length: tokens in the targets; null is model.seq_length.
        start_token: token id that the decoder reads first; 0 is padding in T5's tokenizers, and a
            byte that does not occur in texts.
        relative_buckets: buckets of distances, each with a bias; half of them hold a single
            distance.
        relative_distance: distance from which on all tokens share a bias.
        output_scale: factor on the output layer's input; null is hidden_size ** -0.5 with
            tie_embeddings, else 1.
    """

    num_layers: int | None = None
    seq_length: int | None = None
    start_token: int = 0
    relative_buckets: int = 32
    relative_distance: int = 128
    output_scale: float | None = None

    def __post_init__(self) -> None:
        section = "model.encoder_decoder"
        check_fields(self, section)
        require_positive(section, self, "num_layers", "seq_length", "relative_buckets")
        require_positive(section, self, "relative_distance", "output_scale")
        require_not_negative(section, self, "start_token")
        buckets, distance = self.relative_buckets, self.relative_distance
        if buckets % 2 or buckets < 4:
            raise UserError(f"{section}.relative_buckets={buckets}: must be even and at least 4")
        if distance <= buckets // 2:
            raise UserError(
                f"{section}.relative_distance={distance} leaves nothing to share the upper half of "
                f"{section}.relative_buckets={buckets}; use {buckets // 2 + 1} or more"
            )


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """The options of a block, none of them open; the fields are those of `ModelConfig`.

    Args:
        norm: kind of the norms.
        norm_eps: added to the variance.
        kernels: of the norms of the residual stream and of the activation.
        norm_order: norms of what enters a pair of products, of each residual sum, of what a pair
            adds to the residual stream, or of what enters and of what it adds.
        activation: of the MLP.
        gated: whether the MLP has a gate.
        linear_bias: which products have a bias.
        positions: how tokens know their place.
        rope: wavelengths; None unless positions are rope.
        relative: buckets of distances; None unless positions are relative.
        qk_norm: whether queries and keys of each head are normalised; whole: of all heads at once.
        attention_sinks: whether a logit of each head takes a share of its probabilities.
        causal: whether a token attends to no token after it.
        token_types: kinds of tokens with an embedding of their own, as the two texts of a pair.
        num_kv_heads: heads of keys and values.
        head_size: width of a head, in the first layer.
        rotated_size: elements of it that positions rotate, its last.
        attention_scale: factor of the scores of queries and keys.
        embedding_scale: factor of x after the embedding.
        residual_scale: factor of what is added to the residual stream.
        logit_divisor: divides logits.
        window: positions that a query sees, its own the last; None is all before it, as in layers
            without a window.
        output_scale: factor of x before the output layer.
        looped: whether XLA runs every layer in a loop. There it cannot undo what backward computes
            again.
        loops_keep_inputs: whether such loops keep what norms and activations take for backward.
    """

    norm: NormKind
    norm_eps: float
    kernels: Kernels
    norm_order: NormOrder
    activation: Activation
    gated: bool
    linear_bias: LinearBias
    positions: Positions
    rope: Rope | None
    relative: Relative | None
    qk_norm: QKNorm
    attention_sinks: bool
    causal: bool
    token_types: int
    num_kv_heads: int
    head_size: int
    rotated_size: int
    attention_scale: float
    embedding_scale: float
    residual_scale: float
    logit_divisor: float
    window: int | None
    output_scale: float
    looped: bool
    loops_keep_inputs: bool

    @property
    def head_unit(self) -> int:
        """Elements of a head that stay together when heads are sharded: rope rotates pairs."""
        return 2 if self.rope else 1


_GPT: dict[str, Any] = {
    "norm": "layernorm",
    "norm_eps": 1e-5,
    "norm_order": "pre",
    "activation": "gelu-tanh",
    "gated": False,
    "linear_bias": "all",
    "positions": "learned",
    "rope": Rope(),
    "qk_norm": False,
    "attention_sinks": False,
    "causal": True,
    "token_types": 0,
    "attention_scale": None,  # head_size ** -0.5
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_divisor": 1.0,
    "mtp": MTP(),
    "lora": LoRA(),
    "preference": Preference(),
}
_LLAMA = _GPT | {
    "norm": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "linear_bias": "none",
    "positions": "rope",
}
_OTHER = _GPT | {"mtp": None, "preference": None}  # than a decoder
_BERT = _OTHER | {
    "norm_eps": 1e-12,
    "norm_order": "post",
    "activation": "gelu",
    "causal": False,
    "token_types": 2,
}
_T5 = _LLAMA | {
    "norm_eps": 1e-6,
    "activation": "relu",
    "gated": False,
    "positions": "relative",
    "attention_scale": 1.0,
    "encoder_decoder": EncoderDecoder(),
    "mtp": None,
    "preference": None,
}
_SWIN = _OTHER | {
    "activation": "gelu",
    "positions": "none",
    "causal": False,
    "images": SWIN,
    "lora": None,
}
_QWEN = _LLAMA | {"norm_eps": 1e-6, "rope": Rope(1e6)}
_OLMO = _LLAMA | {
    "norm_eps": 1e-6,
    "norm_order": "output",
    "qk_norm": "whole",
    "rope": Rope(5e5),
}
_GEMMA = _LLAMA | {
    "norm_eps": 1e-6,
    "norm_order": "both",
    "activation": "gelu-tanh",
    "embedding_scale": None,  # hidden_size ** 0.5
}
_QWEN2_MOE = MoE(60, 4, 1408, 5632, shared_gate=True, normalize=False)
_DOTS1 = MoE(128, 6, 1408, 2 * 1408, score="sigmoid", scale=2.5, first_dense=1)
_DEEPSEEK = _LLAMA | {"norm_eps": 1e-6, "latent": Latent()}
_GRANITE = {
    "norm_eps": 1e-6,
    "attention_scale": 1 / 64,
    "embedding_scale": 12.0,
    "residual_scale": 0.22,
    "logit_divisor": 6.0,
}
_GPT_OSS = {
    "activation": "clamped-swiglu",
    "linear_bias": "all",
    "rope": Rope(1.5e5),
    "attention_sinks": True,
    "moe": MoE(128, 4, router_bias=True),
}
# The defaults of each family, and the sections that it can have.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "gpt": _GPT,
    "llama": _LLAMA,
    "qwen2": _QWEN | {"linear_bias": "qkv"},
    "qwen3": _QWEN | {"qk_norm": True},
    "mistral": _LLAMA,
    "bert": _BERT,
    "t5": _T5,
    "swin": _SWIN,
    "swin-unet": _SWIN | {"images": SWIN_UNET},
    "mixtral": _LLAMA | {"rope": Rope(1e6), "moe": MoE()},
    "qwen2_moe": _QWEN | {"linear_bias": "qkv", "moe": _QWEN2_MOE},
    "qwen3_moe": _QWEN | {"qk_norm": True, "moe": MoE(128, 8)},
    "olmoe": _LLAMA | {"qk_norm": "whole", "moe": MoE(64, 8, normalize=False)},
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"qk_norm": True, "rope": Rope(1e6)},
    "gpt_oss": _LLAMA | _GPT_OSS,
    "granitemoe": _LLAMA | _GRANITE | {"moe": MoE(32, 8)},
    "dots1": _QWEN | {"qk_norm": True, "rope": Rope(1e7), "moe": _DOTS1},
    "deepseek_v2": _DEEPSEEK | {"moe": DEEPSEEK_V2},
    "deepseek_v3": _DEEPSEEK | {"moe": DEEPSEEK_V3},
}
SECTIONS = (  # of `ModelConfig`
    *("rope", "encoder_decoder", "images", "moe", "latent", "mtp", "lora", "preference"),
)


def section_of(model: Any, name: str) -> Any:
    """A section of a `ModelConfig`, over what its family has in it; None: it has none.

    Raises:
        UserError: the section, or a field of it, has no effect.
    """
    given: Any = getattr(model, name)
    preset: Any = FAMILIES[model.family].get(name)
    items = given.items() if isinstance(given, Mapping) else ()
    values = {key: value for key, value in items if value is not None}
    positions = model.positions or FAMILIES[model.family]["positions"]
    unread = preset is None or (name == "rope" and positions != name)
    if not unread:
        section = preset.filled(values) if isinstance(given, Mapping | None) else given
        return section if section.is_there else None
    if values or (not isinstance(given, Mapping | None) and given != preset):
        fields = next((f".{key}={quoted(value)}" for key, value in values.items()), "")
        families = " or ".join(family for family, row in FAMILIES.items() if row.get(name))
        where = (
            f"model.positions={positions}; leave it out, or use model.positions=rope"
            if name == "rope"
            else f"the family {model.family}; leave it out, or use model.family={families}"
        )
        raise UserError(f"model.{name}{fields} has no effect with {where}")
    return None


def block_options(model: Any) -> BlockOptions:
    """The options of a `ModelConfig`, those that are null as its family has them."""
    options = {
        name: preset if getattr(model, name) is None else getattr(model, name)
        for name, preset in FAMILIES[model.family].items()
        if name not in SECTIONS
    }
    latent = model.latent
    first_size = model.head_sizes[0] if model.head_sizes else model.head_size
    plain_size = first_size or model.hidden_size // model.num_heads
    head_size = latent.head_size if latent else plain_size
    attention_scale = options.pop("attention_scale") or head_size**-0.5
    embedding_scale = options.pop("embedding_scale") or model.hidden_size**0.5
    relative, output_scale = None, 1.0
    if both := model.encoder_decoder:
        relative = Relative(both.relative_buckets, both.relative_distance)
        tied_scale = model.hidden_size**-0.5 if model.tie_embeddings else 1.0
        output_scale = both.output_scale or tied_scale
    looped = _looped(model)
    return BlockOptions(
        **options,
        rope=model.rope,
        relative=relative if options["positions"] == "relative" else None,
        kernels=model.kernels,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_size=head_size,
        rotated_size=latent.rope_size if latent else head_size,
        attention_scale=attention_scale,
        embedding_scale=embedding_scale,
        window=model.window,
        output_scale=output_scale,
        looped=looped,
        loops_keep_inputs=looped and (model.remat != "full" or model.remat_layers is not None),
    )


def _looped(model: Any) -> bool:
    """True if every loop over layers has several iterations: XLA removes loops of one."""
    images = model.images
    depths = [model.num_layers // model.period, model.decoder_layers // model.period]
    if images:
        depths = [depth // 2 for depth in (*images.depths, *images.decoder_depths)]  # in pairs
    trips = [count for depth in depths for _, count in model.remats(depth)]
    return model.scan_layers and min(trips, default=0) > 1


def check_block(model: Any) -> None:
    """Raises UserError for options that do not fit each other, or that have no effect."""
    if model.head_size is None and not model.head_sizes and not model.latent:
        require_divides("model.hidden_size", model.hidden_size, "model.num_heads", model.num_heads)
    options: BlockOptions = model.block
    kv_heads = options.num_kv_heads
    require_divides("model.num_heads", model.num_heads, "model.num_kv_heads", kv_heads)
    _check_positions(model, options)
    if options.norm == "layernorm" and model.hidden_size == 1:
        raise UserError(
            "model.hidden_size=1 with model.norm=layernorm: one number minus its mean is 0, which "
            "erases every token; use model.hidden_size=2 or more"
        )
    if model.latent:
        check_latent(model)
    if options.activation in OF_GATES and not options.gated:
        raise UserError(
            f"model.activation={options.activation} is of a gate and what it multiplies; use "
            "model.gated=true, or another activation"
        )
    if options.rope and options.rotated_size % 2 and not model.head_sizes:
        raise UserError(
            f"model.positions=rope rotates pairs, but a head has {options.head_size} elements; use "
            "an even model.head_size"
        )
    if options.window is not None and not options.causal:
        raise UserError(
            f"model.window={options.window} covers a token and those before it, but with "
            "model.causal=false a token also attends to those after it; leave one of them out"
        )
    check_patterns(model)
    _check_scores(model)
    if model.rope:
        _check_scaling(model.rope)
    if model.images:
        check_images(model.family, model.images, preset=FAMILIES[model.family]["images"])


def _check_positions(model: Any, options: BlockOptions) -> None:
    """Raises UserError for options of other positions."""
    if model.max_positions is not None and options.positions in ("none", "relative"):
        raise UserError(
            f"model.max_positions has no effect with model.positions={options.positions}; leave it "
            "out"
        )
    if options.positions == "relative" and not model.encoder_decoder:
        raise UserError(
            "model.positions=relative is an encoder-decoder's; use learned, rope or none, or "
            "model.family=t5"
        )


def _check_scores(model: Any) -> None:
    """Raises UserError for sinks or capped scores of an encoder-decoder."""
    for name, plain in {"attention_sinks": False, "attention_softcap": None}.items():
        value = getattr(model, name)
        if value not in (None, plain) and model.encoder_decoder:
            raise UserError(
                f"model.{name}={quoted(value)} with model.family={model.family}: it is for models "
                "of one text; leave it out"
            )


def _check_scaling(rope: Rope) -> None:
    """Raises UserError for options of scalings that do not fit each other, or have no effect."""
    require_positive("model.rope", rope, "theta", "factor", "original_length", "attention_factor")
    require_positive("model.rope", rope, "window_theta")
    scaling = rope.scaling
    needs = {
        "factor": scaling is not None,
        "original_length": scaling in _RANGES,
        "range": scaling in _RANGES,
        "attention_factor": scaling == "yarn",
        "truncate": scaling == "yarn",
    }
    for name, read in needs.items():
        value = getattr(rope, name)
        if value is not None and not read:
            raise UserError(
                f"model.rope.{name} has no effect with model.rope.scaling={scaling or 'null'}; "
                "leave it out"
            )
        if value is None and read and name not in ("range", "attention_factor", "truncate"):
            raise UserError(f"model.rope.scaling={scaling} needs model.rope.{name}; set it")
    if scaling == "yarn" and rope.theta <= 1:
        raise UserError(
            f"model.rope.theta={rope.theta}: yarn takes its logarithm; use a number above 1"
        )
    span = rope.range
    if span is not None and not (len(span) == 2 and 0 < span[0] < span[1]):
        raise UserError(
            f"model.rope.range={list(span)} must be two numbers above 0, the smaller first"
        )
