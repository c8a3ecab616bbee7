"""What a step does with parameters, in words: a row per group, a reason per word."""

from typing import Any

import pytest
import tiny

from jaxptd import UserError
from jaxptd.analysis import memory_model
from jaxptd.analysis.param_plans import COLUMNS, Group, explain
from jaxptd.layout import Layout
from jaxptd.models.stages import parameter_infos
from jaxptd.zero.plan import StateShapes

CASES: list[Any] = [
    (Layout(), {"micro_batches": 1}, ("device", "never", "end", "after")),
    (Layout(dp=2), {}, ("device", "never", "end", "in loop")),
    (Layout(dp=2, zero=1), {}, ("device", "first micro-batch", "last micro-batch", "after")),
    (Layout(dp=2, zero=2), {}, ("device", "first micro-batch", "each layer", "in loop")),
    (Layout(dp=2, zero=3), {}, ("device", "each layer", "each layer", "in loop")),
    (Layout(offload="optimizer"), {}, ("host", "step", "end", "in loop")),
    (Layout(offload="parameters"), {}, ("host", "each layer", "end", "in loop")),
    (Layout(pp=2, dp=2, zero=2), {}, ("device", "step", "each layer", "in tick")),
    (Layout(dp=2, zero=2), {"scan_layers": False}, ("device", "step", "each layer", "after")),
]


def layer_matrices(layout: Layout, **choice: Any) -> Group:
    found = explain(tiny.config(layout, **choice)).groups
    return next(group for group in found if group.name == "layer matrices")


@pytest.mark.parametrize(("layout", "choice", "want"), CASES, ids=str)
def test_a_row_says_what_becomes_of_the_layers_matrices(layout, choice, want) -> None:
    words = layer_matrices(layout, **choice).words
    assert tuple(words) == COLUMNS
    assert tuple(words.values())[:-1] == want


@pytest.mark.parametrize(
    ("layout", "choice", "column", "reason"),
    [
        (Layout(dp=2, zero=3), {}, "gathered", "layout.zero=3"),
        (Layout(dp=2, zero=1), {"micro_batches": 1}, "reduced", "with one micro-batch"),
        (Layout(dp=2, zero=1), {"micro_batches": 4}, "reduced", "once for 4 micro-batches"),
        (Layout(offload="parameters"), {}, "where", "layout.offload=parameters"),
        (Layout(offload="parameters"), {}, "gathered", "copied when the layer runs"),
        (Layout(dp=2), {"scan_layers": False}, "added", "model.scan_layers=false"),
        (Layout(dp=2), {"remat": "full", "remat_layers": 1}, "added", "model.remat_layers"),
        (Layout(), {"micro_batches": 1}, "reduced", "no other device"),
    ],
    ids=str,
)
def test_a_reason_names_the_setting(layout, choice, column, reason) -> None:
    assert reason in layer_matrices(layout, **choice).reasons[column]


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        (Layout(dp=2, zero=3), {}),
        (Layout(pp=2, dp=2, tp=2, zero=1), {}),
        (Layout(row=2, col=2), {"dtype": "bfloat16"}),
        (Layout(dp=2, zero=1), tiny.T5),
        (Layout(tp=2), {"dtype": "bfloat16", "tie_embeddings": False}),
    ],
    ids=str,
)
def test_groups_have_all_parameters_once_and_their_bytes(layout: Layout, choice: dict) -> None:
    config = tiny.config(layout, **choice)
    infos, groups = parameter_infos(config), explain(config).groups
    assert sorted(name for each in groups for name in each.names) == sorted(infos)
    state = memory_model.state(config, StateShapes.of(config, infos))
    assert sum(each.bytes for each in groups) == state["parameters"]
    assert all(each.bytes == 4 * each.elements for each in groups)
    assert len({each.name for each in groups}) == len(groups)


def test_groups_of_a_model_of_images() -> None:
    found = explain(tiny.config(Layout(dp=2, zero=2), family="swin-unet", dtype="bfloat16"))
    assert {"layer matrices", "layer vectors"} <= {each.name for each in found.groups}
    assert sum(each.elements for each in found.groups) > 1000


def test_the_table_and_its_reasons_name_every_group() -> None:
    found = explain(tiny.config(Layout(dp=2, zero=3), dtype="bfloat16"))
    text = repr(found)
    assert [line.split("  ")[0] for line in text.splitlines()[2:6]] == [
        each.name for each in found.groups
    ]
    assert "gathered each layer (layer vectors, layer matrices): layout.zero=3" in text
    assert "each layer, bfloat16" in text  # what is communicated
    assert "<table>" in found._repr_html_()


def test_json_has_the_record_and_the_reasons() -> None:
    found = explain(tiny.config(Layout(dp=2, zero=3))).as_dict()
    assert found["layout"] == "dp=2 zero=3"
    group = next(each for each in found["groups"] if each["group"] == "layer matrices")
    assert group["plan"]["gather"] == "layer"
    assert group["why"]["gathered"].startswith("layout.zero=3")
    assert "blocks.mlp.up.w" in group["names"]


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="layout.pp"):
        explain(tiny.config(Layout(pp=4), num_layers=2))
