"""T5 in Hugging Face files: both releases, copies of its table, and its output factor."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hugging import check_there_and_back, write_directory
from hugging.t5 import CONFIG, RELEASE_11, t5_tensors

import jaxptd
from jaxptd import Layout, ModelConfig, Program, UserError, make_mesh
from jaxptd.config import nested
from jaxptd.data.objectives import SPAN_TOKENS
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.hf.convert import main as convert
from jaxptd.hf.mapping import Mapped, map_tensors, rules_of
from jaxptd.hf.sizes import config_json, generation_json, read_sizes

RELEASES = pytest.mark.parametrize("config", [CONFIG, RELEASE_11], ids=["1.0", "1.1"])
SCALE = CONFIG["d_model"] ** -0.5
UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"

Config = Mapping[str, Any]


def read(config: Config, *, tied: bool = True) -> dict[str, Any]:
    return read_sizes(dict(config), tied=tied, where="there")


def written(config: Config, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a model with another one's options."""
    model = ModelConfig(**nested(read(config) | changes))
    return config_json(model, dtype="float32", tokenizer=ByteTokenizer(SPAN_TOKENS))


@pytest.fixture(scope="module")
def ours() -> Callable[[Config], dict[str, tuple[int, ...]]]:
    """Shapes of the parameters of a config's model."""

    @functools.cache
    def find(release: str) -> dict[str, tuple[int, ...]]:
        model = ModelConfig(**nested(read(json.loads(release), tied="false" not in release)))
        infos = Program(jaxptd.Config(model), make_mesh(Layout())).infos
        return {name: info.shape for name, info in infos.items()}

    return lambda config: find(json.dumps(dict(config)))


def mapped(ours: Any, config: Config, tensors: Mapping[str, np.ndarray]) -> Mapped:
    found = {name: list(x.shape) for name, x in tensors.items()}
    return map_tensors("t5", ours(config), found, where="DIR")


# ---- names -------------------------------------------------------------------------------------


@RELEASES
def test_every_tensor_has_its_parameter(ours, config: Config) -> None:
    tensors = t5_tensors(config)
    assert set(mapped(ours, config, tensors).names) == set(tensors)
    unused = {UNUSED: np.zeros((8, 4))}
    assert mapped(ours, config, tensors | unused).ignored == [UNUSED]


def test_stacks_have_their_own_tables_and_numbers_of_layers(ours) -> None:
    rules = rules_of("t5", ours(CONFIG))
    for name, layers in (("encoder", 2), ("decoder", 3)):
        shape = ours(CONFIG)[f"{name}.mlp.down.w"]
        (rule,) = rules[f"{name}.mlp.down.w"]
        assert len(rule.names(shape)) == layers
        (rule,) = rules[f"common.{name}_bias.table"]
        assert rule.name.startswith(f"{name}.block.0.")


def test_copies_of_the_table_have_to_be_equal(ours) -> None:
    tensors = t5_tensors()
    copies = [f"{name}.embed_tokens.weight" for name in ("encoder", "decoder")] + ["lm_head.weight"]
    found = mapped(ours, CONFIG, tensors | dict.fromkeys(copies, tensors["shared.weight"]))
    assert found.copies == dict.fromkeys(copies, "shared.weight")
    others = {name: x for name, x in tensors.items() if name != "shared.weight"}
    others[copies[0]] = tensors["shared.weight"]
    assert mapped(ours, CONFIG, others).names["shared.weight"] == copies[0]


def test_the_encoder_alone_is_refused_by_name(ours) -> None:
    tensors = {n: x for n, x in t5_tensors().items() if not n.startswith("decoder")}
    with pytest.raises(UserError, match="DIR has no tensor decoder.block.0.* and 38 more"):
        mapped(ours, CONFIG, tensors)
    with pytest.raises(
        UserError, match="DIR has encoder.block.0.layer.1.DenseReluDense.wi_0.weigh"
    ):
        mapped(ours, CONFIG, t5_tensors(RELEASE_11))


# ---- config.json -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, (False, "relu", SCALE)),
        (RELEASE_11, (True, "gelu-tanh", 1.0)),
        # as transformers 5 writes 1.1: tied, regardless of the tensors
        (RELEASE_11 | {"tie_word_embeddings": True, "scale_decoder_outputs": False}, ()),
        ({"feed_forward_proj": "gelu", "dense_act_fn": "gelu"}, (False, "gelu", SCALE)),
        ({"feed_forward_proj": "gated-silu"}, (True, "silu", SCALE)),
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, (True, "gelu", SCALE)),
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_gates_and_the_factor_of_the_output_are_read(
    keys: dict, options: tuple, tied: bool
) -> None:
    """The factor depends only on the config."""
    found = read({**CONFIG, **keys}, tied=tied)
    assert found["tie_embeddings"] is tied
    expected = options or (True, "gelu-tanh", 1.0)
    assert (found["gated"], found["activation"], found["encoder_decoder.output_scale"]) == expected


def test_sizes_are_those_of_the_config() -> None:
    model = ModelConfig(**nested(read(CONFIG)))
    assert (model.num_layers, model.decoder_layers, model.head_size) == (2, 3, 5)
    assert (model.block.attention_scale, model.seq_length) == (1.0, 512)
    assert (model.block.relative.buckets, model.block.relative.distance) == (8, 10)
    assert ModelConfig(**nested(read({**CONFIG, "num_decoder_layers": None}))).decoder_layers == 2


@RELEASES
def test_what_is_written_is_read(config: Config) -> None:
    tied = "tie_word_embeddings" not in config
    found = written(config, tie_embeddings=tied, **{"encoder_decoder.start_token": 4})
    expected = read(config, tied=tied) | {"encoder_decoder.start_token": 4, "tie_embeddings": tied}
    assert read(found, tied=tied) == expected
    model = ModelConfig(**nested(expected))
    assert found["tie_word_embeddings"] is found["scale_decoder_outputs"] is tied
    assert generation_json(model, found) == {
        "eos_token_id": None,  # the table lacks this row
        "pad_token_id": 4,
        "decoder_start_token_id": 4,
    }


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (
            {"is_encoder_decoder": False},
            "is_encoder_decoder=False; use a model with is_encoder_dec",
        ),
        ({"feed_forward_proj": "gated-x"}, "dense_act_fn=x; use a model with one of gelu_new"),
        ({"pad_token_id": 3}, "pad_token_id=3 and decoder_start_token_id=0; use a model with one"),
        ({"d_kv": 0}, "d_kv=0; it must be a whole number above 0"),
        ({"d_model": "12"}, 'd_model="12"; it must be a whole number above 0'),
        ({"relative_attention_num_buckets": 7}, "model.encoder_decoder.relative_buckets=7"),
        ({"num_decoder_layers": -1}, "num_decoder_layers=-1; it must be"),
        (
            {"decoder_start_token_id": None, "pad_token_id": None},
            "decoder_start_token_id=None; it must be a whole number of 0",
        ),
    ],
    ids=str,
)
def test_configs_of_no_such_model(keys: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        read({**CONFIG, **keys})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"encoder_decoder.output_scale": 0.5},
            "model.encoder_decoder.output_scale=0.5: Hugging Face's t5 has 1, or with tie_em",
        ),
        (
            {"tie_embeddings": False},
            "model.encoder_decoder.output_scale=0.288675.*: Hugging Face's t5 has 1, or",
        ),
        ({"norm": "layernorm"}, "model.norm=layernorm: Hugging Face's t5 has rmsnorm"),
        ({"attention_scale": 0.5}, "model.attention_scale=0.5: Hugging Face's t5 has 1.0"),
    ],
    ids=str,
)
def test_what_a_t5_does_not_have_is_not_written(options: dict, line: str) -> None:
    with pytest.raises(UserError, match=line):
        written(CONFIG, **options)


# ---- commands ----------------------------------------------------------------------------------


@pytest.mark.slow
@RELEASES
def test_there_and_back_keeps_every_bit(tmp_path: Path, config: Config) -> None:
    tensors = t5_tensors(config)
    there = write_directory(tmp_path / "there", tensors, base=config)
    check_there_and_back(there, tensors, tmp_path)


@pytest.mark.slow
@RELEASES
def test_transformers_reads_what_is_written(tmp_path: Path, config: Config) -> None:
    torch = pytest.importorskip("torch")
    load: Any = pytest.importorskip("transformers").T5ForConditionalGeneration.from_pretrained
    there, run, out = (tmp_path / name for name in ("there", "run", "out"))
    write_directory(there, t5_tensors(config), base=config)
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    convert(["--to-hf", str(run), "--out", str(out), "--quiet"])
    model, info = load(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = load(there)
    same = ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "decoder_start_token_id")
    for key in same:
        assert getattr(model.config, key) == getattr(expected.config, key), key
    assert set(dict(model.named_parameters())) == set(t5_tensors(config))
    for name, x in expected.named_parameters():
        assert torch.equal(x, model.get_parameter(name)), name
