"""Options that a family lacks are refused in one line, not silently ignored."""

import pytest

from jaxptd import Config, DataConfig, Layout, ModelConfig, Program, UserError, make_mesh
from jaxptd.config import nested

SIZES = {"hidden_size": 16, "num_heads": 4, "seq_length": 8, "vocab_size": 13}
FOREIGN = "has no effect with the family"


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"family": "bert", "norm_order": "pre"},
            "model.norm_order=pre: an encoder of pairs of sentences has post",
        ),
        (
            {"family": "bert", "causal": True},
            "model.causal=True: an encoder of pairs of sentences has False",
        ),
        (
            {"family": "bert", "token_types": 0},
            "model.token_types=0: an encoder of pairs of sentences has 2",
        ),
        (
            {"family": "bert", "activation": "clamped-swiglu", "gated": True},
            "model.activation=clamped-swiglu: the head of an encoder has an activation without",
        ),
        (
            {"family": "bert", "z_loss": 0.1},
            "model.z_loss=0.1: an encoder has no such head; leave it out",
        ),
        (
            {"family": "bert", "tie_embeddings": False},
            "model.tie_embeddings=False: an encoder has no such head",
        ),
        (
            {"family": "gpt", "token_types": 2},
            "model.token_types=2: a decoder's batch has no",
        ),
        (
            {"family": "t5", "positions": "learned"},
            "model.positions=learned: an encoder-decoder has relative",
        ),
        (
            {"family": "t5", "norm_order": "post"},
            "model.norm_order=post: an encoder-decoder has pre",
        ),
        (
            {"family": "t5", "token_types": 2},
            "model.token_types=2: an encoder-decoder has 0; leave it out",
        ),
        (
            {"family": "t5", "causal": True},
            "model.causal=True: an encoder attends to all tokens, a decoder to all",
        ),
        (
            {"family": "t5", "window": 4},
            "model.window=4: an encoder attends to all tokens, a decoder to all",
        ),
        (
            {"family": "t5", "encoder_decoder.start_token": 13},
            "model.encoder_decoder.start_token=13 is not below model.vocab_size=13",
        ),
        (
            {"family": "t5", "vocab_size": None},
            "model.vocab_size=null: a program needs the number of token ids",
        ),
        ({"family": "gpt", "positions": "relative"}, "model.positions=relative is an encoder-dec"),
        ({"family": "bert", "positions": "relative"}, "model.positions=relative is an encoder-dec"),
        (
            {"family": "gpt", "encoder_decoder.num_layers": 2},
            f"model.encoder_decoder.num_layers=2 {FOREIGN} gpt",
        ),
        (
            {"family": "bert", "encoder_decoder.seq_length": 4},
            f"encoder_decoder.seq_length=4 {FOREIGN} bert",
        ),
        (
            {"family": "llama", "encoder_decoder.start_token": 1},
            f"model.encoder_decoder.start_token=1 {FOREIGN} llama",
        ),
        (
            {"family": "gpt", "encoder_decoder.output_scale": 0.5},
            f"model.encoder_decoder.output_scale=0.5 {FOREIGN} gpt",
        ),
    ],
    ids=str,
)
def test_options_of_other_models_are_refused(fields: dict, line: str) -> None:
    with pytest.raises(UserError) as error:
        Program(Config(ModelConfig(**nested({**SIZES, **fields}))), make_mesh(Layout()))
    assert line in str(error.value)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_documents_apart_are_refused(family) -> None:
    config = Config(ModelConfig(family=family, **SIZES), data=DataConfig(documents="apart"))
    with pytest.raises(UserError, match=f"documents=apart has no effect with the family {family}"):
        Program(config, make_mesh(Layout()))
