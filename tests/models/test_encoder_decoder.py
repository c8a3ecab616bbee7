"""T5: what its decoder reads, its buckets, and that it ignores padding."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from one_device import hold
from turns import slow

from jaxptd import Config, Layout, ModelConfig, UserError
from jaxptd.config import EncoderDecoder, Relative
from jaxptd.data import NOT_COUNTED
from jaxptd.layers.attention import choose_kernel
from jaxptd.layers.attention.heads import buckets
from jaxptd.models.encoder_decoder import shifted_right
from jaxptd.models.families import family_of
from jaxptd.models.t5 import decoder_of, encoder_of

SIZES = {"family": "t5", "hidden_size": 16, "num_heads": 4, "seq_length": 8, "vocab_size": 13}


def test_scores_with_a_bias_have_no_fused_kernel() -> None:
    """cuDNN is refused even without separate padding, which it cannot handle either."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0")
    config = Config(ModelConfig(**SIZES, dtype="bfloat16", head_size=64))
    found = choose_kernel(config, gpu, documents=False)
    assert found == ("xla", "scores have a bias by distance")


# ---- what the decoder reads ---------------------------------------------------------------------


def test_the_decoder_reads_the_tokens_before_its_targets() -> None:
    targets = np.array([[5, 6, 7], [8, -1, -1]], np.int32)
    found = shifted_right(targets, start=3)
    assert found.dtype == np.int32
    assert found.tolist() == [[3, 5, 6], [3, 8, 3]]


def test_inputs_are_shifted_before_tokens_are_dealt_out() -> None:
    """A ring's devices hold pieces of a text out of order, but inputs follow the text's order."""
    program = tiny.program(
        Layout(cp=2), batch=2, **SIZES | {"seq_length": 16, "encoder_decoder.start_token": 3}
    )
    targets = np.arange(32, dtype=np.int32).reshape(2, 16) % 13
    rest = {"source": targets, "source_mask": np.ones_like(targets)}
    placed = program.place({**rest, "targets": targets})
    order = program.batches.token_orders["inputs"]
    assert (order != np.arange(16)).any()
    expected = shifted_right(targets, start=3)[:, order]
    assert np.array_equal(np.asarray(placed["inputs"]), expected)
    with pytest.raises(UserError, match="it holds source, source_mask, targets"):
        program.place({**rest, "targets": targets, "inputs": targets})


def test_a_drawn_batch_has_padding_in_sources_and_targets() -> None:
    config = tiny.config(Layout(), **SIZES, **{"encoder_decoder.seq_length": 6})
    drawn = family_of(config.model).draw(config, np.random.default_rng(0))
    assert drawn["targets"].shape == (8, 6) and drawn["source"].shape == (8, 8)
    assert (drawn["source_mask"] == 0).any() and (drawn["targets"] == NOT_COUNTED).any()


def test_a_stack_has_its_own_length_and_sees_what_it_may() -> None:
    model = ModelConfig(**SIZES, num_layers=3, encoder_decoder=EncoderDecoder(2, 4))
    encoder, decoder = encoder_of(model), decoder_of(model)
    assert (encoder.num_layers, encoder.seq_length, encoder.block.causal) == (3, 8, False)
    assert (decoder.num_layers, decoder.seq_length, decoder.block.causal) == (2, 4, True)


@pytest.mark.parametrize(
    ("fields", "loops"),
    [
        ({"remat": "full"}, [(True, False)] * 2),
        # Two loops of two layers; one of the decoder's three layers is in no loop.
        ({"remat": "full", "remat_layers": 2}, [(True, True), (False, False)]),
        ({"remat": "dots", "remat_layers": 3}, [(False, False), (True, True)]),
        ({"remat": "dots", "remat_layers": 4}, [(True, True)] * 2),
    ],
    ids=str,
)
def test_a_stack_knows_its_own_loops(fields: dict, loops: list) -> None:
    model = ModelConfig(**SIZES, num_layers=4, encoder_decoder=EncoderDecoder(3), **fields)
    blocks = [stack(model).block for stack in (encoder_of, decoder_of)]
    assert [(block.looped, block.loops_keep_inputs) for block in blocks] == loops


# ---- buckets of distances -----------------------------------------------------------------------

# Distances key - query at which a bucket begins, in the code that T5 was trained with.
FIRST_OF_DECODER = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_buckets_of_a_decoder() -> None:
    relative = Relative(buckets=32, distance=128)
    found = buckets(-np.arange(200), relative, both_ways=False)
    assert [int(np.argmax(found == number)) for number in range(32)] == FIRST_OF_DECODER
    assert set(buckets(np.arange(200), relative, both_ways=False)) == {0}


def test_buckets_of_an_encoder() -> None:
    """16 buckets each way, 8 of them for single distances."""
    relative, distance = Relative(buckets=32, distance=128), np.arange(200)
    before = buckets(-distance, relative, both_ways=True)
    after = buckets(distance, relative, both_ways=True)
    assert before[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert np.array_equal(after[1:], before[1:] + 16) and after[0] == 0
    assert [int(np.argmax(before == number)) for number in range(8, 16)] == [
        *(8, 12, 16, 23, 32, 46, 64, 91)
    ]


# ---- losses and layouts -------------------------------------------------------------------------

T5 = tiny.T5 | {"dropout": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2, tp=2)], ids=str)
def test_a_loss_is_a_mean_over_targets_and_sees_no_padding(layout: Layout) -> None:
    program = tiny.program(layout, **T5 | {"dropout": 0.0})
    drawn = family_of(program.config.model).draw(program.config, np.random.default_rng(0))
    params = program.init_state()["params"]
    sums = program.eval_step(params, drawn)
    assert int(sums["cross_entropy"]["targets"]) == (drawn["targets"] >= 0).sum()
    others = np.where(drawn["source_mask"] == 0, drawn["source"] + 1, drawn["source"]) % tiny.VOCAB
    assert (others != drawn["source"]).any()
    again = program.eval_step(params, {**drawn, "source": others})
    assert jax.tree.all(jax.tree.map(jnp.array_equal, sums, again))
    _, seen = program.eval_step(params, {**drawn, "source_mask": np.ones_like(others)}).popitem()
    assert float(seen["sum"]) != float(sums["cross_entropy"]["sum"])


FOUR = {"num_layers": 4, "micro_batches": 4}
UNEVEN = {"hidden_size": 15, "num_heads": 3, "ffn_hidden_size": 23}  # not divisible by any grid
V11 = {"gated": True, "activation": "gelu-tanh", "tie_embeddings": False}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        slow(Layout(dp=2, cp=2, tp=2, sequence_parallel=True, zero=3), V11),
        slow(Layout(pp=2, row=2, col=2, schedule="zb-v"), FOUR),
        slow(tiny.SEQUENCE_PARALLEL, {"remat": "full"}),
        slow(Layout(cp=4), {"remat": "dots"}),
        slow(Layout(cp=2, ring="rsa"), {}),
        slow(Layout(cp=2, tp=2, ring="gather"), {"remat": "full"}),
        slow(Layout(dp=2, row=2, col=2), {"remat": "attention"}),
        slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="fox"), UNEVEN),
        slow(Layout(cp=2, row=2, col=2, attention2d="blocks"), UNEVEN),
        slow(Layout(row=2, col=2, attention2d="blocks", matmul2d="cannon"), {"remat": "full"}),
        slow(Layout(row=2, col=2, matmul2d="summa"), V11),
        slow(Layout(tp=4, sequence_parallel=True, collective_matmul=True), V11),
        slow(Layout(tp=2, offload="activations"), {"remat": "dots"}),
        slow(Layout(dp=2, tp=4, zero=2), {"num_kv_heads": 2, "qk_norm": True}),
        slow(Layout(pp=2, dp=2, schedule="interleaved", zero=2), FOUR),
        slow(Layout(pp=4, tp=2, schedule="zb-v"), FOUR | {"encoder_decoder.num_layers": 5}),
        slow(Layout(pp=2, cp=2), FOUR | {"remat": "full"}),
        slow(Layout(pp=2, dp=2, tp=2, schedule="zb-h1", zero=3), FOUR | {"remat": "dots"}),
        slow(Layout(pp=2, tp=2, schedule="gpipe", offload="optimizer"), FOUR),
        slow(Layout(pp=2, stage_layers=(5, 2)), FOUR),
    ],
    ids=str,
)
def test_an_encoder_decoder_is_equal_to_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **T5 | choice)
