"""Loss and every gradient of transformers' T5, in float64, on every kind of layout.

transformers computes the variances of norms in float32 even in a float64 model; here it computes
them in float64. Its release 1.1 is tied whatever its config says; here it gets its own head.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from turns import by_turns

from jaxptd import Config, Layout, ModelConfig, Program, TrainConfig, make_mesh
from jaxptd.config import Relative
from jaxptd.layers.attention.relative import buckets
from jaxptd.models.encoder_decoder import shifted_right
from jaxptd.models.families import family_of
from jaxptd.params import shardings

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 37,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 4,
    "num_decoder_layers": 5,
    "num_heads": 8,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "dropout_rate": 0.0,
}
SOURCE, TARGET, ROWS = 32, 16, 8
OURS = ModelConfig(
    family="t5",
    num_layers=4,
    num_decoder_layers=5,
    hidden_size=32,
    num_heads=8,
    head_size=6,
    ffn_hidden_size=48,
    seq_length=SOURCE,
    decoder_seq_length=TARGET,
    vocab_size=37,
    relative_buckets=8,
    relative_distance=10,
    dtype="float64",
)
# transformers' options, and ours
VERSIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1.0": ({}, {}),
    "1.1": (
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"gated": True, "activation": "gelu-tanh", "tie_embeddings": False},
    ),
}
LAYOUTS = [
    Layout(),
    Layout(tp=2, sequence_parallel=True),
    Layout(cp=2),
    Layout(row=2, col=2),
    Layout(row=2, col=2, attention2d="blocks"),
    Layout(pp=2, schedule="interleaved"),
    Layout(pp=4, schedule="zb-v"),
    Layout(dp=4, zero=2),
    Layout(dp=2, cp=2, zero=3),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, schedule="zb-v"),
]


def reference(options: dict[str, Any]) -> Any:
    """A T5 of transformers in float64, with norms that matter."""
    torch.manual_seed(0)
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES | options))
    if not made.config.scale_decoder_outputs:
        made.lm_head.weight = torch.nn.Parameter(torch.randn(37, 32) / 4)
    for parameter in made.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    for module in made.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.forward = functools.partial(_normalised, module)
    return made.double().eval()


def _normalised(norm: Any, x: Any) -> Any:
    mean = x.pow(2).mean(-1, keepdim=True)
    return norm.weight * x * torch.rsqrt(mean + norm.variance_epsilon)


def loss_and_gradients(model: Any, batch: dict[str, np.ndarray]) -> tuple[float, dict]:
    """The mean loss of the targets of 0 or more, and the gradients by name."""
    x = {name: torch.tensor(value).long() for name, value in batch.items()}
    logits = model(
        input_ids=x["source"],
        attention_mask=x["source_mask"],
        decoder_input_ids=torch.tensor(shifted_right(batch["targets"], start=0)).long(),
        use_cache=False,
    ).logits
    entropy = torch.nn.functional.cross_entropy
    loss = entropy(logits.flatten(0, 1), x["targets"].flatten(), ignore_index=-1)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


# ---- their names --------------------------------------------------------------------------------


def ours(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters from arrays by transformers' names."""
    found = {"tokens.table": theirs["shared.weight"], "norm.w": theirs[f"{DECODER}final{NORM}"]}
    if "lm_head.weight" in theirs:
        found["head.table"] = theirs["lm_head.weight"]
    found["common.source_norm.w"] = theirs[f"{ENCODER}final{NORM}"]
    for side, count in (("encoder", 4), ("decoder", 5)):
        own = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"common.{side}_bias.table"] = theirs[own]
        layers = [dict(_layer(theirs, f"{side}.block.{i}.layer.", side)) for i in range(count)]
        found |= {f"{side}.{name}": np.stack([x[name] for x in layers]) for name in layers[0]}
    return found


ENCODER, DECODER, NORM = "encoder.", "decoder.", "_layer_norm.weight"


def _layer(theirs: dict, prefix: str, side: str) -> Iterator[tuple[str, np.ndarray]]:
    def product(name: str, *shape: int) -> np.ndarray:
        return theirs[f"{prefix}{name}.weight"].T.reshape(shape)

    def heads(name: str, *which: str) -> list[np.ndarray]:
        return [product(f"{name}.{each}", 32, 8, 6) for each in which]

    yield "attention_norm.w", theirs[f"{prefix}0.layer_norm.weight"]
    yield "attention.qkv.w", np.stack(heads("0.SelfAttention", "q", "k", "v"), 1)
    yield "attention.out.w", product("0.SelfAttention.o", 8, 6, 32)
    last = 1
    if side == "decoder":
        last = 2
        yield "cross_norm.w", theirs[f"{prefix}1.layer_norm.weight"]
        yield "cross.q.w", heads("1.EncDecAttention", "q")[0]
        yield "cross.kv.w", np.stack(heads("1.EncDecAttention", "k", "v"), 1)
        yield "cross.out.w", product("1.EncDecAttention.o", 8, 6, 32)
    yield "mlp_norm.w", theirs[f"{prefix}{last}.layer_norm.weight"]
    mlp = f"{last}.DenseReluDense."
    if f"{prefix}{mlp}wi.weight" in theirs:
        yield "mlp.up.w", product(f"{mlp}wi", 32, 48)
    else:
        yield "mlp.up.w", np.stack([product(f"{mlp}wi_{i}", 32, 48) for i in (0, 1)], 1)
    yield "mlp.down.w", product(f"{mlp}wo", 48, 32)


# ---- the comparison -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "version"), by_turns(LAYOUTS, list(VERSIONS)), ids=str)
def test_loss_and_gradients_are_those_of_transformers(layout: Layout, version: str) -> None:
    theirs, options = VERSIONS[version]
    model = reference(theirs)
    with jax.enable_x64(True):
        train = TrainConfig(global_batch_size=ROWS, micro_batches=4 if layout.pp > 1 else 2)
        config = Config(dataclasses.replace(OURS, **options), layout, train=train)
        program = Program(config, make_mesh(layout))
        batch = family_of(config.model).draw(config, np.random.default_rng(1))
        expected_loss, expected = loss_and_gradients(model, batch)
        weights = ours({name: p.detach().numpy() for name, p in model.named_parameters()})
        forms = program.states.stored
        params = {name: forms[name].from_canonical(weights[name]) for name in program.infos}
        state = {
            **program.init_state(),
            "params": jax.device_put(params, shardings(forms, program.mesh)),
        }
        loss, gradients = program.gradients(state, batch)
        found = jax.device_get(program.canonical(gradients))
    assert abs(float(loss) - expected_loss) < 1e-12
    wanted = ours(expected)
    assert set(found) == set(wanted)
    for name, x in wanted.items():
        assert np.linalg.norm(found[name] - x) < 1e-10 * np.linalg.norm(x), name


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
