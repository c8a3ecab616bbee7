"""Latent attention that exchanges latent vectors: its matmuls in a plan, and when it is chosen."""

import dataclasses
from typing import Any

import pytest
import tiny

from jaxptd.analysis.device_flops import work_per_device
from jaxptd.analysis.jaxprs import traced
from jaxptd.config import Config, Latent, ModelConfig, TrainConfig
from jaxptd.config.moe import MoE
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.space import REMATS, LayerLayout, Space
from jaxptd.planner.steps.step import ConfigStep, memory_of, predict

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


LATENTS, ONE = ("latent_exchange", "latent_products"), TrainConfig(global_batch_size=1)


def flops(layout: Layout, name: str, **choice: Any) -> float:
    """FLOPs of the terms of a step whose names begin so."""
    model = dataclasses.replace(MODEL, **choice)
    config = Config(model=model, layout=layout, train=ONE)
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


@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"cp": 4}, {"cp": 2, "ulysses": 4}], ids=str)
def test_absorbed_products_are_as_many_and_scores_are_wider(axes: dict[str, Any]) -> None:
    """W_k multiplies queries and W_v outputs, of a device's own tokens, whatever it visits."""
    expanded = Layout(**axes)
    absorbed = dataclasses.replace(expanded, latent_products="absorbed")
    tokens = MODEL.seq_length // expanded.sequence_shards
    heads = HEADS // expanded.tp
    each = MODEL.num_layers * 2 * tokens * RANK * heads
    for what, size in (("queries by W_k", NOPE), ("outputs by W_v", VALUE)):
        assert flops(absorbed, f"{what} forward") == each * size
        assert flops(absorbed, f"{what} backward") == 2 * each * size
        assert flops(expanded, what) == 0
    assert flops(absorbed, "k, v of") == 0
    scores = MODEL.num_layers * 2 * tokens * MODEL.seq_length * heads * (RANK + ROPE)
    assert flops(absorbed, "scores forward") == scores
    assert flops(absorbed, "context forward") == scores
    assert flops(expanded, "scores forward") == 0  # a fused kernel, for heads of up to 256


@pytest.mark.parametrize("remat", ["dots", "attention"])
def test_layers_multiply_queries_again_which_they_do_not_save(remat: Any) -> None:
    once, twice = (
        flops(Layout(latent_products="absorbed"), "queries by W_k", remat=each)
        for each in ("none", remat)
    )
    assert twice == once * 4 / 3


def test_steps_with_absorbed_products_have_the_scores_flops_more() -> None:
    """As many FLOPs outside of scores; two matmuls of scores forward, and five backward."""
    sizes, layers = tiny.config(Layout(), **tiny.LATENT).model, tiny.MODEL.num_layers
    found = [
        tiny.program(Layout(latent_products=each), **tiny.LATENT)
        for each in ("expanded", "absorbed")
    ]
    expanded, absorbed = (work_per_device(traced(each), each.mesh).item() for each in found)
    assert sizes.latent is not None
    wider = sizes.latent.vector - sizes.latent.head_size
    rows = 8 * sizes.num_heads * sizes.seq_length  # whose outputs meet their gradients once more
    scores = rows * sizes.seq_length
    assert absorbed - expanded == layers * 2 * wider * (7 * scores + rows)


def search(gpus: int, length: int = 32768, rank: int = RANK, **pins: Any) -> Search:
    latent = Latent(512, rank, NOPE, ROPE, VALUE)
    model = dataclasses.replace(MODEL, seq_length=length, latent=latent)
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


def test_a_plan_absorbs_where_devices_have_few_tokens_and_expand_those_of_many() -> None:
    """Each of 64 devices would expand the vectors of 64 times its own tokens."""
    for length, best in ((8192, "absorbed"), (65536, "expanded")):
        found = next(iter(search(64, length)))
        assert found.config.layout.latent_products == best
        other = {"expanded": "absorbed", "absorbed": "expanded"}[best]
        pinned = next(iter(search(64, length, **{"layout.latent_products": other})))
        assert pinned.config.layout.latent_products == other
        assert pinned.step.seconds > found.step.seconds
    assert "latent_products=absorbed" in str(next(iter(search(64, 8192))).config.layout)


def test_vectors_need_less_memory_than_gathered_keys_and_values() -> None:
    held = [
        memory_of(ConfigStep(Config(model=MODEL, layout=layout, train=ONE))).total
        for layout in (
            Layout(cp=8, ring="gather", latent_products=each) for each in ("expanded", "absorbed")
        )
    ]
    assert held[1] < held[0]


def test_a_pin_without_effect_leaves_layouts_that_exchange_nothing_out() -> None:
    found = search(8, **{"layout.latent_exchange": "expanded", "layout.ring": "rsa"})
    assert next(iter(found), None) is None


@pytest.mark.parametrize(("length", "rank"), [(4096, RANK), (65536, RANK), (65536, 32)])
def test_bounds_of_layers_are_below_all(length: int, rank: int) -> None:
    """Also of the products that have the fewest FLOPs where vectors are narrow."""
    found = search(8, length, rank)
    layers, layout = found.layer_costs, Layout(cp=8)
    bare = layers.bare(LayerLayout(layout, 1), False)
    assert bare is not None
    for each in layers.exchanges(layout):
        config = found.space.layer_config(LayerLayout(each, 1))
        assert config is not None
        whole = Search(
            Space(
                found.space.config, 8, ALONE | {f"layout.{n}": getattr(each, n) for n in LATENTS}
            ),
            H100,
            80 * 2.0**30,
        ).layer_costs.whole(LayerLayout(each, 1), False, False)
        assert whole is not None
        for remat in REMATS:
            assert bare.layers(remat) <= whole.layers(remat)
            assert bare.kept[remat] <= whole.kept[remat]
