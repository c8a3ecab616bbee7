"""The models that tests compare with the reference; the only file here that knows jaxptd.

Each model combines nearly all options that its family supports at once.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxptd.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig, nested
from jaxptd.mesh import Layout, make_mesh
from jaxptd.step import Program
from reference.families import PRESETS
from reference.layers import MoE, Options
from reference.optimizers import Rule
from reference.rope import Rope

STEPS = 3  # one step of warm-up, the peak, and one step of decay
RULE = Rule(1e-2, 2, 4, 0.1, 0.8, 0.9, 1e-3, 0.1, momentum=0.7)
READ = {  # fields of `OptimizerConfig` that each optimizer reads -> their names here
    "adamw": ("beta1", "beta2", "epsilon"),
    "lion": ("beta1", "beta2"),
    "sgd": ("beta1",),
    "muon": ("beta1", "beta2", "epsilon", "momentum"),
    "adafactor": (),
}
SEED = 2**32 - 5
VOCAB, BATCH = 13, 8
SIZES = {"hidden_size": 16, "num_heads": 4, "seq_length": 8, "ffn_hidden_size": 24}
Choice = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model: the fields of its config, and the matching options of the reference.

    Args:
        family: family of the model.
        fields: fields of `ModelConfig` besides the sizes.
        options: options of the reference besides the family's preset.
        apart: whether documents are kept separate.
        optimizer: name of the optimizer.
    """

    family: str
    fields: Choice
    options: Choice = dataclasses.field(default_factory=dict)
    apart: bool = False
    optimizer: Any = "adamw"

    def __str__(self) -> str:
        return self.family if self.optimizer == "adamw" else f"{self.family} {self.optimizer}"

    def config(self, layout: Layout) -> Config:
        """The config of this model on a layout, with micro-batches."""
        fields = {"num_layers": 2, **SIZES, "dropout": 0.2, "dtype": "float64", **self.fields}
        rule = OptimizerConfig(
            name=self.optimizer,
            learning_rate=RULE.peak,
            warmup_steps=RULE.warmup,
            weight_decay=RULE.decay,
            grad_clip=RULE.clip,
            **{name: getattr(RULE, name) for name in READ[self.optimizer]},
        )
        return Config(
            ModelConfig(family=self.family, vocab_size=VOCAB, **nested(fields)),
            layout,
            data=DataConfig(documents="apart" if self.apart else "joined"),
            optimizer=rule,
            train=TrainConfig(
                steps=RULE.steps, seed=SEED, global_batch_size=BATCH, micro_batches=2
            ),
        )

    @property
    def rule(self) -> Rule:
        """The reference's optimizer."""
        return dataclasses.replace(RULE, name=self.optimizer)

    @property
    def known(self) -> Options:
        """The reference's options for the model."""
        sizes = {"layers": 2, "decoder_layers": 0, "head_size": 4, "dropout": 0.2}
        return Options(**sizes | PRESETS[self.family] | self.options)


GPT = Case(
    "gpt",
    {"tie_embeddings": False, "z_loss": 0.125, "logit_softcap": 2.0, "max_positions": 12},
    {"tied": False, "z_loss": 0.125, "cap": 2.0},
    apart=True,
)
QWEN = Case(
    "qwen3",
    {"num_kv_heads": 2, "head_size": 6, "linear_bias": "qkv", "window": 5, "rope.theta": 20.0},
    {"head_size": 6, "window": 5, "rope": Rope(20.0)},
    apart=True,
)
_NEAR, _FAR = (3, Rope(7.0)), (None, Rope(20.0, "linear", 4.0))
# Two layers with a window and a separate rope, then one without; one layer rotates nothing.
PATTERN = Case(
    "qwen3",
    {
        "num_layers": 5,
        "num_kv_heads": 2,
        "head_size": 6,
        "window": 3,
        "window_layers": (True, True, False),
        "rope.theta": 20.0,
        "rope.scaling": "linear",
        "rope.factor": 4.0,
        "rope.window_theta": 7.0,
        "rope.layers": (True, True, True, False, True),
        "linear_bias": "qkv",
    },
    {
        "layers": 5,
        "head_size": 6,
        "by_layer": (_NEAR, _NEAR, _FAR, (3, None), _NEAR),
    },
    apart=True,
)
# Scores have a cap in the first two layers only, and a window in the second.
SINKS = Case(
    "llama",
    {
        "num_layers": 3,
        "num_kv_heads": 2,
        "norm_order": "output",
        "attention_sinks": True,
        "window": 5,
        "window_layers": (False, True),
        "attention_softcap": 0.2,
        "softcap_layers": (True, True, False),
    },
    {
        "layers": 3,
        "by_layer": ((None, Rope(1e4)), (5, Rope(1e4)), (None, Rope(1e4))),
        "score_cap": 0.2,
        "uncapped": (2,),
        "output": True,
    },
    apart=True,
)
# Heads of two widths: all layers of one have the window, and its rotation, and none of the other.
HEADS = Case(
    "qwen3",
    {
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_sizes": (6, 4),
        "window": 3,
        "window_layers": (True, False),
        "rope.theta": 20.0,
        "rope.window_theta": 7.0,
        "attention_softcap": 0.2,
        "softcap_layers": (False, True),
    },
    {
        "layers": 4,
        "head_sizes": (6, 4),
        "by_layer": ((3, Rope(7.0)), (None, Rope(20.0))) * 2,
        "score_cap": 0.2,
        "uncapped": (0, 2),
    },
    apart=True,
)
# Gemma 2 has caps of scores and of logits, Gemma 3 norms of queries and keys and two rotations.
_ROOT = SIZES["hidden_size"] ** 0.5
GEMMA2 = Case(
    "gemma2",
    {
        "num_kv_heads": 2,
        "head_size": 6,
        "attention_scale": 0.3,
        "window": 3,
        "window_layers": (True, False),
        "attention_softcap": 0.2,
        "logit_softcap": 2.0,
    },
    {
        "head_size": 6,
        "scale": 0.3,
        "by_layer": ((3, Rope(1e4)), (None, Rope(1e4))),
        "score_cap": 0.2,
        "cap": 2.0,
        "embedding_scale": _ROOT,
    },
    apart=True,
)
GEMMA3 = Case(
    "gemma3_text",
    {
        "num_layers": 4,
        "num_kv_heads": 2,
        "head_size": 6,
        "window": 3,
        "window_layers": (True, True, False),
        "rope.theta": 20.0,
        "rope.scaling": "linear",
        "rope.factor": 4.0,
        "rope.window_theta": 7.0,
        "z_loss": 0.125,
    },
    {
        "layers": 4,
        "head_size": 6,
        "by_layer": (_NEAR, _NEAR, _FAR, _NEAR),
        "embedding_scale": _ROOT,
        "z_loss": 0.125,
    },
)
BERT = Case("bert", {})
T5 = Case(
    "t5",
    {
        "encoder_decoder.seq_length": 16,
        "encoder_decoder.num_layers": 3,
        "gated": True,
        "encoder_decoder.start_token": 2,
        "encoder_decoder.relative_buckets": 8,
        "encoder_decoder.relative_distance": 7,
    },
    {
        "decoder_layers": 3,
        "gated": True,
        "start": 2,
        "buckets": 8,
        "distance": 7,
        "output_scale": SIZES["hidden_size"] ** -0.5,
    },
)


def _stretched(optimizer: Any, scaling: str, **more: Any) -> Case:
    """A Llama whose eight waves make from 10 turns down to a fraction in the original length."""
    wide = {"head_size": 16, "rope.theta": 20.0, "rope.scaling": scaling, "rope.factor": 4.0}
    wide |= {"rope.original_length": 64, "rope.range": (1.5, 6.0)}
    options = {"head_size": 16, "rope": Rope(20.0, scaling, 4.0, 64, 1.5, 6.0)}
    return Case("llama", {**wide, **more}, options, optimizer=optimizer)


YARN = _stretched("muon", "yarn")
LLAMA_3 = _stretched("adafactor", "llama3", num_kv_heads=2)


def _experts(
    family: str, moe: Choice, fields: Choice, options: Choice, optimizer: Any = "adamw"
) -> Case:
    """A model with experts.

    Args:
        family: family of the model.
        moe: fields of `model.moe`.
        fields: other fields of the model.
        options: options of the reference, except those of experts.
        optimizer: name of the optimizer.
    """
    names = {"top_k": "chosen", "num_groups": "groups", "bias_rate": "rate"}
    known = {field.name for field in dataclasses.fields(MoE)}
    renamed = {names.get(name, name): value for name, value in moe.items()}
    experts = MoE(**{name: value for name, value in renamed.items() if name in known})
    fields = {**fields, **{f"moe.{name}": value for name, value in moe.items()}}
    return Case(family, fields, {**options, "moe": experts}, optimizer=optimizer)


# A bias rate that overturns choices: experts idle in one step receive tokens in another.
TURNING = 10.0
SIGMOIDS = _experts(
    "qwen3_moe",
    {
        "num_experts": 8,
        "top_k": 2,
        "ffn_hidden_size": 10,
        "shared_ffn_hidden_size": 12,
        "num_groups": 4,
        "top_groups": 2,
        "score": "sigmoid",
        "scale": 2.5,
        "first_dense": 1,
        "bias_rate": TURNING,
        "balance_loss": 0.5,
        "z_loss": 0.25,
        "chunk": 0.4,
    },
    {"num_layers": 3, "num_kv_heads": 2, "linear_bias": "none"},
    {"layers": 3},
)
MIXTRAL = _experts(
    "mixtral",
    {
        "num_experts": 4,
        "top_k": 2,
        "router_bias": True,
        "balance_loss": 0.5,
        "z_loss": 0.25,
    },
    {"num_kv_heads": 2, "tie_embeddings": False, "z_loss": 0.125},
    {"tied": False, "z_loss": 0.125},
    "muon",
)
GATED_SHARE = _experts(
    "qwen2_moe",
    {
        "num_experts": 4,
        "top_k": 3,
        "ffn_hidden_size": 10,
        "shared_ffn_hidden_size": 12,
        "shared_gate": True,
        "normalize": False,
        "scale": 1.5,
        "balance_loss": 0.5,
        "every": 2,
        "dense_layers": (1,),
        "chunk": 4.0,
    },
    {"num_layers": 4, "num_kv_heads": 2, "linear_bias": "none"},
    {"layers": 4},
    "adafactor",
)
BEST_GROUP = _experts(
    "mixtral",
    {
        "num_experts": 6,
        "top_k": 2,
        "normalize": False,
        "num_groups": 3,
        "top_groups": 2,
        "group_score": "best",
        "bias_rate": 0.01,
        "z_loss": 0.25,
        "dense_layers": (1,),
    },
    {"num_layers": 3, "gated": False, "activation": "gelu", "dropout": 0.0},
    {"layers": 3, "gated": False, "activation": "gelu", "dropout": 0.0},
    "lion",
)
EVERY_EXPERT = _experts(
    "mixtral",
    {"num_experts": 3, "top_k": 3, "score": "sigmoid", "normalize": False, "balance_loss": 0.5},
    {},
    {},
    "sgd",
)
ONE_OF_ALL = _experts(
    "qwen2_moe",
    {
        "num_experts": 4,
        "top_k": 1,
        "normalize": False,
        "shared_ffn_hidden_size": 12,
        "shared_gate": False,
    },
    {"num_kv_heads": 2, "gated": False},
    {"gated": False},
    "muon",
)
_LATENT = {"q_rank": 10, "kv_rank": 6, "nope_size": 4, "rope_size": 4, "value_size": 3}
_FEW = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 10, "shared_ffn_hidden_size": 12}
# Yarn stretches and lengthens what is rotated, and leaves the rest of a head as it is.
LATENT = _experts(
    "deepseek_v3",
    _FEW | {"num_groups": 2, "top_groups": 1, "score": "sigmoid", "scale": 2.5, "first_dense": 1},
    {f"latent.{name}": size for name, size in _LATENT.items()}
    | {"num_layers": 4, "norm_eps": 1e-2, "window": 5}
    | {"rope.theta": 20.0, "rope.scaling": "yarn", "rope.factor": 4.0}
    | {"rope.original_length": 64, "rope.range": (1.5, 6.0)},
    {"layers": 4, "eps": 1e-2, "window": 5, "rope": Rope(20.0, "yarn", 4.0, 64, 1.5, 6.0)},
)
LATENT_KEYS = _experts(  # no latent vector of queries; values as wide as keys
    "deepseek_v2",
    _FEW
    | {"num_groups": 2, "top_groups": 1, "group_score": "best", "scale": 4.0}
    | {"normalize": False, "first_dense": 0, "balance_loss": 0.5},
    {f"latent.{name}": size for name, size in {**_LATENT, "q_rank": 0, "value_size": 8}.items()}
    | {"attention_scale": 0.3, "tie_embeddings": False},
    {"scale": 0.3, "tied": False},
    "muon",
)
# Biases of all matmuls, sinks, two kinds of layers, and a yarn whose ends are not whole pairs.
_YARN = Rope(20.0, "yarn", 4.0, 64, 1.5, 6.0, whole=False)
GPT_OSS = _experts(
    "gpt_oss",
    {
        "num_experts": 4,
        "top_k": 2,
        "ffn_hidden_size": 10,
        "shared_ffn_hidden_size": 12,
        "z_loss": 0.25,
        "chunk": 0.4,
    },
    {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_size": 16,
        "window": 3,
        "window_layers": (True, False),
        "tie_embeddings": False,
        "rope.theta": 20.0,
        "rope.scaling": "yarn",
        "rope.factor": 4.0,
        "rope.original_length": 64,
        "rope.range": (1.5, 6.0),
        "rope.truncate": False,
    },
    {
        "layers": 3,
        "head_size": 16,
        "by_layer": ((3, _YARN), (None, _YARN), (3, _YARN)),
        "tied": False,
    },
)
# Tokens further ahead: modules like the last layer, whose window and rotation differ from others'.
AHEAD = (
    Case(
        "qwen3",
        {**PATTERN.fields, "mtp.layers": 2, "mtp.weight": 0.7, "z_loss": 0.125},
        {**PATTERN.options, "modules": 2, "ahead_weight": 0.7, "z_loss": 0.125},
        apart=True,
    ),
    dataclasses.replace(
        GEMMA2,
        fields={**GEMMA2.fields, "mtp.layers": 1},
        options={**GEMMA2.options, "modules": 1},
    ),
    dataclasses.replace(
        SIGMOIDS,
        fields={**SIGMOIDS.fields, "mtp.layers": 2, "tie_embeddings": False},
        options={**SIGMOIDS.options, "modules": 2, "tied": False},
    ),
    dataclasses.replace(
        LATENT,
        fields={**LATENT.fields, "mtp.layers": 1, "mtp.weight": 0.1},
        options={**LATENT.options, "modules": 1, "ahead_weight": 0.1},
    ),
    Case("gpt", {"norm_order": "output", "mtp.layers": 1}, {"output": True, "modules": 1}),
)
OTHERS = (MIXTRAL, GATED_SHARE, BEST_GROUP, EVERY_EXPERT, ONE_OF_ALL)
WITH_EXPERTS = (SIGMOIDS, GPT_OSS, *OTHERS)
WITH_LATENTS = (LATENT, LATENT_KEYS)


def batch(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draws a batch with every optional field of the family."""
    T, long = (
        SIZES["seq_length"],
        case.fields.get("encoder_decoder.seq_length", SIZES["seq_length"]),
    )

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, VOCAB, (BATCH, length))

    text = np.arange(T) < rng.integers(T // 2, T + 1, (BATCH, 1))
    targets = np.where(rng.random((BATCH, long)) < 0.3, -1, ids(long))
    fields: dict[str, Any] = {"targets": targets}
    if case.family == "t5":
        fields |= {"source": ids(T), "source_mask": text}
    elif case.family == "bert":
        fields |= {"tokens": ids(T), "mask": text, "token_types": rng.integers(0, 2, (BATCH, T))}
        fields |= {"next_sentence": rng.integers(0, 2, BATCH)}
    else:
        fields |= {"tokens": ids(T)}
    if case.apart:
        fields["segments"] = (rng.random((BATCH, T)) < 0.3).cumsum(1)
    return {name: x.astype(np.int32) for name, x in fields.items()}


@functools.cache
def shapes(case: Case) -> Mapping[str, tuple[int, ...]]:
    """The parameters' canonical shapes."""
    with jax.enable_x64(True):
        infos = Program(case.config(Layout()), make_mesh(Layout())).infos
    return {name: info.shape for name, info in infos.items()}


def start(case: Case) -> dict[str, np.ndarray]:
    """Random nonzero parameters, with norms' weights well away from zero."""
    rng = np.random.default_rng(3)
    return {
        name: 0.1 * rng.standard_normal(shape) + name.endswith("norm.w")
        for name, shape in sorted(shapes(case).items())
    }


def batches(case: Case) -> list[dict[str, np.ndarray]]:
    """Draws the batches of all steps."""
    rng = np.random.default_rng(4)
    return [batch(case, rng) for _ in range(STEPS)]


def _t5(fields: Choice, options: Choice, optimizer: Any = "adamw") -> Case:
    return Case("t5", {**T5.fields, **fields}, {**T5.options, **options}, optimizer=optimizer)


MORE = (
    Case("gpt", {"window": 3, "attention_scale": 0.3}, {"window": 3, "scale": 0.3}),
    Case("gpt", {"norm_order": "post", "activation": "relu"}, {"post": True, "activation": "relu"}),
    Case("gpt", {"norm_order": "output"}, {"output": True}),
    Case("gpt", {"dropout": 0.0, "norm": "rmsnorm"}, {"dropout": 0.0, "norm": "rmsnorm"}),
    Case(
        "llama",
        {"rope.scaling": "linear", "rope.factor": 4.0},
        {"rope": Rope(1e4, "linear", 4.0)},
        apart=True,
    ),
    Case(
        "llama",
        {"tie_embeddings": False, "activation": "gelu"},
        {"tied": False, "activation": "gelu"},
    ),
    Case("qwen2", {"num_kv_heads": 1, "positions": "none"}, {"rope": None}),
    Case(
        "mistral", {"num_kv_heads": 2, "window": 4, "dropout": 0.5}, {"window": 4, "dropout": 0.5}
    ),
    _t5({"gated": False, "qk_norm": True}, {"gated": False, "qk_norm": True}),
    _t5(
        {"tie_embeddings": False, "activation": "gelu-tanh", "z_loss": 0.25},
        {"tied": False, "activation": "gelu-tanh", "z_loss": 0.25, "output_scale": 1.0},
    ),
    _t5({"linear_bias": "all", "num_kv_heads": 2}, {}),
    # No key biases: their gradient is rounding noise, which Lion and Adafactor would amplify.
    _stretched("lion", "llama3", num_kv_heads=2),
    Case("gpt", {}, optimizer="sgd"),
    Case("gpt", {"window": 3}, {"window": 3}, optimizer="muon"),
    Case("gpt", {"linear_bias": "none"}, optimizer="adafactor"),
    _t5({}, {}, "muon"),
    _t5({"gated": False}, {"gated": False}, "adafactor"),
)
