"""Figures show the right numbers, in colors legible on light and dark pages."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxptd import Layout, UserError, make_schedule, plot
from jaxptd.analysis.hlo.kernels import PRODUCT
from jaxptd.analysis.memory_report import MemoryReport
from jaxptd.analysis.profiling import ProfileReport
from jaxptd.analysis.traffic.step import CommsReport
from jaxptd.costs.collective import ALL_GATHER, ALL_REDUCE, Collective

PAGES = ("#ffffff", "#131416")  # the documentation's light and dark background
LAYOUT = Layout(pp=2, dp=2, cp=2, tp=4)
NAN = float("nan")
METRICS = {"step": [1, 2, 3], "loss": [5.0, 4.0, 3.5], "validation_loss": [NAN, NAN, 3.7]}
LOADS = {"step": [10, 20, 30], "expert_load/1": [3.0, NAN, 1.5], "expert_load/3": [2.0, 1.2, 1.0]}
MOVED = [
    Collective(ALL_REDUCE, ("tp",), 8, 4_000_000),
    Collective(ALL_GATHER, ("tp",), 8, 4_000_000),
    Collective(ALL_REDUCE, ("dp", "cp"), 1, 1_000_000),
]
MEMORY = [
    {"part": "parameters", "published": 100, "formula": 120},
    {"part": "  a tensor", "formula": 7},
    {"part": "a layer, remat none", "formula": 7},
    {"part": "all layers: 2 layers", "formula": 30, "counted": 30},
    {"part": "temporary: all else", "compiled": 200, "model": 190},
]
REPORTS = {
    "mesh": LAYOUT,
    "schedule": make_schedule("zb-v", stages=2, micro_batches=4),
    "loss": METRICS,
    "expert_load": LOADS,
    "memory": MemoryReport(LAYOUT, "", MEMORY),
    "bytes_by_axis": CommsReport(LAYOUT, "", MOVED, [], [], []),
    "step_time": ProfileReport("a step", {("mlp", PRODUCT): 0.002}),
}


def brightness(color: str) -> float:
    """Relative luminance, as the Web Content Accessibility Guidelines define it."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((brightness(one), brightness(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("page", PAGES)
def test_colors_are_legible_on_light_and_dark_pages(page: str) -> None:
    assert contrast(plot.INK, page) >= 4
    operations = (plot.FORWARD, plot.BACKWARD, plot.WEIGHTS)
    assert min(contrast(color, page) for color in (*plot.COLORS, *operations)) >= 3
    assert min(contrast(color, plot.DARK) for color in (*operations, *plot.FILLS)) >= 4.5


def bars(figure: Figure) -> dict[str, list[float]]:
    """Widths of bars by name of the piece."""
    found = figure.axes[0].containers
    return {each.get_label(): [bar.get_width() for bar in each] for each in found}


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.axes[0].texts}


@pytest.mark.parametrize("name", REPORTS)
def test_a_figure_is_shown_in_a_notebook_and_saved_with_the_same_bytes(name, tmp_path) -> None:
    figure = getattr(plot, name)(REPORTS[name])
    assert isinstance(figure, Figure)
    root = ElementTree.fromstring(figure._repr_svg_())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in files:
        plot.save(getattr(plot, name)(REPORTS[name]), path)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_mesh_has_every_device(monkeypatch) -> None:
    figure = plot.mesh(LAYOUT)
    assert texts(figure) == {str(rank) for rank in range(32)}
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["dp 0 cp 0", "dp 0 cp 1", "dp 1 cp 0", "dp 1 cp 1"]
    (axes,) = plot.mesh(Layout(dp=2, ep=2, tp=2)).axes
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["dp 0 ep 0", "dp 0 ep 1", "dp 1 ep 0", "dp 1 ep 1"]
    (shared,) = plot.mesh(Layout(cp=2, ulysses=2)).axes
    rows = [label.get_text() for label in shared.get_yticklabels()]
    assert rows == [f"dp 0 cp {i} ulysses {j}" for i in (0, 1) for j in (0, 1)]
    colors = {each.get_facecolor() for each in axes.patches if each.get_fill()}
    assert len(colors) == 4  # one for each replica
    (nodes,) = plot.mesh(Layout(tp=8), node=4).axes
    alphas = [each.get_alpha() for each in nodes.patches if each.get_fill()]
    assert alphas[:4] == [1.0] * 4 and alphas[4:] == [alphas[4]] * 4 and alphas[4] < 1
    monkeypatch.setattr("jaxptd.plot.figures.NUMBERED", 3)
    assert texts(plot.mesh(Layout(dp=4))) == {"0", "1", "2"}
    with pytest.raises(UserError, match="has 8192 devices; draw 4096 or fewer"):
        plot.mesh(Layout(dp=8192))


def test_a_loss_is_a_line_and_its_validation_points() -> None:
    training, validation = plot.loss(METRICS).axes[0].lines
    assert training.get_ydata().tolist() == METRICS["loss"]
    assert (validation.get_xdata().tolist(), validation.get_ydata().tolist()) == ([3], [3.7])
    law = plot.loss({**METRICS, "validation_loss/law": [NAN, 4.5, 4.4]}).axes[0].lines[2]
    assert (law.get_label(), law.get_ydata().tolist()) == ("validation law", [4.5, 4.4])
    several = plot.loss({"a": METRICS, "b": METRICS}).axes[0].lines
    assert [line.get_label() for line in several][::2] == ["a, training", "b, training"]
    for nothing in ({}, {"step": [], "loss": []}, {"a": {}}):
        with pytest.raises(UserError, match="no loss was logged"):
            plot.loss(nothing)


def test_loads_of_experts_have_a_row_for_each_layer_and_a_color_for_each_step() -> None:
    axes = plot.expert_load(LOADS).axes[0]
    (drawn,) = axes.collections
    found = drawn.get_array().filled(np.nan)
    np.testing.assert_array_equal(found[[1, 3]], [LOADS["expert_load/1"], LOADS["expert_load/3"]])
    assert np.isnan(found[[0, 2]]).all()  # layers without experts
    assert drawn.get_coordinates()[0, :, 0].tolist() == [0, 10, 20, 30]
    assert axes.yaxis_inverted()
    assert drawn.get_clim() == (1, 3)
    once = plot.expert_load({"step": [7], "expert_load/0": [1.0]}).axes[0].collections[0]
    assert once.get_coordinates()[0, :, 0].tolist() == [0, 7]
    for nothing in (METRICS, {"step": [], "expert_load/0": []}):
        with pytest.raises(UserError, match="a run of a model with experts"):
            plot.expert_load(nothing)


def test_memory_is_a_bar_of_parts_for_each_way_to_count() -> None:
    figure = plot.memory(REPORTS["memory"])
    assert bars(figure) == {
        "parameters": [100, 120, 0, 0],
        "all layers": [0, 30, 0, 0],
        "temporary": [0, 0, 200, 190],
    }
    assert figure.axes[0].get_xlabel() == "bytes of one device"
    formulas = plot.memory(MemoryReport(LAYOUT, "", MEMORY[:4]))
    assert bars(formulas) == {"parameters": [100, 120], "all layers": [0, 30]}


def test_bytes_are_those_that_each_device_sends() -> None:
    figure = plot.bytes_by_axis(REPORTS["bytes_by_axis"])
    assert bars(figure) == {ALL_REDUCE: [6, 1.5], ALL_GATHER: [3, 0]}
    assert figure.axes[0].get_xlabel() == "MB that each device sends per step"
    with pytest.raises(UserError, match="moves nothing; choose another layout"):
        plot.bytes_by_axis(CommsReport(Layout(), "", [], [], [], []))


def test_a_file_has_a_suffix_that_is_known_and_a_folder(tmp_path) -> None:
    figure = plot.loss(METRICS)
    plot.save(figure, tmp_path / "loss.PNG")
    assert (tmp_path / "loss.PNG").read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(UserError, match="use a name that ends in .png or .svg"):
        plot.save(figure, tmp_path / "loss.pdf")
    with pytest.raises(UserError, match=r"cannot write .*; name a file in a folder that exists"):
        plot.save(figure, tmp_path / "no" / "loss.svg")


@pytest.mark.parametrize("name", REPORTS)
def test_without_matplotlib_the_line_names_the_extra(name, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in [each for each in sys.modules if each.startswith("jaxptd.")]:
        if "plot." in module or module.endswith("picture"):
            monkeypatch.delitem(sys.modules, module)
    with pytest.raises(
        UserError, match=r"a picture needs matplotlib; .*pip install -e '\.\[viz\]'"
    ):
        getattr(plot, name)(REPORTS[name])
