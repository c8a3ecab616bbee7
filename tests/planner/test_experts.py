"""Models with experts: terms, dispatchers' communication, rows, imbalance."""

import itertools
from pathlib import Path
from typing import Any

import pytest

import jaxptd
from jaxptd.costs.collective import ALL_TO_ALL
from jaxptd.costs.program import Parallelism
from jaxptd.errors import UserError
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.parts.moe import MoEShape
from jaxptd.planner.cost import StepDescription
from jaxptd.planner.programs import NEMO, published_collectives
from jaxptd.planner.rows import COLUMNS, Row, Shape, read_rows
from jaxptd.planner.steps.step import predict

H100 = find_accelerator("h100")
SHAPE = Shape(
    4, 1024, 8, 32000, 2048, 4, 4096, True, num_experts=16, top_k=4, moe_ffn_hidden_size=512
)
X = 2.0 * 2048 * 1024  # bytes of a micro-batch's activation


def description(shape: Shape = SHAPE, **parallelism: Any) -> StepDescription:
    sizes = {"gpus": 16, "global_batch": 16, "expert_tp": 1, "dispatch": "alltoall"} | parallelism
    return StepDescription(shape.architecture, Parallelism(**sizes), NEMO, Cluster(H100))


def experts_of(found: StepDescription) -> MoEShape:
    (part,) = (p for s in found.model.stacks for p in s.parts if isinstance(p, MoEShape))
    return part


# ---- matmuls -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "rows", "columns", "matrices"),
    [
        ({"ep": 4, "expert_tp": 0, "dispatch": "allgather"}, 2048, 1024, 4),
        ({"ep": 4, "tp": 2, "expert_tp": 0, "dispatch": "allgather"}, 2048, 512, 4),
        ({"experts_over": 8, "tp": 2}, 2048, 1024, 2),
        ({"experts_over": 8, "tp": 2, "imbalance": 1.5}, 3072, 1024, 2),
        ({}, 512, 1024, 16),
    ],
)
def test_a_device_multiplies_its_share_of_the_rows(
    split: dict[str, Any], rows: int, columns: int, matrices: int
) -> None:
    found = description(**split)
    work = found.work(found.model.stacks[0])
    _, up, down = experts_of(found).products(work)
    assert (up.T, up.K, up.N, up.matrices) == (rows, 1024, columns, matrices)
    assert (down.T, down.K, down.N, down.matrices) == (rows, columns // 2, 1024, matrices)


def test_the_matmuls_of_a_step_have_the_flops_of_the_model() -> None:
    config = jaxptd.load_config("qwen3-30b-a3b", ["--model.remat=none"])
    step = predict(config, Cluster(find_accelerator("h200")))
    experts = sum(t.flops for t in step.terms if t.name.startswith("experts"))
    again = sum(t.flops for t in step.terms if t.name == "experts in forward again")
    tokens, model = 256 * 4096 / 8, config.model
    weights = 3 * 8 * model.hidden_size * 768  # of the experts that process a token
    assert experts - again == pytest.approx(6 * tokens * 48 * weights)
    assert again == pytest.approx(2 * tokens * 48 * weights * 2 / 3)


def test_in_8_bits_all_but_the_gradients_of_matrices_are_faster() -> None:
    cluster = Cluster(find_accelerator("h200"))
    seconds = []
    for products in ("native", "fp8"):
        config = jaxptd.load_config("mixtral-8x7b", [f"--model.products={products}"])
        seconds.append({term.name: term.seconds for term in predict(config, cluster).terms})
    native, eight = seconds
    for name in ("experts in", "experts out"):
        for kind in ("forward", "dx"):
            assert 0.49 < eight[f"{name} {kind}"] / native[f"{name} {kind}"] < 0.55
        assert eight[f"{name} dw"] == native[f"{name} dw"]
    assert eight["experts in forward again"] == eight["experts in forward"]
    assert {n for n in native if n.startswith("router ") and eight[n] != native[n]} == set()


def test_backward_rounds_again_what_experts_repeat() -> None:
    """Of Mixtral 8x7B on 8 devices with an expert each, of which a token has 2."""
    words = ["--model.products=fp8", "--train.global_batch_size=8", "--train.micro_batches=1"]
    config = jaxptd.load_config("mixtral-8x7b", words)
    terms = predict(config, Cluster(find_accelerator("h200"))).terms
    moved = {term.name: term.bytes for term in terms}
    T, D, F, kv = config.model.seq_length, 4096, 14336, 1024
    attention = (T * D + D * (D + 2 * kv)) + (T * D + D * D)  # x and w of both matmuls
    experts = (2 * T * D + D * 2 * F) + (2 * T * F + F * D)
    results = T * (D + 2 * kv) + T * D + 2 * T * 2 * F + 2 * T * D
    found = [moved[f"8-bit copies {name}"] for name in ("forward", "backward")]
    each = 3 * config.model.num_layers  # two bytes read, one written
    assert found == [each * (attention + experts), each * (results + experts)]


def test_recomputing_a_layer_does_not_repeat_what_experts_repeat_anyway() -> None:
    cluster = Cluster(find_accelerator("h200"))
    flops = {}
    for remat in ("none", "dots", "full"):
        config = jaxptd.load_config("qwen3-30b-a3b", [f"--model.remat={remat}"])
        terms = predict(config, cluster).terms
        flops[remat] = sum(t.flops for t in terms if t.name.startswith("experts"))
    assert flops["none"] == flops["dots"] == flops["full"]


# ---- what dispatchers send -----------------------------------------------------------------------


def reached(experts: int, chosen: int, places: int) -> float:
    """Mean number of places that hold an expert of a token, over all choices."""
    choices = list(itertools.combinations(range(experts), chosen))
    inside = experts // places
    return sum(len({expert // inside for expert in each}) for each in choices) / len(choices)


@pytest.mark.parametrize(
    ("dispatch", "size"),
    [
        ("alltoall", X * 4 * 7 / 8),
        ("deepep", X * reached(16, 4, 8) * 7 / 8),
        ("hybridep", X * reached(16, 4, 8) * 7 / 8),
        ("allgather", X * 8),
    ],
)
def test_bytes_of_a_dispatch_in_a_node(dispatch: str, size: float) -> None:
    found = published_collectives(description(experts_over=8, dispatch=dispatch))
    sent = [each for each in found if each.axes == ("experts",)]
    assert [each.bytes for each in sent] == pytest.approx([size] * 4)
    assert [each.place for each in sent] == ["forward", "backward"] * 2
    if dispatch != "allgather":
        assert {each.kind for each in sent} == {ALL_TO_ALL}


def test_between_nodes_a_token_is_sent_once_to_each_node() -> None:
    found = published_collectives(description(experts_over=16, dispatch="deepep"))
    sent = next(each for each in found if each.axes == ("experts",))
    assert sent.bytes == pytest.approx(X * reached(16, 4, 2) / 2)
    plain = published_collectives(description(experts_over=16))
    assert next(e for e in plain if e.axes == ("experts",)).bytes == pytest.approx(X * 4 / 2)


def test_tp_sums_attention_only_where_experts_are_whole() -> None:
    sums = {
        slices: sum(
            each.count
            for each in published_collectives(
                description(tp=2, experts_over=8 // slices, expert_tp=slices)
            )
            if each.axes == ("tp",) and each.place == "forward"
        )
        for slices in (1, 2)
    }
    assert sums == {1: 1, 2: 2}


def test_gradients_of_experts_are_summed_over_their_copies() -> None:
    found = published_collectives(description(experts_over=8, zero=1))
    bytes_of = {each.name: each.bytes for each in found if each.place == "step"}
    layer = 16 * 3 * 1024 * 512
    assert bytes_of["gradients of experts"] == pytest.approx(2 * 4 * layer / 8)
    both = description(experts_over=8, zero=1)
    others = both.stage_parameters - 4 * layer / 8
    assert bytes_of["gradients"] == pytest.approx(2 * others)
    assert both.parallelism.group(("expert copies",)).members == 2


# ---- rows ----------------------------------------------------------------------------------------

GOOD = {
    "name": "mine", "program": "nemo", "hardware": "h100", "num_layers": "4",
    "hidden_size": "1024", "num_heads": "8", "num_kv_heads": "4", "ffn_hidden_size": "4096",
    "gated": "true", "vocab_size": "32000", "seq_length": "2048", "gpus": "16",
    "global_batch": "16", "micro_batch": "1", "tp": "2", "pp": "1", "virtual_stages": "1",
    "cp": "1", "zero": "1", "zero_group": "0", "sequence_parallel": "true", "remat": "none",
    "seconds": "1", "num_experts": "16", "top_k": "4", "moe_ffn_hidden_size": "512",
    "shared_ffn_hidden_size": "", "dense_layers": "1", "ep": "16", "dispatch": "deepep",
}  # fmt: skip


def row(folder: Path, **changes: str) -> Row:
    cells = GOOD | changes
    path = folder / "mine.csv"
    path.write_text(f"{','.join(cells)}\n{','.join(cells.values())}\n")
    return read_rows(path)[0]


def test_a_row_with_experts(tmp_path: Path) -> None:
    found = row(tmp_path)
    assert [(s.name, s.layers) for s in found.shape.architecture.stacks] == [
        ("blocks", 1),
        ("sparse", 3),
    ]
    assert found.parallelism.expert_devices == 16
    assert found.parallelism.expert_slices == 1
    assert found.parallelism.dp == 8
    assert found.predict(H100).seconds > 0
    assert set(GOOD) - set(COLUMNS) > {"ep", "dispatch", "top_k"}
    wider = row(tmp_path, head_size="256").shape.architecture.stacks[0].parts[0]
    assert wider.weights == 2 * row(tmp_path).shape.architecture.stacks[0].parts[0].weights


def test_a_dense_row_may_leave_the_columns_empty(tmp_path: Path) -> None:
    empty = dict.fromkeys(
        ("num_experts", "top_k", "moe_ffn_hidden_size", "dense_layers", "ep", "dispatch"), ""
    )
    assert [s.name for s in row(tmp_path, **empty).shape.architecture.stacks] == ["blocks"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": ""}, "row 1: top_k without num_experts; correct the row"),
        ({"top_k": "17"}, "row 1: top_k=17 with num_experts=16"),
        ({"ep": "3"}, "row 1: num_experts=16 does not split over ep=3"),
        ({"ep": "8", "expert_tp": "4"}, "row 1: ep=8 and expert_tp=4 do not divide the 16"),
        ({"dense_layers": "4"}, "row 1: dense_layers=4 leave no layer with experts"),
        ({"dispatch": "flex"}, "dispatch=flex; use one of allgather, alltoall, deepep, hybridep"),
        ({"remat": "minimal_flashy"}, "row 1: remat=minimal_flashy; use one of"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        row(tmp_path, **({"expert_tp": ""} | change))


# ---- plans ---------------------------------------------------------------------------------------

PINS = {"layout.ep": 8}


def test_a_plan_says_what_imbalance_costs() -> None:
    config = jaxptd.load_config("qwen3-30b-a3b")
    made = jaxptd.plan(config, gpus=8, gpu="h200", top=1, pins=PINS, imbalance=[1, 1.2, 2])
    (best,) = made.best
    seconds = [best.seconds, *made.unbalanced(best).values()]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2]
    assert "s/step at 1.2" in repr(made)
    assert "model.moe.chunk=1.25" in repr(made)
    alike = jaxptd.plan(config, gpus=8, gpu="h200", top=1, pins=PINS, imbalance=[2])
    assert alike.best[0].seconds == pytest.approx(seconds[2])


def test_imbalance_that_cannot_be_is_refused() -> None:
    dense = jaxptd.load_config("llama3-8b")
    with pytest.raises(UserError, match="imbalance: the model has no experts, so it has no effect"):
        jaxptd.plan(dense, gpus=8, gpu="h200", imbalance=[1.5])
    with pytest.raises(UserError, match=r"imbalance=0.5: use 1 \(balanced\) to 128"):
        jaxptd.plan(jaxptd.load_config("qwen3-30b-a3b"), gpus=8, gpu="h200", imbalance=[0.5])


@pytest.mark.slow  # `test_best.py` compares the search over ep with an exhaustive one
def test_ep_is_searched_and_more_gpus_hold_more_experts() -> None:
    made = jaxptd.plan(jaxptd.load_config("qwen3-30b-a3b"), gpus=8, gpu="h200", top=12)
    assert {each.config.layout.ep for each in made.best} >= {1, 2}
