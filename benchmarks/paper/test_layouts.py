"""Tables 2 to 5 and figures 7 and 11 of the 2D paper: its layouts, and what follows from them."""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.grid.gpu import Compiled
from benchmarks.lib.compiler import UNTRIED, Memory, compiled_memory
from benchmarks.paper import layouts
from benchmarks.paper.layouts import FIGURE_7, FIGURE_11, REMATS, TABLE_2, Found, Row, Step, gpu
from benchmarks.paper.published import MODELS, communication, iteration, numbers, parameters, sizes
from jaxptd.analysis.hlo.timeline import Move, Work
from jaxptd.commands.command_line import load_config
from jaxptd.costs.collective import ALL_REDUCE
from jaxptd.mesh import Layout

GIB = 2**30
BYTES = 12  # of a parameter with its optimizer state


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "PACKAGES", ())


def counted(rows: Sequence[Row], more: int = 4 * GIB) -> list[Found]:
    """Rows whose peak is their share of the state plus 1, 2 and 3 times `more`."""
    found = []
    for row in rows:
        state = BYTES * row.parameters * row.layout.dp // row.gpus
        peaks = enumerate(REMATS, start=1)
        memory = {remat: Memory(state + n * more, state, 1.0) for n, remat in peaks}
        found.append(Found(row, memory))
    return found


def test_published_numbers_agree_with_each_other_and_with_the_rows() -> None:
    for model in MODELS:
        hours = [numbers()["table 4", model.name, f"time {each}"] for each in ("TP", "TP2D")]
        speedup = numbers()["table 4", model.name, "speedup"]
        assert hours[0] / hours[1] == pytest.approx(speedup, abs=0.005)
    assert iteration("GPT", "TP") == 1416
    assert {row.name for row in TABLE_2} == {row for at, row, _ in numbers() if at == "table 2"}
    assert [row.config().train.global_batch_size for row in TABLE_2] == [32, 32, 32, 32, 64, 64]
    for row in FIGURE_7[1:]:
        assert ("figure 7", f"{row.gpus} GPUs", row.name) in numbers()
    shares = [communication(row.name) for row in FIGURE_11]
    assert shares == pytest.approx([0.093, 0.124])
    swin = {row for where, row, _ in numbers() if where == "table 5"}
    assert swin == {*layouts.SWIN_LAYOUTS}


@pytest.mark.parametrize("row", [*TABLE_2, *FIGURE_7], ids=lambda row: f"{row.name} {row.gpus}")
def test_the_paper_names_the_sizes_of_the_layout(row: Row) -> None:
    named = {"TP2D": row.layout.row * row.layout.col, "TP": row.layout.tp, "DP": row.layout.dp}
    for part in row.name.split(", ") if "=" in row.name else ():
        name, size = part.split("=")
        assert named.pop(name) == int(size)
    assert "=" not in row.name or set(named.values()) == {1}
    assert row.config("none").model.remat == "none"
    assert row.config().model.hidden_size % row.config().model.num_heads == 0


def test_table_3_has_the_published_sizes_and_table_5_its_network() -> None:
    found = {row[0]: row[5] for row in sizes()}
    assert found == {"0.54": "0.69", "1.20": "1.44", "2.50": "2.49", "4.20": "4.20"}
    for name, layout in layouts.SWIN_LAYOUTS.items():
        config = layouts.swin_config(name)
        assert (config.layout, config.model.dtype, config.model.remat) == (
            layout,
            "float32",
            "dots",
        )
    assert parameters(layouts.SWIN) == pytest.approx(27.2e6, rel=2e-3)


def test_rows_of_table_2_have_room_or_have_not() -> None:
    text, (data, both, *_) = layouts.table_2(counted(TABLE_2)), counted(TABLE_2)
    assert (data.fitting, both.fitting) == ([], ["full", "dots"])  # 13.9 GiB, and 4, 8 or 12
    line = "| DP=4 | 4 | 32 | 30 | cannot be trained | cannot be trained | 31.80 | 35.80 | 39.80 |"
    assert f"{line} 27.80 | nothing | does not fit | does not fit | cannot be trained |" in text
    assert "(`none`) | 1.00 | 1.00 |" in text  # TP=4 over itself
    assert "| TP=8 | 8 | 64 | 24 | 22.2 | 91 | 7.48 |" in text


def test_figures_follow_from_the_predicted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "where_grids_pay", lambda: [["a"]])
    found = counted(FIGURE_11, more=0)
    remat, step = found[0].fastest or pytest.fail("no step fits")
    steps = {policy: layouts.step_of(found[0].row, policy).seconds for policy in REMATS}
    assert steps[remat] == step.seconds == min(steps.values())
    assert found[0].throughput == pytest.approx(8 * 4 / step.seconds)
    text = layouts.figure_11(found)
    sent = f"{step.exposed:.1%} | {step.exposed * step.seconds:.2f}"
    assert f"| {sent} | 132 |" in text  # 9.3 % of 118 h over 300 iterations
    text = layouts.figure_7(counted(FIGURE_7[:2], more=0))
    assert "| one GPU | `one device` | 1 | 0.54 B | 0.69 | the base |" in text


@pytest.mark.slow
def test_a_grid_beats_one_way_on_16_devices_and_not_on_4() -> None:
    for links in layouts.JOINED_BY:
        for gpus, side in ((4, 2), (16, 4)):
            h100 = layouts.linked(links)
            tp = layouts.best_of(layouts.one_way(gpus), h100)
            grid = layouts.best_of([Layout(row=side, col=side)], h100)
            assert (grid.seconds < tp.seconds) == (gpus == 16)
    assert layouts.one_way(32) == []


# ---- table 4 ----------------------------------------------------------------------------------


def compiled_step(layout: Layout, *, size: int, alone: int, others: float) -> Step:
    """A step that sends `size` bytes in four all-reduces, of which `alone` overlap with nothing."""
    config = layouts.laid_out(load_config("gpt2-2.5b"), layout)
    axes = ("tp",) if layout.tp > 1 else ("row", "col")
    works = [Work()] * alone + [Work(products=1)] * (4 - alone)
    found = [
        Move(f"m{i}", "forward", size * 2 // 12, 1, work, ALL_REDUCE, axes)
        for i, work in enumerate(works)
    ]
    compiled = Compiled(config, "", 3 * GIB, GIB, GIB, found, int(others))
    return Step("GPT", compiled, int(989.5e12 / 10))


def test_a_step_takes_what_its_kernels_and_its_messages_without_work_take() -> None:
    tp = compiled_step(Layout(tp=4), size=90 * 10**9, alone=2, others=4.3e11)
    grid = compiled_step(Layout(row=2, col=2), size=180 * 10**9, alone=1, others=2.15e11)
    assert tp.computing == pytest.approx(0.2)
    assert tp.seconds == pytest.approx(0.2 + 45 / 450)
    assert grid.seconds == pytest.approx(0.15 + 45 / 450)
    assert grid.unhidden == pytest.approx(0.15 + 0.4)
    assert grid.any_links(tp) == pytest.approx([0.5, 0.2 / 0.15])
    cells = dict(zip(layouts.HEAD, grid.row(tp), strict=True))
    assert (cells["overlapped"], cells["TP=4 over it"]) == ("75%", "1.20")
    assert (cells["all sent, ms"], cells["predicted, ms"]) == ("400.0", "250.0")
    line = ["GPT", "118", "64", "1.84", "1.00", "1.20 (`gather`)", "0.73", "0.50 to 1.33"]
    assert layouts.summary([tp, tp, grid]) == line


def test_every_model_is_laid_out_on_four_devices_with_every_algorithm() -> None:
    for model in MODELS:
        found = list(layouts.layouts(load_config(model.config)))
        assert [layout.num_devices for layout in found] == [4] * 6 and found[0] == Layout(tp=4)
        assert {each.matmul2d for each in found[2:]} == {"gather", "summa", "fox", "cannon"}


# ---- compiled ---------------------------------------------------------------------------------


@pytest.fixture
def compiler() -> Iterator[None]:
    """Skips tests where steps cannot be compiled for GPUs; caches none, as JAX cannot read them."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA compiler here: pip install -e '.[h200]'")
    for keeps in (False, True):
        jax.config.update("jax_enable_compilation_cache", keeps)
        compilation_cache.reset_cache()
        if not keeps:
            yield


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_the_row_without_memory_has_no_room_and_a_grid_has() -> None:
    data, grid = (row for row in TABLE_2 if row.name in ("DP=4", "TP2D=4"))
    assert not compiled_memory(data.config("full")).fits(gpu().hbm_bytes)
    assert compiled_memory(grid.config("full")).fits(gpu().hbm_bytes)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("row", [TABLE_2[0], TABLE_2[3]], ids=lambda row: row.name)
def test_options_that_compile_in_less_time_change_no_memory(row: Row) -> None:
    quick, other = (compiled_memory(row.config("dots"), each) for each in (UNTRIED, {}))
    assert dataclasses.replace(quick, seconds=other.seconds) == other
