"""Options of a block: family presets, and options that conflict."""

import dataclasses
from typing import Any

import pytest

from jaxptd import load_config
from jaxptd.config import Images, ModelConfig, nested
from jaxptd.config.block import FAMILIES
from jaxptd.errors import UserError

LATENT = {"family": "deepseek_v3"}
YARN = {
    "family": "llama",
    "rope.scaling": "yarn",
    "rope.factor": 8.0,
    "rope.original_length": 64,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_its_options_spelled_out(family: str) -> None:
    preset = ModelConfig(family=family)
    spelled = {**FAMILIES[family], "rope": preset.rope}
    for name in ("attention_scale", "embedding_scale"):  # null stands for a formula
        spelled[name] = getattr(preset.block, name)
    own = {
        name: spelled.pop(name) for name in ("encoder_decoder", "images", "moe") if name in spelled
    }
    if own:  # sections that only this family has
        assert ModelConfig(family=family, **own, **spelled).block == preset.block
        return
    loops = {"looped": preset.block.looped, "loops_keep_inputs": preset.block.loops_keep_inputs}
    for other in ("gpt", "llama"):  # these allow other depths of the stacks
        found = ModelConfig(family=other, **spelled).block
        assert dataclasses.replace(found, **loops) == preset.block


@pytest.mark.parametrize(
    ("choice", "looped", "keep"),
    [
        ({"num_layers": 2}, True, True),
        ({"num_layers": 2, "remat": "full"}, True, False),
        ({"num_layers": 4, "remat": "full", "remat_layers": 2}, True, True),
        ({"num_layers": 4, "remat": "full", "remat_layers": 1}, False, False),
        ({"num_layers": 2, "scan_layers": False}, False, False),
        ({"num_layers": 1}, False, False),
        ({"family": "t5", "num_layers": 2, "encoder_decoder.num_layers": 1}, False, False),
        ({"family": "swin"}, False, False),  # some levels have only one pair of blocks
        ({"family": "swin", "images.depths": (4, 4, 4, 4)}, True, True),
    ],
    ids=str,
)
def test_layers_are_in_loops_where_each_has_several_trips(
    choice: dict[str, Any], looped: bool, keep: bool
) -> None:
    block = ModelConfig(**nested(choice)).block
    assert (block.looped, block.loops_keep_inputs) == (looped, keep)


def test_an_option_that_is_set_is_not_the_familys() -> None:
    options = {"norm": "layernorm", "gated": False, "num_kv_heads": 2, "head_size": 6}
    model = ModelConfig(family="llama", **options)
    assert {name: getattr(model.block, name) for name in options} == options
    assert model.block.activation == "silu"
    sizes = {"head_size": None, "num_heads": 4, "num_kv_heads": None}
    changed = dataclasses.replace(model, family="gpt", **sizes)
    assert (changed.block.activation, changed.block.num_kv_heads) == ("gelu-tanh", 4)
    assert changed.block.head_size == changed.hidden_size // 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"rope.theta": 1e5},
            "model.rope.theta=100000.0 has no effect with model.posi",
        ),
        ({"family": "llama", "head_size": 7}, "use an even model.head_size"),
        (
            {"family": "llama", "rope.factor": 2.0},
            "rope.factor has no effect with model.rope.scali",
        ),
        ({"family": "llama", "rope.scaling": "linear"}, "linear needs model.rope.factor; set it"),
        (
            {"family": "llama", "rope.scaling": "llama3", "rope.factor": 8.0},
            "llama3 needs model.rope.original_length; set it",
        ),
        (
            YARN | {"rope.range": (4, 1)},
            r"rope.range=\[4.0, 1.0\] must be two numbers above 0, the smaller first",
        ),
        (
            {"family": "llama", "rope.attention_factor": 1.2},
            "rope.attention_factor has no effect with model.rope.scaling=null; leave it out",
        ),
        (YARN | {"rope.attention_factor": 0.0}, "model.rope.attention_factor=0.0 must be a number"),
        (
            {"family": "llama", "rope.truncate": False},
            "rope.truncate has no effect with model.rope.scaling=null; leave it out",
        ),
        (
            {"activation": "clamped-swiglu"},
            "model.activation=clamped-swiglu is of a gate and what it multiplies; use model.gated=",
        ),
        (YARN | {"rope.theta": 1.0}, "model.rope.theta=1.0: yarn takes its logarithm; "),
        ({"hidden_size": 1, "num_heads": 2}, "model.hidden_size=1 does not split over model.num_h"),
        ({"family": "llama", "rope.theta": 0.0}, "model.rope.theta=0.0 must be a number above 0"),
        ({"num_kv_heads": 3}, "model.num_heads=8 does not split over model.num_kv_heads=3"),
        ({"num_kv_heads": 0}, "model.num_kv_heads=0 must be a number above 0"),
        (
            {"causal": False, "window": 8},
            "model.window=8 covers a token and those before it, but with model.causal=fals",
        ),
        ({"family": "t5", "attention_sinks": True}, "model.attention_sinks=True with model.fami"),
        (
            {"family": "t5", "attention_softcap": 30.0},
            "model.attention_softcap=30.0 with model.family=t5: it is for models of one text",
        ),
        (
            LATENT | {"num_kv_heads": 2},
            "model.num_kv_heads=2 with model.latent: latent attention has",
        ),
        (
            LATENT | {"head_size": 8},
            "model.head_size=8 with model.latent: latent attention has the",
        ),
        (
            LATENT | {"qk_norm": True},
            "model.qk_norm=True with model.latent: .* norms of latent vect",
        ),
        (
            LATENT | {"linear_bias": "qkv"},
            "model.linear_bias=qkv with model.latent: .* no biases yet",
        ),
        (
            LATENT | {"products": "fp8"},
            "model.products=fp8 with model.latent: .* no 8-bit products",
        ),
        (
            LATENT | {"positions": "none"},
            "model.positions=none with model.latent: .* rotary positions",
        ),
        (
            LATENT | {"latent.rope_size": 3},
            "model.latent.rope_size=3: positions rotate pairs; use an",
        ),
        (LATENT | {"latent.kv_rank": 0}, "model.latent.kv_rank=0 must be a number above 0"),
        (LATENT | {"latent.q_rank": -1}, "model.latent.q_rank=-1 must be a number, 0 or more"),
        (
            LATENT | {"latent.value_size": 200},
            "model.latent.value_size=200: attention takes values no wider than keys; use mo",
        ),
        ({"latent.q_rank": 4}, "model.latent.q_rank=4 has no effect with the family gpt; leave it"),
        ({"attention_softcap": 0.0}, "model.attention_softcap=0.0 must be a number above 0"),
        (
            {"window": 8, "window_layers": ()},
            r"model.window_layers=\[\] has no entry; leave it",
        ),
        ({"window_layers": (True, False)}, "model.window_layers has no effect without model.windo"),
        (
            {"window": 8, "window_layers": (True,) * 5},
            r"model.window_layers=\[.*\] has 5 entries, but model.num_layers=4; use a period",
        ),
        (
            {"window": 8, "window_layers": (False,)},
            r"model.window_layers=\[False\]: no layer has it; use model.window=null",
        ),
        (
            {"head_sizes": (16, 32), "head_size": 16},
            r"model.head_sizes=\[16, 32\] with model.head_size=16; leave one",
        ),
        ({"head_sizes": (16, 16)}, r"model.head_sizes=\[16, 16\]: all are alike; use model.head_s"),
        ({"head_sizes": (16, 0)}, r"model.head_sizes=\[16, 0\]: use positive numbers"),
        ({"family": "llama", "head_sizes": (3, 4)}, r"model.head_sizes=\[3, 4\]: use positive num"),
        ({"head_sizes": (2, 4, 2, 4, 2)}, "has 5 entries, but model.num_layers=4; use a period"),
        (
            {"head_sizes": (2, 4), "remat": "full", "remat_layers": 3},
            "model.remat_layers=3 is not a multiple of the 2 layers of a period of model.h",
        ),
        (
            {"family": "mixtral", "head_sizes": (2, 4)},
            r"model.head_sizes=\[2, 4\] with model.moe: only layers with plain attention",
        ),
        (
            LATENT | {"head_sizes": (2, 4)},
            r"model.head_sizes=\[2, 4\] with model.(moe|latent): only",
        ),
        (
            {"family": "t5", "head_sizes": (2, 4)},
            r"=\[2, 4\] with model.encoder_decoder: only layers",
        ),
        (
            {"softcap_layers": (True, False)},
            "model.softcap_layers has no effect without model.attention_softcap; set it, or",
        ),
        (
            {"attention_softcap": 9.0, "softcap_layers": (False, False)},
            r"model.softcap_layers=\[False, False\]: no layer has it; use model.attention_softcap=",
        ),
        ({"window": 8, "window_layers": (1, 0)}, r"model.window_layers=\(1, 0\): use a list, each"),
        ({"rope.layers": (True,)}, "model.rope.layers=.* has no effect with model.positions=lea"),
        (
            {"family": "llama", "rope.layers": (False, False)},
            r"model.rope.layers=\[False, False\]: no layer has it; use model.positions=none",
        ),
        (
            {"family": "llama", "rope.window_theta": 9.0},
            "model.rope.window_theta has no effect without model.window; set it, or leave",
        ),
        (
            {"family": "llama", "window": 8, "rope.window_theta": 0.0},
            "model.rope.window_theta=0.0 must be a number above 0",
        ),
        (
            {"family": "t5", "positions": "rope", "rope.layers": (True, False)},
            "model.rope.layers is of decoders; an encoder-decoder rotates in all layers: leave",
        ),
        ({"causal": "no"}, "model.causal='no': use true or false or null"),
        ({"norm": "batchnorm"}, "model.norm='batchnorm': use one of layernorm, rmsnorm or null"),
        ({"family": "ul2"}, "model.family=ul2: use one of gpt, llama, qwen2, qwen3, mistral, bert"),
        (
            {"encoder_decoder.relative_buckets": 8},
            "model.encoder_decoder.relative_buckets=8 has no effect with the family gpt; leave it "
            "out, or use model.family=t5",
        ),
        ({"images": Images()}, "model.images has no effect with the family gpt; leave it out, or"),
        ({"positions": "relative"}, "model.positions=relative is an encoder-decoder's; use learn"),
        ({"images": 3}, "model.images=3: use an Images or null"),
        ({"family": "t5", "rope.theta": 1e4}, "model.rope.theta=10000.0 has no effect with model"),
        ({"family": "t5", "max_positions": 8}, "model.max_positions has no effect with model.posi"),
        (
            {"family": "t5", "encoder_decoder.relative_buckets": 7},
            "relative_buckets=7: must be even and",
        ),
        (
            {"family": "t5", "encoder_decoder.relative_buckets": 2},
            "relative_buckets=2: must be even and",
        ),
        (
            {"family": "t5", "encoder_decoder.relative_distance": 16},
            "model.encoder_decoder.relative_distance=16 leaves nothing to share the upper half of "
            "model.encoder_decoder.relative_buckets=32; use 17 or more",
        ),
        (
            {"family": "t5", "encoder_decoder.seq_length": 0},
            r"decoder\.seq_length=0 must be a number above 0",
        ),
        (
            {"family": "t5", "encoder_decoder.num_layers": 0},
            r"decoder\.num_layers=0 must be a number above 0",
        ),
        (
            {"family": "t5", "encoder_decoder.output_scale": 0.0},
            r"decoder\.output_scale=0.0 must be a number above 0",
        ),
        (
            {"family": "t5", "encoder_decoder.start_token": -1},
            "start_token=-1 must be a number, 0 or more",
        ),
        (
            {"family": "t5", "remat_layers": 5, "encoder_decoder.num_layers": 3},
            "more than model.num_lay",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ModelConfig(**nested(fields))


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("whole", "whole"), ("null", None)]
)
def test_a_norm_of_queries_and_keys_is_a_choice_wider_than_true_and_false(
    text: str, value: object, tmp_path
) -> None:
    """Sets it by an option and in a file."""
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{qk_norm: {text}}}\n")
    found = load_config(str(path)), load_config("test-tiny", [f"--model.qk_norm={text}"])
    assert [config.model.qk_norm for config in found] == [value, value]
    with pytest.raises(UserError, match=r"qk_norm: expected bool or one of whole or null, got hea"):
        load_config("test-tiny", ["--model.qk_norm=heads"])
