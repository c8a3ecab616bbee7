"""Swin, which classifies images. Source: `modeling_swin.py` of transformers 5.

Names are those in files; the parameter names of transformers 5 are aliases. Letters besides those
of `Tensors`: S channels, Y and X pixels of a patch, E hidden units of the next level, R offsets
from a query to a key, K classes; 2y and 2x rows and columns of merged patches, columns first in a
file.
"""

from jaxptd.config import ModelConfig, option
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families.family import Family, Json, Tensors, count, number

LEVELS = 8  # at most: 2**7 times the first one's width
BLOCKS = ("first", "second")  # of a pair

_LAYERS = "swin.encoder.layers"
_BLOCK = rf"({_LAYERS}\.\d+\.blocks\.\d+)".replace("swin.", r"swin\.")
_ATTENTION = rf"{_BLOCK}\.attention"


def block_rules(ours: str, theirs: str, first: int) -> tuple[Rule, ...]:
    """The rules of every second block of a level.

    Args:
        ours: prefix of our parameters' names.
        theirs: prefix of the tensors' names, with `{}` for the number of the block.
        first: the block's number in the first pair.
    """

    def rule(name: str, dims: str, tensor: str, tensor_dims: str) -> Rule:
        names = f"{ours}.{name}", dims, f"{theirs}.{tensor}", tensor_dims
        return Rule(*names, first=first, step=len(BLOCKS))

    heads, rules = "attention.self", []
    for entry, name in enumerate(("query", "key", "value")):
        rules += [
            rule("attention.qkv.w", f"L D [{entry}] N H", f"{heads}.{name}.weight", "(N H) D"),
            rule("attention.qkv.b", f"L [{entry}] N H", f"{heads}.{name}.bias", "(N H)"),
        ]
    table = f"{heads}.relative_position_bias_table"
    rules += [
        rule("attention.window_bias.table", "L R N", table, "R N"),
        rule("attention.out.w", "L N H D", "attention.output.dense.weight", "D (N H)"),
        rule("attention.out.b", "L D", "attention.output.dense.bias", "D"),
        rule("mlp.up.w", "L D F", "intermediate.dense.weight", "F D"),
        rule("mlp.up.b", "L F", "intermediate.dense.bias", "F"),
        rule("mlp.down.w", "L F D", "output.dense.weight", "D F"),
        rule("mlp.down.b", "L D", "output.dense.bias", "D"),
    ]
    for name, norm in (("attention_norm", "layernorm_before"), ("mlp_norm", "layernorm_after")):
        rules += [
            rule(f"{name}.w", "L D", f"{norm}.weight", "D"),
            rule(f"{name}.b", "L D", f"{norm}.bias", "D"),
        ]
    return tuple(rules)


def _level(number: int) -> tuple[Rule, ...]:
    """The rules of a level, and of the patch merging before the next one."""
    theirs, merge = f"{_LAYERS}.{number}", f"merge{number + 1}"
    down = f"{theirs}.downsample"
    blocks = (
        block_rules(f"down{number}.{block}", f"{theirs}.blocks.{{}}", first)
        for first, block in enumerate(BLOCKS)
    )
    return (
        *(rule for rules in blocks for rule in rules),
        Rule(f"{merge}.linear.w", "D (2y 2x) E", f"{down}.reduction.weight", "E (2x 2y D)"),
        Rule(f"{merge}.norm.w", "(D 2y 2x)", f"{down}.norm.weight", "(2x 2y D)"),
        Rule(f"{merge}.norm.b", "(D 2y 2x)", f"{down}.norm.bias", "(2x 2y D)"),
    )


_EMBEDDINGS = "swin.embeddings"
_PATCHES = f"{_EMBEDDINGS}.patch_embeddings.projection"
TENSORS = Tensors(
    prefix="swin.",
    rules=(
        Rule("patches.w", "S Y X D", f"{_PATCHES}.weight", "D S Y X"),
        Rule("patches.b", "D", f"{_PATCHES}.bias", "D"),
        Rule("patches.norm.w", "D", f"{_EMBEDDINGS}.norm.weight", "D"),
        Rule("patches.norm.b", "D", f"{_EMBEDDINGS}.norm.bias", "D"),
        *(rule for number in range(LEVELS) for rule in _level(number)),
        Rule("norm.w", "D", "swin.layernorm.weight", "D"),
        Rule("norm.b", "D", "swin.layernorm.bias", "D"),
        Rule("head.w", "D K", "classifier.weight", "K D"),
        Rule("head.b", "K", "classifier.bias", "K"),
    ),
    ignored=(r"encoder\.layers\.\d+\.blocks\.\d+\.attention\.(.*\.)?relative_position_index",),
    aliases=(
        (rf"{_ATTENTION}\.q_proj\.(\w+)", r"\1.attention.self.query.\2"),
        (rf"{_ATTENTION}\.k_proj\.(\w+)", r"\1.attention.self.key.\2"),
        (rf"{_ATTENTION}\.v_proj\.(\w+)", r"\1.attention.self.value.\2"),
        (rf"{_ATTENTION}\.o_proj\.(\w+)", r"\1.attention.output.dense.\2"),
        (
            rf"{_ATTENTION}\.relative_position_bias\.(relative_position_bias_table)",
            r"\1.attention.self.\2",
        ),
        (rf"{_BLOCK}\.mlp\.fc1\.(\w+)", r"\1.intermediate.dense.\2"),
        (rf"{_BLOCK}\.mlp\.fc2\.(\w+)", r"\1.output.dense.\2"),
    ),
)


# ---- config.json -------------------------------------------------------------------------------

LABELS = 2  # defaults of config.json


def read_levels(config: Json) -> Json:
    """Blocks and heads of each level, and the width of the MLP.

    Raises:
        UserError: the heads of a level are not twice those of the level before.
    """
    depths = _counts("depths", config.get("depths", [2, 2, 6, 2]))
    heads = _counts("num_heads", config.get("num_heads", [3, 6, 12, 24]))
    if heads != [heads[0] * 2**level for level in range(len(depths))]:
        raise UserError(
            f"num_heads={quoted(heads)}, depths={quoted(depths)}; use a model in which each level "
            "has twice the heads of the one before"
        )
    size, ratio = count("embed_dim", config["embed_dim"]), config.get("mlp_ratio", 4.0)
    return {
        "images.depths": tuple(depths),
        "num_heads": heads[0],
        "ffn_hidden_size": int(size * number("mlp_ratio", ratio)),
    }


def _counts(key: str, value: object) -> list[int]:
    """A whole number for each level. Raises UserError for anything else."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{key}={quoted(value)}; it must be a list with a number for each level")
    return [count(key, each) for each in value]


def write_levels(model: ModelConfig) -> Json:
    """The keys of `read_levels`, and the rate of stochastic depth."""
    images = model.images
    assert images is not None
    return {
        "depths": list(images.depths),
        "num_heads": [model.num_heads * 2**level for level in range(len(images.depths))],
        "mlp_ratio": model.mlp_size / model.hidden_size,
        "drop_path_rate": option(model, "images.drop_path"),
    }


def _read(config: Json) -> Json:
    """The keys of `read_levels`, and the number of classes."""
    labels = config.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise UserError(f"id2label={quoted(labels)}; it must be an object with a name for each")
    named = LABELS if labels is None else len(labels)
    classes = count("num_labels", config.get("num_labels", named))  # the key takes precedence
    return {**read_levels(config), "images.classes": classes}


def _write(model: ModelConfig) -> Json:
    """The keys of `_read`."""
    names = {str(number): f"LABEL_{number}" for number in range(option(model, "images.classes"))}
    labels = {name: int(number) for number, name in names.items()}
    return {**write_levels(model), "id2label": names, "label2id": labels}


SWIN = Family(
    "swin",
    "SwinForImageClassification",
    TENSORS,
    keys={
        "hidden_size": ("embed_dim", 96),
        "images.size": ("image_size", 224),
        "images.patch": ("patch_size", 4),
        "images.channels": ("num_channels", 3),
        "images.window": ("window_size", 7),
        "activation": ("hidden_act", "gelu"),
    },
    options={"norm": "layernorm", "norm_eps": 1e-5, "gated": False},
    fixed={
        "qkv_bias": True,
        "use_absolute_embeddings": False,
        "layer_norm_eps": 1e-5,  # patch norms always have this
    },
    others=_read,
    write_others=_write,
    tokens={},
)
