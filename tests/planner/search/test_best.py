"""The pruned search finds what a search of everything finds."""

import itertools
from collections.abc import Iterator

import pytest

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.planner.own.step import predict
from jaxptd.planner.search.best import Candidate, Search
from jaxptd.planner.search.bounds import Bound, bound, unit_cost
from jaxptd.planner.search.space import Pins, Space

H100 = Cluster(find_accelerator("h100"))
GPT = ModelConfig(
    num_layers=8, hidden_size=2048, num_heads=16, seq_length=2048, vocab_size=32000, dtype="bfloat16"
)
LLAMA = ModelConfig(
    family="llama", num_layers=6, hidden_size=2048, num_heads=16, num_kv_heads=4,
    ffn_hidden_size=5504, seq_length=4096, vocab_size=32000, dtype="bfloat16",
)
T5 = ModelConfig(
    family="t5", num_layers=4, hidden_size=1024, num_heads=16, seq_length=512,
    decoder_seq_length=128, vocab_size=32000, dtype="bfloat16",
)
GIB = 2.0**30


def space(model: ModelConfig, gpus: int, batch: int, **pins: object) -> Space:
    named: Pins = {name.replace("__", "."): value for name, value in pins.items()}
    return Space(Config(model=model, train=TrainConfig(global_batch_size=batch)), gpus, named)


def everything(search: Search) -> Iterator[Candidate]:
    """All candidates that fit, whatever their bounds are."""
    for axes in search.space.axes():
        for rest in search.space.rests(axes):
            if found := search.evaluate(axes, rest, Bound(0.0, 0.0)):
                yield found


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "limit"),
    [(GPT, 4, 8, 80), (GPT, 8, 8, 9), (LLAMA, 4, 4, 12), (T5, 4, 8, 80)],
    ids=["gpt", "gpt-tight", "llama-tight", "t5"],
)
def test_nothing_is_faster_than_what_is_found(
    model: ModelConfig, gpus: int, batch: int, limit: float
) -> None:
    search = Search(space(model, gpus, batch), H100, limit * GIB)
    found = list(itertools.islice(search, 3))
    counted, search.counted = search.counted, 0
    each: dict[tuple[int, ...], float] = {}
    for candidate in everything(search):
        sizes, seconds = candidate.axes.sizes, candidate.step.seconds
        each[sizes] = min(seconds, each.get(sizes, seconds))
    best = sorted(each.values())[:3]
    assert [candidate.step.seconds for candidate in found] == pytest.approx(best, rel=1e-9)
    assert counted < search.counted


def test_bounds_are_below_the_predictions() -> None:
    search = Search(space(LLAMA, 8, 16), H100, 80 * GIB)
    seen = 0
    for axes in search.space.axes():
        config = search.space.unit_config(axes.unit)
        if config is None:
            continue
        cost = unit_cost(config, H100)
        for rest in search.space.rests(axes):
            least = bound(cost, axes, rest, 80 * GIB)
            found = search.evaluate(axes, rest, Bound(0.0, 0.0))
            if found is None:
                continue
            seen += 1
            assert least is not None
            assert least.seconds <= found.step.seconds * (1 + 1e-9)
    assert seen > 100


def test_pins_hold() -> None:
    pinned = space(GPT, 8, 8, layout__tp=2, layout__zero=1, model__remat="dots")
    for found in itertools.islice(Search(pinned, H100, 80 * GIB), 5):
        config = found.config
        assert (config.layout.tp, config.layout.zero, config.model.remat) == (2, 1, "dots")


def test_a_candidate_is_predicted_as_its_config_is() -> None:
    for found in itertools.islice(Search(space(GPT, 8, 16), H100, 80 * GIB), 5):
        assert predict(found.config, H100).seconds == found.step.seconds
        assert found.memory.total <= 80 * GIB
        assert found.config.layout.num_devices == 8


def test_what_does_not_fit_is_not_found() -> None:
    assert list(Search(space(GPT, 1, 8), H100, 1 * GIB)) == []
