"""The values to draw for each field of a config, and the fields that are not drawn.

The first value of a field is its plain one: a failing case is reduced to plain values as far as it
still fails. Sizes are small, so that a case takes seconds, and odd, so that devices rarely divide
them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from jaxptd.config import Activation, FamilyName, Images, OptimizerName, Remat
from jaxptd.config.block import FAMILIES, SECTIONS, NormOrder
from jaxptd.config.moe import GroupScore, RouterScore
from jaxptd.config.preference import PreferenceLoss
from jaxptd.config.written import field_types
from jaxptd.context_parallel import STRATEGIES
from jaxptd.layout import (
    SCHEDULES,
    Attention2D,
    Axis,
    Balance,
    ExpertSplit,
    LatentExchange,
    LatentProducts,
    Matmul2D,
    ReplicaState,
)

Values = Mapping[str, Any]  # of fields, by `section.name`

OWN = ("own.csv", "own-split.csv", "own-v.csv")  # schedules from files, drawn as well
UNEVEN = "uneven"  # stands for layout.stage_layers, drawn once the number of parts is known
_SIZES = (1, 2, 4, 3, 8)

DRAWN: Mapping[str, tuple[Any, ...]] = {
    # ---- how a step is computed ----
    **{f"layout.{axis}": _SIZES for axis in Axis},
    "layout.sequence_parallel": (False, True),
    "layout.collective_matmul": (False, True),
    "layout.keep_gathered": (False, True),
    "layout.experts": get_args(ExpertSplit),
    "layout.ring": tuple(STRATEGIES),
    "layout.replica_state": get_args(ReplicaState),
    "layout.latent_exchange": get_args(LatentExchange),
    "layout.latent_products": get_args(LatentProducts),
    "layout.balance": get_args(Balance),
    "layout.matmul2d": get_args(Matmul2D),
    "layout.matmul2d_slices": (1, 2, 3),
    "layout.attention2d": get_args(Attention2D),
    "layout.schedule": (*SCHEDULES, *OWN),
    "layout.virtual_stages": (None, 1, 2, 3),
    "layout.stage_layers": (None, UNEVEN),
    "layout.zero": (0, 1, 2, 3),
    "layout.offload": (
        *("none", "optimizer", "parameters", "activations"),
        *(("optimizer", "activations"), ("optimizer", "parameters")),
        *(("parameters", "activations"), ("optimizer", "parameters", "activations")),
    ),
    "layout.update_on": ("device", "host"),
    "train.micro_batches": (1, 2, 3, 4),
    "model.remat": get_args(Remat),
    "model.remat_layers": (None, 0, 1, 2),
    "model.attention": ("auto", "xla"),
    "model.scan_layers": (True, False),
    "model.vocab_multiple": (1, 8),
    "model.moe.chunk": (None, 0.3, 8.0),
    # ---- what is computed ----
    "model.dtype": ("float64", "float32", "bfloat16", "float16"),
    "model.family": tuple(name for name in get_args(FamilyName) if "images" not in FAMILIES[name]),
    "model.num_layers": (2, 3, 4, 5),
    "model.encoder_decoder.num_layers": (None, 1, 3),
    "model.hidden_size": (16, 12, 15, 24),
    "model.num_heads": (4, 3, 6, 8),
    "model.num_kv_heads": (None, 1, 2, 3),
    "model.head_size": (None, 2, 6),
    "model.head_sizes": (None, (2, 6), (6, 2, 2)),
    "model.ffn_hidden_size": (None, 24, 23),
    "model.norm": (None, "layernorm", "rmsnorm"),
    "model.norm_eps": (None, 1e-3),
    "model.norm_order": (None, *get_args(NormOrder)),
    "model.activation": (None, *get_args(Activation)),
    "model.gated": (None, True, False),
    "model.linear_bias": (None, "all", "qkv", "none"),
    "model.positions": (None, "learned", "rope", "relative", "none"),
    "model.rope.theta": (None, 100.0),
    "model.rope.scaling": (None, "linear", "llama3", "yarn"),
    "model.rope.factor": (None, 2.0),
    "model.rope.original_length": (None, 4),
    "model.rope.range": (None, (1.0, 2.0)),
    "model.rope.attention_factor": (None, 1.5),
    "model.rope.truncate": (None, False),
    "model.rope.window_theta": (None, 30.0),
    "model.rope.layers": (None, (True, False), (False, True, True)),
    "model.encoder_decoder.relative_buckets": (None, 8),
    "model.encoder_decoder.relative_distance": (None, 7, 40),
    "model.qk_norm": (None, True, False, "whole"),
    "model.attention_sinks": (None, True, False),
    "model.causal": (None, True, False),
    "model.token_types": (None, 0, 2),
    "model.attention_scale": (None, 0.3),
    "model.embedding_scale": (None, 3.0),
    "model.residual_scale": (None, 0.5),
    "model.logit_divisor": (None, 2.0),
    "model.window": (None, 3, 7),
    "model.window_layers": (None, (True, False), (False, False, True), (True, True, False)),
    "model.seq_length": (8, 16, 12, 24, 18),
    "model.encoder_decoder.seq_length": (None, 8, 12),
    "model.max_positions": (None, 24),
    "model.vocab_size": (13, 16, 31),
    "model.dropout": (0.0, 0.1),
    "model.tie_embeddings": (True, False),
    "model.encoder_decoder.output_scale": (None, 0.5),
    "model.attention_softcap": (None, 0.5),
    "model.softcap_layers": (None, (True, False), (False, True, True)),
    "model.logit_softcap": (None, 2.0),
    "model.z_loss": (0.0, 0.1),
    "model.moe.num_experts": (None, 4, 6, 3),
    "model.moe.top_k": (None, 1, 2, 3),
    "model.moe.ffn_hidden_size": (None, 12, 23),
    "model.moe.shared_ffn_hidden_size": (None, 0, 12),
    "model.moe.shared_gate": (None, True, False),
    "model.moe.score": (None, *get_args(RouterScore)),
    "model.moe.normalize": (None, True, False),
    "model.moe.scale": (None, 2.5),
    "model.moe.num_groups": (None, 2, 3),
    "model.moe.top_groups": (None, 2),
    "model.moe.group_score": (None, *get_args(GroupScore)),
    "model.moe.router_bias": (None, True),
    "model.moe.bias_rate": (None, 0.1),
    "model.moe.balance_loss": (None, 0.5),
    "model.moe.z_loss": (None, 0.1),
    "model.moe.first_dense": (None, 1),
    "model.moe.every": (None, 2),
    "model.moe.dense_layers": (None, (1,), (0, 2)),
    "model.latent.q_rank": (None, 0, 10),
    "model.latent.kv_rank": (None, 6, 7),
    "model.latent.nope_size": (None, 3, 6),
    "model.latent.rope_size": (None, 2),
    "model.latent.value_size": (None, 1, 5),
    "model.mtp.layers": (None, 1, 2),
    "model.lora.rank": (None, 1, 3),
    "model.lora.alpha": (None, 5.0),
    "model.lora.targets": (None, ("attention.*",), ("*.q*", "*.down")),
    "model.lora.rslora": (None, True),
    "model.preference.loss": (None, *get_args(PreferenceLoss)),
    "model.preference.beta": (None, 0.5),
    "data.documents": ("joined", "apart", "whole"),
    "data.restart_positions": (False, True),
    "optimizer.name": get_args(OptimizerName),
    "optimizer.decay": ("cosine", "linear", "wsd", "constant"),
    "optimizer.weight_decay": (0.1, 0.0),
    "optimizer.beta1": (0.9, 0.5),
    "optimizer.beta2": (0.95, 0.8),
    "optimizer.epsilon": (1e-8, 1e-4),
    "optimizer.momentum": (0.95, 0.5),
    "optimizer.grad_clip": (1.0, 0.0, 0.01),
    "optimizer.ema_decay": (0.0, 0.8),
    "optimizer.rates": (None, "*.w"),  # a pattern, drawn without its factor
    "optimizer.frozen": (None, ("*.w",), ("*.mlp.*",), ("*table",)),
    "train.global_batch_size": (8, 4, 6, 12, 24),
    "train.seed": (0, 7),
}

# Fields that do not affect the result on one device.
HOW = frozenset(
    (
        *(name for name in DRAWN if name.startswith("layout.")),
        *("train.micro_batches", "model.remat", "model.remat_layers", "model.attention"),
        *("model.scan_layers", "model.vocab_multiple", "model.moe.chunk"),
    )
)

# Set in every case: short warm-up, so that parameters move, and simulated devices.
FIXED: Values = {
    "optimizer.learning_rate": 0.01,
    "optimizer.warmup_steps": 3,
    "train.steps": 30,
    "train.platform": "cpu",
}

# The largest values that stand for a family's own, of a published model, where a field is null.
LARGEST: Mapping[str, int] = {
    "model.moe.num_experts": 8,
    "model.moe.top_k": 2,
    "model.moe.ffn_hidden_size": 20,
    "model.moe.shared_ffn_hidden_size": 20,
    "model.moe.first_dense": 1,
    "model.moe.num_groups": 2,
    "model.moe.top_groups": 1,
    "model.latent.q_rank": 9,
    "model.latent.kv_rank": 8,
    "model.latent.nope_size": 4,
    "model.latent.rope_size": 4,
    "model.latent.value_size": 4,
}

NOT_DRAWN: Mapping[str, str] = {
    **dict.fromkeys(
        (f"model.images.{field.name}" for field in dataclasses.fields(Images)),
        "image families have their own sizes; tests compare them with one device",
    ),
    "model.mtp.weight": "a factor on losses, without effect where there is no module",
    "model.moe.replay": "verify sets it below float64, to give layouts one device's choices",
    "model.mlp": "a name that user code registers; its test compares layouts with one device",
    "model.products": "verify compares native products, whatever a config trains with",
    "model.kernels": "triton is for GPUs; a test replaces its kernels and checks the step",
    "model.encoder_decoder.start_token": "an id like any other, and batches are random",
    "data.source": "verify reads no data",
    "data.tokenizer": "verify reads no data",
    "data.special_tokens": "verify reads no data",
    "data.begin_token": "verify reads no data",
    "data.text_field": "verify reads no data",
    "data.validation_fraction": "verify reads no data",
    "data.validation": "verify reads no data",
    "data.prompt_field": "verify reads no data",
    "data.rejected_field": "verify reads no data",
    "data.messages_field": "verify reads no data",
    "data.format": "verify reads no data",
    "data.tools_field": "verify reads no data",
    "data.chat_template": "verify reads no data",
    "data.chat_date": "verify reads no data",
    "data.train_on": "verify reads no data",
    "data.too_long": "verify reads no data",
    "data.augment": "verify reads no data",
    "optimizer.warmup_fraction": "affects only the learning rate, and warm-up is 3 steps",
    "optimizer.decay_steps": "affects only the learning rate, which all devices compute alike",
    "optimizer.cooldown_steps": "affects only the learning rate",
    "optimizer.min_learning_rate": "affects only the learning rate",
    "optimizer.skip_above": "verify skips no step",
    "train.max_skipped": "affects only runs of many steps",
    "train.check_steps": "affects no step that is computed right",
    "train.log_every": "affects only runs of many steps",
    "train.eval_every": "affects only runs of many steps",
    "train.eval_batches": "affects only evaluations",
    **dict.fromkeys(("train.patience", "train.min_improvement"), "verify evaluates nothing"),
    "train.sample_tokens": "affects only the end of a run",
    "train.run_dir": "verify writes nothing",
    "train.loggers": "verify writes nothing",
    "train.profile": "verify writes nothing",
    **dict.fromkeys(
        (
            f"checkpoint.{name}"
            for name in ("every", "keep", "keep_best", "best_metric", "asynchronous", "data")
        ),
        "verify saves nothing",
    ),
    "checkpoint.memory_every": "verify saves nothing",
    "processes.elastic": "one process has all devices",
    "checkpoint.memory_dir": "verify saves nothing",
    "checkpoint.resume": "verify saves nothing",
    "checkpoint.start": "verify starts from random numbers",
    "model.moe.upcycle": "verify starts from random numbers",
    **dict.fromkeys(
        (
            f"processes.{name}"
            for name in ("coordinator", "count", "id", "wait", "domain", "place", "stuck_after")
        ),
        "one process has all devices",
    ),
    "processes.slow_factor": "one process has all devices",
}


def fields() -> set[str]:
    """Every field of a config, as `section.name`."""
    return set(field_types())


def plain(name: str) -> Any:
    """The plain value of a field, to which failing cases are reduced."""
    return DRAWN[name][0]


def of_section(name: str) -> bool:
    """True for fields of a section of the model, which not every family has."""
    return name.removeprefix("model.").partition(".")[0] in SECTIONS


def has_field(family: str, name: str) -> bool:
    """False for fields of a section that the family lacks."""
    section = name.removeprefix("model.").partition(".")[0]
    return not of_section(name) or FAMILIES[family].get(section) is not None


def small(values: Values) -> Values:
    """A case with smaller sizes in place of a family's, where these are large."""
    family = FAMILIES[values["model.family"]]
    sizes = {}
    for name, largest in LARGEST.items():
        _, section, field = name.split(".")
        own = getattr(family.get(section), field, None)
        if values[name] is None and own is not None and own > largest:
            sizes[name] = largest
    return {**values, **sizes}
