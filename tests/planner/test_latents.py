"""Latent attention that exchanges latent vectors: its matmuls in a plan, and when it is chosen."""

import dataclasses
from typing import Any

import pytest

from jaxptd.config import Config, Latent, ModelConfig, TrainConfig
from jaxptd.config.moe import MoE
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.space import REMATS, LayerLayout, Space
from jaxptd.planner.steps.step import predict

H100 = Cluster(find_accelerator("h100"))
HEADS, RANK, NOPE, ROPE, VALUE = 32, 512, 128, 64, 128
MODEL = ModelConfig(
    family="deepseek_v3",
    num_layers=2,
    hidden_size=2048,
    num_heads=HEADS,
    ffn_hidden_size=4096,
    vocab_size=32000,
    seq_length=32768,
    dtype="bfloat16",
    moe=MoE(num_experts=8, top_k=2, ffn_hidden_size=512, shared_ffn_hidden_size=512, first_dense=1),
    latent=Latent(512, RANK, NOPE, ROPE, VALUE),
)
ALONE = {"layout.tp": 1, "layout.pp": 1, "layout.dp": 1, "layout.row": 1, "layout.col": 1}
ALONE |= {"layout.ulysses": 1, "layout.ep": 1}


def flops(layout: Layout, name: str) -> float:
    """FLOPs of the terms of a step whose names begin so."""
    config = Config(model=MODEL, layout=layout, train=TrainConfig(global_batch_size=1))
    return sum(term.flops for term in predict(config, H100).terms if term.name.startswith(name))


@pytest.mark.parametrize(
    ("axes", "tokens", "heads"),
    [
        ({"cp": 4}, 32768, HEADS),
        ({"cp": 4, "ring": "gather"}, 32768, HEADS),
        ({"cp": 2, "tp": 2}, 32768, HEADS // 2),
        ({"cp": 2, "ulysses": 4}, 32768, HEADS // 4),
        ({"ulysses": 8}, 32768, HEADS // 8),
    ],
    ids=str,
)
def test_a_device_expands_the_vectors_of_all_tokens(
    axes: dict[str, Any], tokens: int, heads: int
) -> None:
    """Once forward; backward again, with the gradients of both factors."""
    once = MODEL.num_layers * 2 * tokens * RANK * heads * (NOPE + VALUE)
    assert flops(Layout(**axes), "k, v of latent vectors forward") == once
    assert flops(Layout(**axes), "k, v of latent vectors backward") == 3 * once
    assert flops(Layout(**axes), "k, v of heads") == 0
    expanded = Layout(**axes, latent_exchange="expanded")
    assert flops(expanded, "k, v of latent vectors") == 0
    share = MODEL.seq_length // expanded.sequence_shards
    own = MODEL.num_layers * 2 * share * RANK * HEADS // expanded.tp * (NOPE + VALUE)
    assert flops(expanded, "k, v of heads") == 3 * own


def search(gpus: int, length: int = 32768, **pins: Any) -> Search:
    model = dataclasses.replace(MODEL, seq_length=length)
    config = Config(model=model, train=TrainConfig(global_batch_size=1))
    return Search(Space(config, gpus, ALONE | {"layout.cp": gpus} | pins), H100, 80 * 2.0**30)


def test_a_plan_expands_first_where_attention_hides_keys_and_values() -> None:
    """In a node with long sequences. With short ones, and between nodes, latent vectors move."""
    for gpus, length, best in ((8, 65536, "expanded"), (8, 4096, "compressed")):
        found = next(iter(search(gpus, length)))
        assert found.config.layout.latent_exchange == best
        other = {"expanded": "compressed", "compressed": "expanded"}[best]
        pinned = next(iter(search(gpus, length, **{"layout.latent_exchange": other})))
        assert pinned.config.layout.latent_exchange == other
        assert pinned.step.seconds > found.step.seconds
    assert next(iter(search(16, 65536))).config.layout.latent_exchange == "compressed"


def test_a_pin_without_effect_leaves_layouts_that_exchange_nothing_out() -> None:
    found = search(8, **{"layout.latent_exchange": "expanded", "layout.ring": "rsa"})
    assert next(iter(found), None) is None


@pytest.mark.parametrize("length", [4096, 65536])
def test_bounds_of_layers_are_below_both(length: int) -> None:
    found = search(8, length)
    layers, layout = found.layer_costs, Layout(cp=8)
    bare = layers.bare(LayerLayout(layout, 1), False)
    assert bare is not None
    for each in layers.exchanges(layout):
        config = found.space.layer_config(LayerLayout(each, 1))
        assert config is not None
        whole = Search(
            Space(config, 8, ALONE | {"layout.latent_exchange": each.latent_exchange}),
            H100,
            80 * 2.0**30,
        ).layer_costs.whole(LayerLayout(each, 1), False, False)
        assert whole is not None
        for remat in REMATS:
            assert bare.layers(remat) <= whole.layers(remat)
            assert bare.kept[remat] <= whole.kept[remat]
