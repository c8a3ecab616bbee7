"""Sliding windows of `config.json`, as transformers reads them."""

from typing import Any

import pytest
from hugging.experts import REQUIRED

from jaxptd.config import ModelConfig, nested
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.errors import UserError
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.sizes import config_json, read_sizes

SIZES = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 13}
USED = {"use_sliding_window": True, "sliding_window": 64}
WINDOWED = ["mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "dots1"]
SLIDING, FULL = "sliding_attention", "full_attention"


def read(kind: str, config: dict) -> dict[str, Any]:
    config = (
        SIZES | {"model_type": kind, "num_key_value_heads": 2} | REQUIRED.get(kind, {}) | config
    )
    return read_sizes(config, tied=False, where="there")


@pytest.mark.parametrize(
    ("kind", "config", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),  # transformers omits defaults
        ("llama", {"sliding_window": 64}, None),  # llama ignores it
        ("llama", {"layer_types": [FULL] * 3}, None),
        ("mistral", {"sliding_window": 64, "layer_types": [SLIDING] * 3}, 64),
        ("mistral", {"sliding_window": 64, "layer_types": [FULL] * 3}, None),
        ("qwen2", {}, None),
        ("qwen2", {"sliding_window": 4096, "use_sliding_window": False}, None),
        ("qwen2", USED | {"max_window_layers": 0}, 64),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("qwen3", USED | {"max_window_layers": 3}, None),
        ("qwen3", USED, None),  # the first 28 layers have none
        ("qwen3", USED | {"layer_types": [FULL] * 3, "max_window_layers": 0}, None),
        ("qwen3", USED | {"layer_types": [SLIDING] * 3}, 64),
        ("mixtral", {}, None),
        ("mixtral", {"sliding_window": 64}, 64),
        ("mixtral", {"sliding_window": 64, "use_sliding_window": False}, 64),
        ("mixtral", {"sliding_window": 64, "layer_types": [FULL] * 3}, 64),  # Mixtral ignores it
        ("qwen2_moe", {}, None),
        ("qwen2_moe", USED | {"max_window_layers": 0}, None),
        ("qwen2_moe", USED | {"layer_types": [SLIDING] * 3}, 64),
        ("qwen2_moe", USED | {"layer_types": [FULL] * 3}, None),
        ("qwen3_moe", {}, None),
        ("qwen3_moe", {"sliding_window": 64}, None),
        ("qwen3_moe", USED, 64),
        ("qwen3_moe", {"use_sliding_window": True}, 4096),
        ("dots1", {}, None),
        ("dots1", {"max_window_layers": 0}, 4096),
        ("dots1", {"layer_types": [SLIDING] * 3, "use_sliding_window": False}, 4096),
        ("dots1", {"sliding_window": None, "max_window_layers": 0}, None),
    ],
)
def test_the_window_of_all_layers_is_read(kind: str, config: dict, window: int | None) -> None:
    assert read(kind, config)["window"] == window


@pytest.mark.parametrize(
    ("kind", "config", "line"),
    [
        ("qwen3", {"layer_types": [SLIDING] * 3}, "layer_types has sliding_attention without a wi"),
        ("llama", {"layer_types": [SLIDING] * 3}, "layer_types has sliding_attention, but this mo"),
        (
            "qwen2_moe",
            {"layer_types": [SLIDING] * 3},
            "layer_types has sliding_attention without a",
        ),
        ("mistral", {"sliding_window": 0}, "sliding_window=0; it must be a whole number above 0"),
        ("mistral", {"sliding_window": "64"}, "sliding_window=.64.; it must be a whole number"),
        (
            "qwen2",
            USED | {"sliding_window": True},
            "sliding_window=True; it must be a whole",
        ),
    ],
)
def test_windows_that_there_are_not(kind: str, config: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        read(kind, config)


@pytest.mark.parametrize(
    ("kind", "config", "layers"),
    [
        ("qwen2", USED | {"max_window_layers": 2}, (False, False, True)),
        ("qwen3", USED | {"layer_types": [FULL, SLIDING, FULL]}, (False, True)),
        ("qwen3", USED | {"layer_types": [SLIDING] * 3}, None),
        ("mistral", {"layer_types": [SLIDING, SLIDING, FULL]}, (True, True, False)),
        ("qwen2_moe", USED, (True, False)),
        ("dots1", {"max_window_layers": 1}, (False, True, True)),
    ],
)
def test_a_window_of_some_layers_is_read(kind: str, config: dict, layers: tuple | None) -> None:
    fields = read(kind, config)
    assert fields["window_layers"] == layers
    assert fields["window"] == config.get("sliding_window", 4096)


@pytest.mark.parametrize("layers", [None, (False, True)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", WINDOWED)
def test_what_is_written_is_read(kind: str, window: int | None, layers: tuple | None) -> None:
    if layers and (window is None or kind in ("mixtral", "qwen3_moe")):
        pytest.skip("no layer has a window, or all have the same")
    changes = {"window": window, "window_layers": layers}
    fields = read(kind, {"head_dim": 4, "sliding_window": None}) | changes
    model = ModelConfig(**nested(fields))
    written = config_json(model, dtype="float32", tokenizer=ByteTokenizer())
    found = read_sizes(written, tied=False, where="there")
    assert {name: found[name] for name in changes} == changes


@pytest.mark.parametrize(
    ("kind", "field", "line"),
    [
        ("llama", {"window": 5}, "model.window=5: Hugging Face's llama has None; export a mode"),
        ("gpt", {"window": 5}, "model.window=5: Hugging Face's gpt2 has None; export a model w"),
        (
            "mixtral",
            {"window": 5, "window_layers": (True, False)},
            r"model.window_layers=.*: Hugging Face's mixtral has",
        ),
        (
            "llama",
            {"attention_sinks": True},
            "model.attention_sinks=True: Hugging Face's llama has F",
        ),
        ("gpt", {"attention_softcap": 9.0}, "model.attention_softcap=9.0: Hugging Face's gpt2 has"),
        ("llama", {"head_sizes": (2, 4)}, "model.head_sizes=.2, 4.: Hugging Face's llama has None"),
        (
            "gemma2",
            {"attention_softcap": 9.0, "softcap_layers": (True, False)},
            "model.softcap_layers=.True, False.: Hugging Face's gemma2 has None",
        ),
        (
            "llama",
            {"norm_order": "output"},
            "model.norm_order=output: Hugging Face's llama has pre",
        ),
        ("llama", {"rope": {"window_theta": 9.0}, "window": 5}, "model.rope.window_theta=9.0: Hug"),
        ("qwen2", {"rope": {"layers": (True, False)}}, "model.rope.layers=.True, False.: Hugging"),
        ("gpt", {"logit_softcap": 9.0}, "model.logit_softcap=9.0: Hugging Face's gpt2 has None"),
        ("mistral", {"attention_scale": 0.3}, "model.attention_scale=0.3: Hugging Face's mistra"),
    ],
)
def test_what_a_family_does_not_have_is_not_written(kind: str, field: dict, line: str) -> None:
    model = ModelConfig(family=kind, vocab_size=13, **field)
    with pytest.raises(UserError, match=line):
        config_json(model, dtype="float32", tokenizer=ByteTokenizer())


PATTERNED = ["olmo3", "gemma2", "gemma3_text", "gpt_oss"]  # see their own tests


def test_every_family_has_its_windows() -> None:
    chosen = [kind for kind, family in FAMILIES.items() if "window" not in family.options]
    windows_of_images = ["swin", "swin-unet"]  # model.images.window
    assert chosen == ["mistral", "qwen2", "qwen3", *windows_of_images, *WINDOWED[3:], *PATTERNED]
