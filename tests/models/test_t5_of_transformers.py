"""Buckets of distances and greedy answers equal those of transformers' T5.

`tests/hf/test_encoders.py` compares its loss and gradients.
"""

from pathlib import Path

import jax
import numpy as np
import pytest

import jaxptd
from jaxptd.config import Relative
from jaxptd.generate import Generator, Sampling
from jaxptd.layers.attention.heads import buckets

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 37,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}
SOURCE, TARGET = 32, 16


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
def test_greedy_answers_are_those_of_transformers(tmp_path: Path, gated: bool) -> None:
    torch.manual_seed(0)
    kind = "gated-gelu" if gated else "relu"
    config = transformers.T5Config(**SIZES, feed_forward_proj=kind)
    model = transformers.T5ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    settings = transformers.GenerationConfig(
        max_new_tokens=TARGET, pad_token_id=0, decoder_start_token_id=0, use_cache=False
    )  # its cache takes the number of layers from the encoder
    lengths = {"seq_length": SOURCE, "decoder_seq_length": TARGET}
    with jax.enable_x64(True):
        run = jaxptd.from_hf(tmp_path, dtype="float64", platform="cpu", **lengths)
        generate = Generator(run.program, 37, Sampling(temperature=0))
        for prompt in (np.arange(3, 30), np.array([7, 7, 5])):
            expected = model.generate(torch.tensor(prompt[None]), generation_config=settings)
            found = generate(run.arrays["params"], prompt.tolist(), TARGET)
            assert [0, *found] == expected[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(("count", "distance"), [(32, 128), (8, 10), (64, 1000), (10, 20)])
def test_buckets_are_those_of_transformers(both_ways: bool, count: int, distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance_R = np.arange(-5000, 5001)
    expected = T5Attention._relative_position_bucket(
        torch.tensor(distance_R),
        bidirectional=both_ways,
        num_buckets=count,
        max_distance=distance,
    )
    found = buckets(distance_R, Relative(count, distance), both_ways=both_ways)
    np.testing.assert_array_equal(found, expected.numpy())
