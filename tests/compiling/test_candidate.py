"""Figures of compiled steps: unrolled layers from two depths, overlap, a real compile."""

import dataclasses
import importlib.util

import pytest

from jaxptd import compiling as candidate
from jaxptd.analysis.hlo.timeline import Move, Work
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.costs.collective import ALL_GATHER, PERMUTE
from jaxptd.layout import Layout
from jaxptd.planner.steps.traffic import Figures

GPT = ModelConfig(
    num_layers=20,
    hidden_size=128,
    num_heads=2,
    seq_length=128,
    vocab_size=512,
    dtype="bfloat16",
    scan_layers=False,
)
UNROLLED = Config(model=GPT, layout=Layout(tp=2), train=TrainConfig(global_batch_size=2))


def with_model(**fields: object) -> Config:
    return dataclasses.replace(UNROLLED, model=dataclasses.replace(GPT, **fields))


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Depths that are compiled, by a fake compiler that counts 7 bytes per layer."""
    found: list[int] = []

    def figures(config: Config, memory: int) -> Figures:
        found.append(config.model.num_layers)
        return Figures(memory + 7 * found[-1], 50.0 + 3 * found[-1], {"tp": found[-1] / 100})

    monkeypatch.setattr(candidate, "_figures", figures)
    return found


def test_unrolled_layers_follow_from_two_depths(depths: list[int]) -> None:
    assert candidate.measure(UNROLLED, 1000) == Figures(1140, 110.0, {"tp": 0.12})
    assert depths == [8, 12]


@pytest.mark.parametrize(
    "config",
    [
        with_model(scan_layers=True, remat="dots"),
        with_model(remat="dots", remat_layers=3),
        with_model(num_layers=12),
        dataclasses.replace(UNROLLED, layout=Layout(pp=2), train=TrainConfig(2, micro_batches=2)),
    ],
)
def test_others_are_compiled_whole(config: Config, depths: list[int]) -> None:
    candidate.measure(config, 0)
    assert depths == [config.model.num_layers]


def test_hidden_shares_are_of_bytes_by_axes() -> None:
    sizes = {"tp": 4, "dp": 2}
    over = Work(products=1)
    found = [
        Move("a", "forward", 100, 3, over, PERMUTE, ("tp",)),
        Move("b", "forward", 400, 1, Work(), ALL_GATHER, ("tp",)),
        Move("c", "forward", 80, 1, Work(), PERMUTE, ("dp",)),
    ]
    assert candidate.hidden_shares(found, sizes) == {"tp": 0.5, "dp": 0.0}


@pytest.mark.slow
def test_a_step_is_compiled_for_gpus() -> None:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA compiler here: pip install -e '.[h200]'")
    found = candidate.measure(with_model(scan_layers=True, num_layers=4), int(80e9))
    state = 12 * (4 * 12 * 128**2 // 2 + 512 * 128 // 2)
    assert state < found.bytes < 20 * state
    assert found.moved > state
    assert 0 <= found.hidden["tp"] <= 1
