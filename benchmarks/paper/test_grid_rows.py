"""Table 2 and figures 7 and 11 of the 2D paper: layouts, columns, and what the pages conclude."""

import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from benchmarks.lib.compiler import UNTRIED
from benchmarks.paper import __main__ as paper
from benchmarks.paper import grid_pages, grid_rows, grid_times, published
from benchmarks.paper.grid_rows import (
    FIGURE_7,
    FIGURE_11,
    MODELS,
    REMATS,
    TABLE_2,
    Found,
    Row,
    compiled_memory,
    gpu,
)
from benchmarks.paper.memory import Memory
from jaxptd.mesh import Layout

GIB = 2**30
BYTES = 12  # of a parameter with its optimizer state


def counted(rows: Sequence[Row], more: int = 4 * GIB) -> list[Found]:
    """Rows whose peak is their share of the state, and 1, 2 and 3 times `more`."""
    found = []
    for row in rows:
        state = BYTES * row.parameters * row.layout.dp // row.gpus
        peaks = enumerate(REMATS, start=1)
        found.append(
            Found(row, {remat: Memory(state + n * more, state, 1.0) for n, remat in peaks})
        )
    return found


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_rows, "compiled", counted)
    monkeypatch.setattr(grid_pages, "PLUGINS", "flax")
    monkeypatch.setattr(grid_times, "GRIDS", {4: (2, 2), 32: (4, 8)})


def test_rows_are_those_that_are_published() -> None:
    in_table = {row for where, row, _ in published.numbers() if where == "table 2"}
    assert {row.name for row in TABLE_2} == in_table
    batches = [row.config().train.global_batch_size for row in TABLE_2]
    assert batches == [32, 32, 32, 32, 64, 64]
    efficiencies = [published.weak_scaling(row.gpus, row.name) for row in FIGURE_7]
    assert efficiencies == [None, 0.76, 0.83, 0.86, 0.64, 0.74, 0.79]
    shares = [published.communication(row.name) for row in FIGURE_11]
    assert shares == pytest.approx([0.093, 0.124])


@pytest.mark.parametrize("row", [*TABLE_2, *FIGURE_7], ids=lambda row: f"{row.name} {row.gpus}")
def test_the_paper_names_the_sizes_of_the_layout(row: Row) -> None:
    layout, named = row.layout, row.name
    sizes = {"TP2D": layout.row * layout.col, "TP": layout.tp, "DP": layout.dp}
    for part in named.split(", ") if "=" in named else ():
        name, size = part.split("=")
        assert sizes.pop(name) == int(size)
    if "=" in named:
        assert set(sizes.values()) == {1}
    assert row.config("none").model.remat == "none"
    assert row.config().model.hidden_size % row.config().model.num_heads == 0


def test_models_have_the_parameters_of_their_sizes() -> None:
    found = {row.model: row.parameters / 1e9 for row in (*TABLE_2, *FIGURE_7)}
    assert {name: round(size, 2) for name, size in found.items()} == {
        "gpt2-2.5b": 2.49,
        "gpt2-0.54b": 0.69,
        "gpt2-4.2b": 4.20,
    }
    assert set(found) == set(MODELS)


def test_the_page_of_table_2(tmp_path: Path) -> None:
    assert paper.main(["--table", "2", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_table2.md").read_text(encoding="utf-8")
    line = "| DP=4 | 4 | 32 | 30 | cannot be trained | cannot be trained | 31.80 | 35.80 | 39.80 |"
    last = "no room | no room | cannot be trained |"
    assert f"{line} 27.80 | nothing | {last}" in text
    assert "(`none`) | 1.00 | 1.00 |" in text  # TP=4 over itself
    assert "| TP=8 | 8 | 64 | 24 | 22.2 | 91 | 7.48 |" in text
    words = " ".join(text.split())
    assert "DP=4 has no room with any policy: parameters and optimizer alone are 27.8 GiB" in words
    assert "These are the rows that the paper could not train." in words
    assert "From TP=4 to TP2D=4 memory changes by -8%, published, and compiled by +0%" in words


def test_other_rows_without_room_are_said_to_be_others() -> None:
    text = grid_pages.table2(counted(TABLE_2, more=12 * GIB))
    assert "TP=2, DP=2 has no room with any policy." in " ".join(text.split())
    assert "These are not the rows that the paper could not train." in " ".join(text.split())


@pytest.mark.slow
def test_the_page_of_figure_7(tmp_path: Path) -> None:
    assert paper.main(["--figure", "7", "--out", str(tmp_path)]) == 0
    text = " ".join((tmp_path / "paper_figure7.md").read_text(encoding="utf-8").split())
    assert "| one GPU | `one device` | 1 | 0.54 B | 0.69 | the base |" in text
    assert "| TP2D | `dp=2 row=2 col=2 zigzag gather heads` | 8 | 4.20 B | 4.20 | 79% |" in text
    assert "that is 90% on 4 GPUs and 75% on 8 GPUs, the same for every layout" in text


@pytest.mark.slow
def test_the_page_of_figure_11(tmp_path: Path) -> None:
    assert paper.main(["--figure", "11", "--out", str(tmp_path)]) == 0
    text = " ".join((tmp_path / "paper_figure11.md").read_text(encoding="utf-8").split())
    assert "| TP2D | `row=2 col=2 zigzag gather heads` | 4 | 12.4% |" in text
    assert "would be 1.10 times as fast: the published speedup of 1.84 cannot come from" in text
    assert "| 32 | NVLink | more than heads |" in text


def test_predicted_figures_follow_from_the_steps() -> None:
    found = counted(FIGURE_11, more=0)
    tp = found[0]
    remat, step = grid_times.fastest(tp) or pytest.fail("no room")
    steps = {policy: grid_times.step_of(tp.row, policy).seconds for policy in REMATS}
    assert steps[remat] == step.seconds == min(steps.values())
    assert grid_times.throughput(tp) == pytest.approx(8 * 4 / step.seconds)
    cells = [column.cell(tp) for column in grid_times.columns_of_figure_11()]
    assert cells[0] == f"{step.exposed:.1%}"
    assert cells[2] == "132"  # 9.3 % of 118 h over 300 iterations
    words = grid_times.speedup_words(found)
    assert "and 1.10 by the published share" in words


@pytest.mark.slow
def test_a_grid_beats_one_way_on_16_devices_and_not_on_4() -> None:
    for links in grid_times.LINKS:
        for gpus, side in ((4, 2), (16, 4)):
            h100 = grid_times.linked(links)
            tp = grid_times.best_of(grid_times.one_way(gpus), h100)
            grid = grid_times.best_of([Layout(row=side, col=side)], h100)
            assert (grid.seconds < tp.seconds) == (gpus == 16)
    assert grid_times.one_way(32) == []


def test_the_gpu_is_the_papers() -> None:
    assert gpu().hbm_bytes == pytest.approx(24 * GIB, rel=1e-3)


@pytest.fixture
def compiler() -> Iterator[None]:
    """Skips a test where steps cannot be compiled for GPUs, and keeps none: JAX reads none back."""
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
