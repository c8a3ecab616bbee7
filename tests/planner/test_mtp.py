"""MTP modules in a plan: time and memory of a layer, a join and a head on the last stage."""

from typing import Any

import pytest
import tiny

from jaxptd.analysis import memory_model
from jaxptd.analysis.device_flops import work_per_device
from jaxptd.analysis.jaxprs import traced
from jaxptd.analysis.peak import Peak, peak
from jaxptd.config import Config, ModelConfig, TrainConfig, nested
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of
from jaxptd.planner.cost import StepTime
from jaxptd.planner.steps.step import ConfigStep, predict

H200 = Cluster(find_accelerator("h200"))
LLAMA = {
    "family": "llama",
    "num_layers": 8,
    "hidden_size": 2048,
    "num_heads": 16,
    "ffn_hidden_size": 5504,
    "vocab_size": 32000,
    "seq_length": 2048,
    "dtype": "bfloat16",
}
MICRO_BATCHES = 8


def config(modules: int, layout: Layout, **choice: Any) -> Config:
    """A config with so many modules, and one sequence in each micro-batch of a device."""
    model = ModelConfig(**nested(LLAMA | choice | {"mtp.layers": modules}))
    batch = MICRO_BATCHES * layout.sample_shards
    train = TrainConfig(global_batch_size=batch, micro_batches=MICRO_BATCHES)
    return Config(model, layout, train=train)


def step(modules: int, layout: Layout, **choice: Any) -> StepTime:
    return predict(config(modules, layout, **choice), H200)


def flops(found: StepTime) -> float:
    """FLOPs of all matmuls but those of scores."""
    return sum(term.flops for term in found.terms if term.kind != "attention")


@pytest.mark.parametrize("modules", [1, 2])
def test_their_matmuls_have_the_flops_of_the_model(modules: int) -> None:
    """Six for each weight and token: of a layer, of both halves that are joined, of the head."""
    layer, head = 4 * 2048**2 + 3 * 2048 * 5504, 2048 * 32000
    tokens = MICRO_BATCHES * 2048
    found = flops(step(modules, Layout())) - flops(step(0, Layout()))
    assert found == modules * 6 * tokens * (layer + 2 * 2048**2 + head)


def test_a_step_computes_the_matmuls_that_a_plan_counts() -> None:
    """Beside them a layer's scores, two matmuls forward and five backward, and sums of outputs."""
    programs = [tiny.program(Layout(), **{"mtp.layers": n}) for n in (1, 2)]
    one, two = (work_per_device(traced(each), each.mesh).item() for each in programs)
    model = tiny.config(Layout(), **{"mtp.layers": 1}).model
    ffn = architecture_of(model).stacks[0].parts[1].inner
    layer, head, tokens = 4 * 16**2 + 2 * 16 * ffn, 16 * 13, 8 * 8
    scores = 2 * tokens * 16 * (7 * 8 + 1)
    assert two - one == 6 * tokens * (layer + 2 * 16**2 + head) + scores


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_in_a_pipeline_the_last_stage_has_them(schedule: str) -> None:
    """Where it is the slowest with and without, each micro-batch takes a module longer."""
    one, pipeline = Layout(), Layout(pp=4, schedule=schedule)
    alone = step(1, one).seconds - step(0, one).seconds
    more = step(1, pipeline).seconds - step(0, pipeline).seconds
    assert more == pytest.approx(alone, rel=0.1)
    waiting = step(0, pipeline).bubble * step(0, pipeline).seconds
    assert step(1, pipeline).bubble * step(1, pipeline).seconds == pytest.approx(waiting, rel=0.1)


def test_stages_with_fewer_layers_make_room_for_them() -> None:
    even, fewer = (Layout(pp=4, stage_layers=each) for each in ((2, 2, 2, 2), (3, 2, 2, 1)))
    assert step(0, even).seconds < step(0, fewer).seconds
    assert step(1, fewer).seconds < step(1, even).seconds


def test_a_module_recomputes_what_the_first_layer_does() -> None:
    """Besides, with `full`, the matmuls that join its halves; never the last one of the layer."""
    tokens, down = MICRO_BATCHES * 2048, 2048 * 5504
    layer = 4 * 2048**2 + 3 * down
    plain = flops(step(1, Layout())) - flops(step(0, Layout()))
    for layers in (None, 1):
        found = flops(step(1, Layout(), remat="full", remat_layers=layers))
        found -= flops(step(0, Layout(), remat="full", remat_layers=layers))
        assert found - plain == 2 * tokens * (layer - down + 2 * 2048**2)
    found = flops(step(1, Layout(), remat="full", remat_layers=0))
    assert found == flops(step(1, Layout()))


def test_experts_of_modules_are_counted() -> None:
    """In the last stack's form: a DeepSeek module has experts and latent attention."""
    fields = {"family": "deepseek_v3", "moe.num_experts": 8, "moe.top_k": 2}
    fields |= {"moe.ffn_hidden_size": 512, "moe.shared_ffn_hidden_size": 512}
    fields |= {"moe.num_groups": 1, "moe.top_groups": 1, "moe.first_dense": 1}
    both = [step(n, Layout(ep=2), **fields) for n in (0, 1)]
    model = config(1, Layout(), **fields).model
    (module,) = architecture_of(model).layers_behind
    with_experts = next(s for s in architecture_of(model).stacks if s.name == "blocks_1")
    assert module.parts == with_experts.parts
    assert both[1].seconds > both[0].seconds


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=4)], ids=str)
def test_at_the_loss_modules_have_saved_their_layers_and_have_logits(layout: Layout) -> None:
    """A vocabulary so large that memory peaks there; nothing else of that moment grows."""
    none, one, two = (at_the_loss(n, layout) for n in (0, 1, 2))
    logits, saved = 2048 * 4 * 32000 * 2, memory_model.behind(config(1, layout, **WIDE))
    if layout.pp == 1:
        assert none.moment == one.moment == two.moment == "loss"
        assert one.logits - none.logits == two.logits - one.logits == logits
        assert one.kept - none.kept == two.kept - one.kept == saved
    assert one.total > none.total + logits // 2


WIDE = {"vocab_size": 128000, "remat": "full"}


def at_the_loss(modules: int, layout: Layout) -> Peak:
    step = ConfigStep(config(modules, layout, **WIDE))
    return peak(step.config, step.state, step.plan)


def test_the_last_module_has_its_backward_beside_the_logits_of_the_others() -> None:
    """A single micro-batch, as its gradients then come one by one."""
    fields = {"remat": "none", "num_layers": 2}
    model = ModelConfig(**nested(LLAMA | fields | {"mtp.layers": 2}))
    step = ConfigStep(Config(model, Layout(), train=TrainConfig(global_batch_size=8)))
    found = peak(step.config, step.state, step.plan)
    assert found.moment == "modules"
    logits, table = 8 * 2048 * 32000 * 2, 2048 * 32000 * 2
    assert found.logits == 2 * logits + 2 * table
    kept = memory_model.activations(step.config) + memory_model.behind(step.config)
    assert found.kept == kept
    (_, end), elements = architecture_of(model).behind[1:], 2048**2 * 6 + 3 * 2048 * 5504
    assert found.gradients == pytest.approx(2 * elements, rel=1e-3)
    assert end.layers[0].weights + 2 * 2048**2 == elements


@pytest.mark.parametrize("modules", [1, 2])
def test_modules_read_the_table_again_and_have_three_norms_more(modules: int) -> None:
    """A layer has two norms; a module others of both halves and of its head."""
    moved = [
        {
            name: sum(term.bytes for term in found.terms if term.name == name)
            for name in ("embedding", "norms of a module")
        }
        for found in (step(n, Layout()) for n in (0, 1, modules))
    ]
    none, one, found = moved
    assert found["embedding"] == (1 + modules) * none["embedding"] > 0
    assert found["norms of a module"] == modules * one["norms of a module"]
    tokens = MICRO_BATCHES * 2048
    assert one["norms of a module"] >= 3 * tokens * 2048 * 2 * 4  # x twice, and gradients


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_last_stage_peaks_in_the_backward_pass_of_a_module(remat: str) -> None:
    """Of a small vocabulary: it holds what a layer does, and what modules saved besides."""
    layout, fields = Layout(pp=4), {"vocab_size": 1000, "remat": remat}
    none, two = (config(n, layout, **fields) for n in (0, 2))
    before, found = (peak(x.config, x.state, x.plan) for x in map(ConfigStep, (none, two)))
    assert (before.moment, found.moment) == ("layers", "modules")
    assert found.kept - before.kept == memory_model.behind(two)
    assert found.working > before.working
