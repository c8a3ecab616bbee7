"""Swin-Unet, which classifies pixels, in safetensors with the names of its own code.

transformers has no such model: `config.json` has `"model_type": "swin-unet"` and the arguments of
`SwinTransformerSys`. Letters besides those of `Tensors`: S channels, Y and X pixels of a patch, E
hidden units of another level, R offsets from a query to a key, K classes; 2y and 2x rows and
columns of merged or expanded patches, columns first where they are merged.

Source: `swin_transformer_unet_skip_expand_decoder_sys.py` of Swin-Unet's code (arXiv 2105.05537).
"""

from collections.abc import Iterator

from jaxptd.config import ModelConfig
from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Rule
from jaxptd.hf.families.family import Family, Json, Tensors
from jaxptd.hf.families.swin import BLOCKS, read_levels, write_levels

PREFIX = "swin_unet."
# As in its code: step n on the way up joins level 3 - n, and the last step makes 4 x 4 pixels.
LEVELS, PATCH = 4, 4
_BLOCK = (
    ("attention_norm.w", "L D", "norm1.weight", "D"),
    ("attention_norm.b", "L D", "norm1.bias", "D"),
    ("attention.qkv.w", "L D C N H", "attn.qkv.weight", "(C N H) D"),
    ("attention.qkv.b", "L C N H", "attn.qkv.bias", "(C N H)"),
    ("attention.window_bias.table", "L R N", "attn.relative_position_bias_table", "R N"),
    ("attention.out.w", "L N H D", "attn.proj.weight", "D (N H)"),
    ("attention.out.b", "L D", "attn.proj.bias", "D"),
    ("mlp_norm.w", "L D", "norm2.weight", "D"),
    ("mlp_norm.b", "L D", "norm2.bias", "D"),
    ("mlp.up.w", "L D F", "mlp.fc1.weight", "F D"),
    ("mlp.up.b", "L F", "mlp.fc1.bias", "F"),
    ("mlp.down.w", "L F D", "mlp.fc2.weight", "D F"),
    ("mlp.down.b", "L D", "mlp.fc2.bias", "D"),
)


def rules(levels: int, patch: int) -> tuple[Rule, ...]:
    """The rules of a model with this many levels and patches of this many pixels per side."""
    all_rules = [
        Rule("patches.w", "S Y X D", f"{PREFIX}patch_embed.proj.weight", "D S Y X"),
        Rule("patches.b", "D", f"{PREFIX}patch_embed.proj.bias", "D"),
        *_norm("patches.norm", "patch_embed.norm"),
        *_norm("norm", "norm"),
        *_norm("last_norm", "norm_up"),
        *_expanding("pixels", "up", patch),
        Rule("head.w", "(D 1y 1x) K", f"{PREFIX}output.weight", "K D 1y 1x"),
    ]
    for level in range(levels):
        all_rules += _blocks(f"down{level}", f"layers.{level}")
    for level in range(levels - 1):
        all_rules += _merging(f"merge{level + 1}", f"layers.{level}.downsample")
        all_rules += _up(level, levels - 1 - level)
    return tuple(all_rules)


def _blocks(ours: str, theirs: str) -> Iterator[Rule]:
    """The rules of the blocks of a level: the first of each pair, and the second."""
    for first, block in enumerate(BLOCKS):
        for name, dims, tensor, tensor_dims in _BLOCK:
            where = f"{PREFIX}{theirs}.blocks.{{}}.{tensor}"
            of = f"{ours}.{block}.{name}", dims, where, tensor_dims
            yield Rule(*of, first=first, step=len(BLOCKS))


def _merging(ours: str, theirs: str) -> Iterator[Rule]:
    """The rules of a level's patch merging."""
    name = f"{PREFIX}{theirs}.reduction.weight"
    yield Rule(f"{ours}.linear.w", "D (2y 2x) E", name, "E (2x 2y D)")
    yield from _norm(f"{ours}.norm", f"{theirs}.norm", ("(D 2y 2x)", "(2x 2y D)"))


def _up(level: int, place: int) -> Iterator[Rule]:
    """The rules of a level on the way up.

    Args:
        level: its number on the way down.
        place: its number on the way up, where 0 only expands the deepest level.
    """
    before = "layers_up.0" if place == 1 else f"layers_up.{place - 1}.upsample"
    back = f"{PREFIX}concat_back_dim.{place}"
    yield from _expanding(f"expand{level}", before, 2)
    yield Rule(f"skip{level}.linear.w", "D 2 E", f"{back}.weight", "E (2 D)")
    yield Rule(f"skip{level}.linear.b", "E", f"{back}.bias", "E")
    yield from _blocks(f"up{level}", f"layers_up.{place}")


def _expanding(ours: str, theirs: str, side: int) -> Iterator[Rule]:
    """The rules of patches that expand to side x side."""
    parts, name = f"{side}y {side}x", f"{PREFIX}{theirs}.expand.weight"
    yield Rule(f"{ours}.linear.w", f"D E ({parts})", name, f"({parts} E) D")
    yield from _norm(f"{ours}.norm", f"{theirs}.norm")


def _norm(ours: str, theirs: str, dims: tuple[str, str] = ("D", "D")) -> Iterator[Rule]:
    for end, name in (("w", "weight"), ("b", "bias")):
        yield Rule(f"{ours}.{end}", dims[0], f"{PREFIX}{theirs}.{name}", dims[1])


# ---- config.json -------------------------------------------------------------------------------


def _read(config: Json) -> Json:
    """Blocks and heads of each level, and the width of the MLP.

    Raises:
        UserError: there are not four levels, or a level's heads are not twice those before.
    """
    levels = read_levels({"depths": [2, 2, 2, 2]} | config)
    depths = levels["images.depths"]
    if len(depths) != LEVELS:
        raise UserError(
            f"depths={quoted([*depths])}: Swin-Unet's code has {LEVELS} levels; use four depths"
        )
    return {**levels, "images.decoder_depths": depths[:-1]}


def _write(model: ModelConfig) -> Json:
    """The keys of `_read`. Raises UserError for a model that Swin-Unet's code cannot express."""
    images = model.images
    assert images is not None
    if len(images.depths) != LEVELS or images.decoder_depths != images.depths[:-1]:
        raise UserError(
            f"model.images.depths={[*images.depths]}, model.images.decoder_depths="
            f"{[*images.decoder_depths]}: Swin-Unet's code has {LEVELS} levels, each with as many "
            "blocks on the way up as down; export such a model"
        )
    return write_levels(model)


SWIN_UNET = Family(
    "swin-unet",
    "SwinTransformerSys",
    Tensors(
        prefix=PREFIX,
        rules=rules(LEVELS, PATCH),
        ignored=(
            r"(layers|layers_up)\.\d+\.blocks\.\d+\.attn\.relative_position_index",
            r"(layers|layers_up)\.\d+\.blocks\.\d+\.attn_mask",
        ),
        aliases=(),
        needs=tuple(f"up{level}.first.attention.qkv.w" for level in range(LEVELS - 1)),
    ),
    keys={
        "hidden_size": ("embed_dim", 96),
        "images.size": ("img_size", 224),
        "images.channels": ("in_chans", 3),
        "images.classes": ("num_classes", 1000),
        "images.window": ("window_size", 7),
    },
    options={
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu",
        "gated": False,
        "images.patch": PATCH,
    },
    fixed={
        "patch_size": PATCH,
        "qkv_bias": True,
        "qk_scale": None,
        "ape": False,
        "patch_norm": True,
        "final_upsample": "expand_first",
    },
    others=_read,
    write_others=_write,
    tokens={},
)
