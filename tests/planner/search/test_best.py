"""The pruned search finds the same layouts as an exhaustive one."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest

from jaxptd.config import Config, DataConfig, EncoderDecoder, Latent, ModelConfig, TrainConfig
from jaxptd.config.moe import MoE
from jaxptd.config.mtp import MTP
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.layout import Layout
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.bounds import Bound, Bounds, Sharding, sent_by, state_bytes
from jaxptd.planner.search.space import LayerLayout, MeshShape, ScheduleChoice, Space
from jaxptd.planner.steps.step import ConfigStep, predict

H100 = Cluster(find_accelerator("h100"))
GIB = 2.0**30
SIZES = {"vocab_size": 32000, "dtype": "bfloat16"}
GPT = ModelConfig(num_layers=8, hidden_size=2048, num_heads=16, seq_length=2048, **SIZES)
LLAMA = ModelConfig(
    family="llama",
    num_layers=6,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=4,
    ffn_hidden_size=5504,
    seq_length=4096,
    **SIZES,
)
T5 = ModelConfig(
    family="t5",
    num_layers=4,
    hidden_size=1024,
    num_heads=16,
    seq_length=512,
    encoder_decoder=EncoderDecoder(seq_length=512),
    **SIZES,
)
BERT = ModelConfig(
    family="bert", num_layers=4, hidden_size=1024, num_heads=16, seq_length=512, **SIZES
)

QWEN3_MOE = ModelConfig(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    ffn_hidden_size=2048,
    seq_length=2048,
    moe=MoE(num_experts=8, top_k=2, ffn_hidden_size=1024, shared_ffn_hidden_size=512),
    **SIZES,
)
LATENT = ModelConfig(
    family="deepseek_v3",
    num_layers=4,
    hidden_size=2048,
    num_heads=16,
    ffn_hidden_size=4096,
    seq_length=2048,
    moe=MoE(num_experts=8, top_k=2, ffn_hidden_size=512, shared_ffn_hidden_size=512, first_dense=1),
    latent=Latent(q_rank=512, kv_rank=256, nope_size=64, rope_size=32, value_size=64),
    **SIZES,
)
WIDE = dataclasses.replace(
    QWEN3_MOE,
    hidden_size=4096,
    num_heads=64,
    seq_length=4096,
    moe=MoE(num_experts=128, top_k=8, ffn_hidden_size=1536),
)
DENSE_FIRST = dataclasses.replace(
    QWEN3_MOE, moe=MoE(num_experts=8, top_k=2, ffn_hidden_size=1024, first_dense=1)
)

AHEAD = dataclasses.replace(LLAMA, mtp=MTP(layers=1))
LATENT_AHEAD = dataclasses.replace(LATENT, mtp=MTP(layers=2))


def search(
    model: ModelConfig,
    gpus: int,
    batch: int,
    gib: float,
    cluster: Cluster = H100,
    **pins: object,
) -> Search:
    named = {name.replace("__", "."): value for name, value in pins.items()}
    config = Config(model=model, train=TrainConfig(global_batch_size=batch))
    return Search(Space(config, gpus, named), cluster, gib * GIB)


def everything(found: Search) -> Iterator[tuple[MeshShape, ScheduleChoice, Bound]]:
    """All candidates, whatever their bounds."""
    for mesh_shape in found.space.mesh_shapes():
        for pipe in found.space.pipes(mesh_shape, fewer=2, near=found.cluster.node_size):
            for choice in found.space.choices:
                yield mesh_shape, pipe, Bound(0.0, choice, 0.0)


@pytest.mark.parametrize(
    ("model", "gpus", "gib"),
    [
        pytest.param(GPT, 2, 80.0, id="gpt", marks=pytest.mark.slow),
        pytest.param(LLAMA, 2, 7.0, id="llama-tight"),
        pytest.param(GPT, 4, 8.0, id="gpt-4-tight", marks=pytest.mark.slow),
        pytest.param(LLAMA, 4, 20.0, id="llama-4", marks=pytest.mark.slow),
        pytest.param(T5, 2, 8.0, id="t5", marks=pytest.mark.slow),
        pytest.param(BERT, 4, 80.0, id="bert", marks=pytest.mark.slow),
        pytest.param(QWEN3_MOE, 2, 6.0, id="experts"),
        pytest.param(QWEN3_MOE, 4, 80.0, id="experts-4", marks=pytest.mark.slow),
        pytest.param(DENSE_FIRST, 4, 5.0, id="dense-first", marks=pytest.mark.slow),
        pytest.param(LATENT, 2, 6.0, id="latent", marks=pytest.mark.slow),
        pytest.param(LATENT, 4, 80.0, id="latent-4", marks=pytest.mark.slow),
        pytest.param(AHEAD, 2, 8.0, id="mtp-tight", marks=pytest.mark.slow),
        pytest.param(LATENT_AHEAD, 2, 80.0, id="latent-mtp", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_faster_than_what_is_found(model: ModelConfig, gpus: int, gib: float) -> None:
    check_against_all(search(model, gpus, 4, gib), search(model, gpus, 4, gib))


def check_against_all(pruned: Search, whole: Search) -> None:
    """Holds the best three layouts against all that there are."""
    found = [candidate.step.seconds for candidate in itertools.islice(pruned, 3)]
    each: dict[tuple[int, ...], float] = {}
    for item in everything(whole):
        if candidate := whole.evaluate(*item):
            sizes, seconds = candidate.mesh_shape.sizes, candidate.step.seconds
            each[sizes] = min(seconds, each.get(sizes, seconds))
    assert found == pytest.approx(sorted(each.values())[:3], rel=1e-9)
    assert len(found) == 3 and pruned.counted < whole.counted / 2


B200 = Cluster(find_accelerator("b200"))
PAIRS = Cluster(find_accelerator("b200"), 2)  # GPUs of a node
ALONE = {"layout__cp": 1, "layout__row": 1, "layout__col": 1}
FOLDED = ALONE | {"layout__tp": 1, "layout__pp": 1}


@pytest.mark.parametrize(
    ("model", "pins"),
    [
        (LLAMA, ALONE | {"layout__zero": 3, "model__remat": "none"}),
        pytest.param(LLAMA, {"layout__zero": 3}, marks=pytest.mark.slow),
        pytest.param(QWEN3_MOE, {"layout__cp": 1}, marks=pytest.mark.slow),
    ],
)
def test_with_replicas_too_nothing_is_faster(model: ModelConfig, pins: dict) -> None:
    pruned, whole = (search(model, 4, 8, 80, PAIRS, **pins) for _ in range(2))
    pipes = [pipe for _, pipe, _ in everything(whole)]
    found = {(pipe.replicas, pipe.replica_state) for pipe in pipes}
    assert found == {(1, "copied"), (2, "copied"), (2, "split")}
    check_against_all(pruned, whole)


def test_replicas_pay_where_parameters_are_gathered_often_over_a_slower_network() -> None:
    """Eight micro-batches gather 16 times; replicas add up gradients over the network once."""
    often = FOLDED | {"layout__zero": 3, "train__micro_batches": 8}
    best = next(iter(search(LLAMA, 64, 512, 80, B200, **often)))
    assert (best.config.layout.replicas, best.config.layout.dp) == (8, 8)
    assert best.config.layout.replica_state == "split"  # fewer bytes than an all-reduce
    (copied,) = itertools.islice(
        search(LLAMA, 64, 512, 80, B200, layout__replica_state="copied", **often), 1
    )
    assert copied.config.layout.replica_state == "copied" and copied.seconds > best.seconds
    apart = next(iter(search(LLAMA, 64, 512, 80, B200, layout__replicas=1, **often)))
    assert apart.config.layout.dp == 64 and apart.seconds > 1.2 * best.seconds
    assert apart.memory.total < best.memory.total
    once = often | {"train__micro_batches": 1}
    assert next(iter(search(LLAMA, 64, 512, 80, B200, **once))).config.layout.replicas == 1
    pinned = next(iter(search(LLAMA, 64, 512, 80, B200, layout__replicas=4, **once)))
    assert (pinned.config.layout.replicas, pinned.config.layout.dp) == (4, 16)
    inner = next(iter(search(LLAMA, 64, 512, 80, B200, layout__replicas=4, layout__dp=8)))
    assert (inner.config.layout.replicas, inner.config.layout.dp) == (4, 8)


def test_bounds_know_that_a_replica_gathers_within_a_node() -> None:
    """A bound that gathered over all nodes would take longer than such a step does."""
    found = search(LLAMA, 64, 512, 80, B200, **FOLDED, layout__zero=3, layout__replicas=8)
    step = next(iter(found))
    many, few = step.config.train.micro_batches > 1, step.config.layout.pp > 1
    cost = found.layer_costs.whole(step.mesh_shape.layer_layout, many, few)
    assert cost is not None
    shape = step.mesh_shape
    sent = [sent_by(Sharding(3, n), cost, shape, B200).layerwise for n in (8, 1)]
    assert sent[1] > 1.5 * sent[0] > 0
    assert (
        state_bytes(cost, shape, Sharding(3, 8))[0]
        == 8 * state_bytes(cost, shape, Sharding(3))[0]
        == 8 * state_bytes(cost, shape, Sharding(3, 8, split=True))[0]
    )


SPLIT = {"layout__tp": 2, "layout__cp": 8, "layout__ep": 4, "layout__pp": 1, "layout__zero": 3}
SPLIT |= {"layout__collective_matmul": True}
BETWEEN_NODES = {"layout__cp": 16, "model__remat": "none"}
ONE_SEQUENCE = {"layout__tp": 1, "layout__pp": 1, "layout__dp": 1, "layout__row": 1}
ONE_SEQUENCE |= {"layout__col": 1}
LONG = dataclasses.replace(LLAMA, seq_length=65536)
SUMS = ALONE | {"layout__tp": 1, "layout__pp": 1, "layout__zero": 1, "layout__ep": 2}


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "gib", "pins", "every"),
    [
        (LLAMA, 4, 8, 14, ALONE, 37),
        (LLAMA, 64, 256, 40, SUMS, 1),
        (QWEN3_MOE, 8, 8, 6, ALONE, 61),
        (DENSE_FIRST, 4, 8, 6, ALONE, 61),
        (LATENT, 4, 8, 6, ALONE, 61),
        (WIDE, 256, 512, 74, SPLIT, 1),
        (LONG, 16, 16, 80, BETWEEN_NODES, 1),
        (LONG, 16, 1, 80, ONE_SEQUENCE, 1),
    ],
)
def test_bounds_are_below_the_predictions(
    model: ModelConfig, gpus: int, batch: int, gib: float, pins: dict, every: int
) -> None:
    """Checks bounds of time and of the number of layers that recompute."""
    found = search(model, gpus, batch, gib, **pins)
    seen = 0
    for mesh_shape, pipe, bound in itertools.islice(everything(found), 0, None, every):
        candidate = found.evaluate(mesh_shape, pipe, bound)
        if candidate is None:
            continue
        cost = found.layer_costs.whole(
            mesh_shape.layer_layout, mesh_shape.micro_batches > 1, mesh_shape.pp > 1
        )
        assert cost is not None
        least = Bounds(cost, mesh_shape, found.space, H100, found.limit).of(pipe, bound.choice)
        assert least is not None, (mesh_shape, pipe, bound)
        assert least.seconds <= candidate.step.seconds * (1 + 1e-9), (mesh_shape, pipe, bound)
        layers = candidate.config.model.remat_layers
        if layers is not None and mesh_shape.pp == 1:
            assert least.share * model.num_layers <= layers
        seen += 1
    assert seen > (20 if every > 1 else 2)


def test_over_several_nodes_it_takes_ulysses_in_each_and_a_ring_between() -> None:
    """Two nodes of 8. Each alternative is slower; a pin of any of them is kept."""
    found = next(iter(search(LONG, 16, 1, 80, **ONE_SEQUENCE)))
    layout = found.config.layout
    assert (layout.cp, layout.ulysses, layout.ring) == (2, 8, "zigzag")
    for pins in ({"cp": 16}, {"cp": 16, "ring": "zigzag"}, {"cp": 1, "ulysses": 16}):
        named = {f"layout__{name}": value for name, value in pins.items()}
        other = next(iter(search(LONG, 16, 1, 80, **ONE_SEQUENCE, **named)))
        assert {name: getattr(other.config.layout, name) for name in pins} == pins
        assert other.step.seconds > 1.02 * found.step.seconds


def test_ulysses_computes_what_a_ring_computes() -> None:
    """A device has an eighth of the heads, and eight times the tokens of a ring of 16."""
    config = Config(model=LONG, train=TrainConfig(global_batch_size=1))
    steps = [
        predict(dataclasses.replace(config, layout=layout), H100)
        for layout in (Layout(cp=16), Layout(cp=2, ulysses=8))
    ]
    computed = [sum(t.seconds for t in step.terms if t.kind == "attention") for step in steps]
    assert computed[0] == pytest.approx(computed[1], rel=1e-12) and computed[0] > 0


def test_heads_that_do_not_split_over_a_node_leave_the_ring() -> None:
    """12 heads and a node of 8: only gathering is tried beside the ring."""
    model = dataclasses.replace(LONG, hidden_size=1536, num_heads=12, num_kv_heads=12)
    found = search(model, 16, 1, 80, **ONE_SEQUENCE)
    exchanges = found.layer_costs.exchanges(Layout(cp=16))
    costs = [found.space.layer_config(LayerLayout(each, 1)) for each in exchanges]
    assert [each.layout.ring for each in costs if each] == ["zigzag", "gather"]
    assert next(iter(found)).config.layout.ulysses == 1


def test_pins_hold() -> None:
    found = search(GPT, 8, 8, 80, layout__tp=2, layout__zero=1, model__remat="dots")
    for candidate in itertools.islice(found, 3):
        config = candidate.config
        assert (config.layout.tp, config.layout.zero, config.model.remat) == (2, 1, "dots")
    pinned = search(GPT, 8, 8, 80, layout__schedule="gpipe", layout__pp=2)
    assert next(iter(pinned)).config.layout.schedule == "gpipe"
    assert next(iter(search(LLAMA, 4, 8, 140))).config.model.remat == "none"
    again = search(LLAMA, 4, 8, 140, model__remat_layers=1)
    assert next(iter(again)).config.model.remat != "none"


def test_documents_stay_balanced() -> None:
    """Rings other than `gather` hold fixed chunks: there only samples are arranged."""
    model = dataclasses.replace(LLAMA, seq_length=65536)
    found = {}
    for balance, ring in (("samples", "zigzag"), ("tokens", "gather"), ("tokens", "zigzag")):
        layout = Layout(cp=2, ring="gather", balance=balance)
        config = Config(
            model=model,
            layout=layout,
            data=DataConfig(documents="apart"),
            train=TrainConfig(global_batch_size=1),
        )
        pins = {"layout.ring": ring, "layout.cp": 4, "layout.row": 1, "layout.col": 1}
        best = next(iter(Search(Space(config, 4, pins), H100, 80 * GIB)))
        found[balance, ring] = best.config.layout.balance
    assert found == {
        ("samples", "zigzag"): "samples",
        ("tokens", "gather"): "tokens",
        ("tokens", "zigzag"): "samples",
    }


def test_without_experts_ep_is_more_of_dp() -> None:
    plain, found = (next(iter(search(GPT, 8, 8, 80, **pins))) for pins in ({}, {"layout__ep": 2}))
    dp = plain.config.layout.dp // 2
    assert found.config.layout == dataclasses.replace(plain.config.layout, dp=dp, ep=2)
    assert found.step.seconds == pytest.approx(plain.step.seconds)
    assert found.memory == plain.memory
    assert plain.config.layout.ep == 1


@pytest.mark.parametrize(
    ("pins", "holds"),
    [
        ({"layout__schedule": "zb-h1"}, lambda c: c.layout.pp > 1 and c.layout.schedule == "zb-h1"),
        ({"layout__virtual_stages": 2}, lambda c: c.layout.virtual_stages == 2),
        ({"layout__ring": "rsa"}, lambda c: c.layout.ring == "rsa" and c.layout.ring_size > 1),
        ({"layout__ring": "gather"}, lambda c: c.layout.ring == "gather" and c.layout.cp > 1),
        ({"layout__matmul2d": "cannon"}, lambda c: c.layout.matmul2d == "cannon"),
        ({"layout__attention2d": "blocks"}, lambda c: c.layout.has_grid),
        ({"layout__collective_matmul": True}, lambda c: c.layout.tp > 1),
        ({"layout__keep_gathered": True}, lambda c: c.layout.gathers_inputs),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_pin_is_never_in_vain(pins: dict, holds: Callable[[Config], bool]) -> None:
    found = search(GPT, 4, 8, 80, **pins)
    assert holds(next(iter(found)).config)


def fastest(model: ModelConfig, cp: int, tp: int, **pins: object) -> tuple[str, float]:
    """The fastest layout's ring and seconds."""
    best = next(iter(search(model, cp * tp, 1, 80, layout__cp=cp, layout__tp=tp, **pins)))
    return best.config.layout.ring, best.step.seconds


def test_keys_are_gathered_where_a_ring_between_nodes_is_slower() -> None:
    """A node has eight devices; gathering uses the network cards of all members in it."""
    long = dataclasses.replace(GPT, family="llama", seq_length=65536)
    asked = {kind: fastest(long, 16, 1, layout__ring=kind) for kind in ("zigzag", "gather")}
    assert [kind for kind, _ in asked.values()] == [*asked]
    assert asked["gather"][1] < asked["zigzag"][1]
    assert fastest(long, 16, 1) == asked["gather"]
    for cp, tp in ((8, 1), (2, 8)):  # within a node, and one member in each of two nodes
        found = fastest(long, cp, tp)
        assert found[0] == "zigzag"
        assert found[1] <= fastest(long, cp, tp, layout__ring="gather")[1]


def test_a_candidate_is_predicted_as_its_config_is() -> None:
    for candidate in itertools.islice(search(GPT, 8, 16, 80), 5):
        assert predict(candidate.config, H100).seconds == pytest.approx(candidate.step.seconds)
        assert candidate.memory.total <= 80 * GIB
        assert candidate.config.layout.num_devices == 8
        own = ConfigStep(candidate.config)
        assert own.description(H100).parallelism.dp == candidate.config.layout.dp


def test_what_does_not_fit_is_not_found() -> None:
    assert list(search(GPT, 1, 8, 1)) == []


def test_gradients_that_nothing_sums_have_16_bits() -> None:
    """The gradients would not fit next to the state in float32."""
    deep = dataclasses.replace(GPT, num_layers=32)
    found = next(iter(search(deep, 1, 1, 23.5, model__remat="full", layout__offload="none")))
    state = ConfigStep(found.config).state
    assert state["parameters"] + state["optimizer"] + state["gradients"] > 23.5 * GIB


def test_a_loss_of_several_layers_has_fewer_beside_it() -> None:
    """No division of the layers beats the one returned."""
    model = dataclasses.replace(LLAMA, num_layers=16, vocab_size=256_000)
    pins = {"layout__pp": 4, "layout__tp": 1, "layout__cp": 1, "layout__schedule": "1f1b"}
    found = next(iter(search(model, 4, 64, 80, **pins)))
    *others, last = found.config.layout.stage_layers or ()
    assert last < min(others)
    for sizes in itertools.product((3, 4, 5), repeat=3):
        each = (*sizes, 16 - sum(sizes))
        layout = dataclasses.replace(found.config.layout, stage_layers=each)
        other = predict(dataclasses.replace(found.config, layout=layout), H100)
        assert other.seconds >= found.step.seconds * (1 - 1e-9), each
