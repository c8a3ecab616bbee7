"""A schedule as text, picture and trace; either all files are written or none."""

import dataclasses
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from turns import by_turns, slow

from jaxptd.errors import UserError
from jaxptd.pipeline import picture
from jaxptd.pipeline.picture import as_text, as_trace, draw, render, write
from jaxptd.pipeline.schedules import SCHEDULES, make_schedule
from jaxptd.pipeline.statistics import Durations, peak, simulate
from jaxptd.pipeline.table import cell_text
from jaxptd.plot.style import PAGE

SMALL = make_schedule("1f1b", stages=3, micro_batches=2)
V = make_schedule("zb-v", stages=4, micro_batches=12)

# --- Text


def test_the_text_of_a_small_schedule():
    assert as_text(SMALL).plain.splitlines() == [
        "tick    0  1  2  3  4  5  6  7",
        "stage 0 F0 .  F1 .  .  B0 .  B1",
        "stage 1 .  F0 .  F1 B0 .  B1 .",
        "stage 2 .  .  F0 B0 F1 B1 .  .",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_wide_table_is_folded_into_blocks_without_loss(name, width):
    schedule = make_schedule(name, stages=4, micro_batches=6)
    blocks = as_text(schedule, width=width).plain.split("\n\n")
    lines = [block.splitlines() for block in blocks]
    assert max(len(line) for block in lines for line in block) <= width
    whole = as_text(schedule, width=10**6).plain
    assert (len(blocks) > 1) == (max(map(len, whole.splitlines())) + 1 > width)
    ticks = [int(tick) for block in lines for tick in block[0].split()[1:]]
    assert ticks == list(range(schedule.ticks))
    for stage in range(4):
        shown = [cell for block in lines for cell in block[1 + stage].split()[2:]]
        column = schedule.table[:, stage].tolist()
        assert shown == [cell_text(schedule, cell) or "." for cell in column]
        assert all(block[1 + stage].startswith(f"stage {stage} ") for block in lines)


def test_too_many_ticks_are_left_out_and_counted_in_the_last_line():
    schedule = make_schedule("gpipe", stages=2, micro_batches=400)
    *blocks, last = as_text(schedule, width=80).plain.split("\n\n")
    shown = sum(len(block.splitlines()[0].split()) - 1 for block in blocks)
    assert len(blocks) == picture.FOLDS
    assert last.startswith(f"and {schedule.ticks - shown} more ticks, not shown;")


@pytest.mark.parametrize("width", [1, 20])
def test_a_narrow_terminal_has_one_tick_per_block(width):
    assert as_text(SMALL, width=width).plain.startswith("tick    0")


def test_a_table_as_wide_as_the_terminal_is_not_folded():
    whole = as_text(SMALL, width=200).plain
    assert as_text(SMALL, width=8 + 8 * 3).plain == whole
    assert as_text(SMALL, width=8 + 8 * 3 - 1).plain != whole


def test_f_b_and_w_have_their_colours():
    text = as_text(V, width=1000)
    colours = {(text.plain[span.start], span.style) for span in text.spans}
    assert colours == {("F", "blue"), ("B", "green"), ("W", "dark_orange"), (".", "dim")}


# --- Picture


@pytest.mark.parametrize("suffix", [".svg", ".png", ".PNG"])
def test_a_picture_is_the_same_bytes_each_time(tmp_path, suffix):
    path = tmp_path / f"out{suffix}"
    draw(SMALL, path)
    starts = b"<?xml" if suffix == ".svg" else b"\x89PNG\r\n"
    assert path.read_bytes().startswith(starts)
    assert path.read_bytes() == render(SMALL, path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def words(svg: bytes) -> list[str]:
    return [
        "".join(each.itertext()).strip()
        for each in ElementTree.fromstring(svg).iter()
        if each.tag.endswith("}text")
    ]


def test_a_picture_has_a_title_labels_and_numbers():
    found = Counter(words(render(V, "out.svg")))
    title = "zb-v: 4 stages, 12 micro-batches, 2 chunks a stage, 75 ticks"
    named = {title, "tick", "micro-batches held", "forward", "gradient of input"}
    assert named | {"gradient of weights", "darker: a later chunk"} <= set(found)
    assert found["stage 0"] == found["stage 3"] == 2  # next to the cells and the curves
    # Each micro-batch's number: F, B and W of two chunks on four stages; 10 also labels a tick.
    assert [found[str(i)] for i in (7, 9, 11)] == [24, 24, 24]


def test_the_legend_of_an_unsplit_backward():
    found = words(render(SMALL, "out.svg"))
    assert "1f1b: 3 stages, 2 micro-batches, 1 chunk a stage, 8 ticks" in found
    meant = "50.0% of the cells are idle; bubble 100.0%: time between a stage's operations"
    assert any(word.startswith(meant) for word in found)
    why = "its early gaps cost nothing: a forward every second tick"
    assert any(word.startswith(why) for word in found)
    assert not any(word.startswith(why) for word in words(render(V, "out.svg")))
    assert "backward" in found
    assert not any(word.startswith(("gradient", "darker")) for word in found)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "shown"), [slow(16, 128, False), (2, 400, False), (2, 120, True)]
)
def test_a_large_picture_has_no_numbers(stages, micro_batches, shown):
    schedule = make_schedule("1f1b", stages=stages, micro_batches=micro_batches)
    last = str(micro_batches - 1)
    assert (last in words(render(schedule, "out.svg"))) == shown


@pytest.mark.parametrize(
    ("name", "micro_batches"), by_turns(list(SCHEDULES), [8, 60, 101, 130], first=1)
)
def test_a_number_fits_into_its_cell(name, micro_batches):
    """A digit is 0.64 times as wide as its font size."""
    from matplotlib.figure import Figure

    schedule = make_schedule(name, stages=4, micro_batches=micro_batches)
    width = picture._width(schedule, least=PAGE)
    points = picture._size_of_numbers(schedule, width=width)
    assert points <= 10
    figure = Figure(figsize=(width, 4), layout="constrained")
    cells, curves = figure.subplots(2, 1, sharex=True)
    picture._draw_cells(cells, schedule, points)
    picture._draw_held(curves, schedule)
    figure.draw_without_rendering()
    cell = cells.get_window_extent().width / figure.dpi * 72 / schedule.ticks
    assert 0.64 * points * len(str(micro_batches - 1)) <= cell
    numbers = [text for text in cells.texts if text.get_text().isdigit()]
    assert bool(numbers) == (points >= picture.SMALLEST and schedule.table[..., 0].size <= 4000)


def test_a_table_of_a_page_is_as_wide_as_the_page():
    """Covers tables whose numbers have one digit; wider pictures are scaled down."""
    assert picture._width(make_schedule("zb-v", stages=4, micro_batches=8), least=PAGE) == PAGE
    assert picture._width(make_schedule("1f1b", stages=4, micro_batches=120), least=PAGE) > PAGE


@pytest.mark.parametrize("stages", [1, 2, 4, 5, 64])
def test_stages_have_colours_of_their_own(stages):
    found = {tuple(picture._of_stage(stage, stages)) for stage in range(stages)}
    assert len(found) == stages
    assert tuple(picture._rgb(picture.ENDS[0])) in found


def test_cells_are_coloured_by_operation_and_darker_in_the_second_chunk():
    rgb = picture._shades(V)[..., :3]
    assert rgb.shape == (4, V.ticks, 3)
    colours: dict[tuple[int, int], set] = {}
    for stage, tick in np.ndindex(4, V.ticks):
        operation, _, chunk = V.table[tick, stage].tolist()
        colours.setdefault((operation, chunk), set()).add(tuple(rgb[stage, tick].tolist()))
    assert all(len(each) == 1 for each in colours.values())
    one = {key: np.array(next(iter(each))) for key, each in colours.items()}
    assert len({tuple(colour) for colour in one.values()}) == 7  # three of two chunks, and idle
    for operation in (1, 2, 3):
        np.testing.assert_allclose(one[operation, 1], one[operation, 0] / 2)


def test_other_suffixes_than_png_and_svg_are_refused(tmp_path):
    for name in ("out.jpg", "out", ".png"):
        with pytest.raises(UserError, match="use a name that ends in .png or .svg"):
            draw(SMALL, tmp_path / name)


def test_without_matplotlib_the_message_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "jaxptd.plot.style", raising=False)
    with pytest.raises(UserError, match=r"needs matplotlib; .*pip install -e '\.\[viz\]'"):
        draw(SMALL, tmp_path / "out.png")
    assert as_text(SMALL).plain
    assert not list(tmp_path.iterdir())


# --- Trace


@pytest.mark.parametrize("schedule", [SMALL, V], ids=["1f1b", "zb-v"])
def test_a_trace_has_an_event_for_each_operation_at_its_simulated_time(schedule):
    durations = Durations(1, 1.5, 0.5)
    timing = simulate(schedule, durations)
    trace = as_trace(schedule, durations)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == (schedule.table[..., 0] > 0).sum()
    for event in events:
        tick, stage, args = event["args"]["tick"], event["tid"], event["args"]
        operation, i, chunk = schedule.table[tick, stage].tolist()
        assert event["name"] == cell_text(schedule, (operation, i, chunk))
        assert event["cat"] == " FBW"[operation]
        assert (args["micro_batch"], args["chunk"]) == (i, chunk)
        assert args["part"] == schedule.part(stage, chunk)
        assert event["ts"] == pytest.approx(1000 * timing.start[tick, stage])
        assert event["ts"] + event["dur"] == pytest.approx(1000 * timing.end[tick, stage])
    threads = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert {e["tid"]: e["args"]["name"] for e in threads} == {
        stage: f"stage {stage}" for stage in range(schedule.stages)
    }
    assert trace["traceEvents"][0]["args"] == {"name": f"{schedule.name}, simulated"}


@pytest.mark.parametrize("schedule", [SMALL, V], ids=["1f1b", "zb-v"])
def test_a_trace_counts_what_is_held(schedule):
    counters = [event for event in as_trace(schedule)["traceEvents"] if event["ph"] == "C"]
    for stage in range(schedule.stages):
        mine = [event for event in counters if event["name"] == f"held by stage {stage}"]
        values = [event["args"]["micro-batches"] for event in mine]
        assert max(values) == peak(schedule)[stage]
        assert values[-1] == 0
        assert min(values) == 0
        times = [event["ts"] for event in mine]
        assert times == sorted(times)
        steps = np.diff([0, *values])
        np.testing.assert_allclose(np.abs(steps), 1 / schedule.chunks)
        ends = schedule.table[:, stage, 0] == (3 if schedule.splits else 2)
        gone = [when for when, step in zip(times, steps, strict=True) if step < 0]
        np.testing.assert_allclose(gone, 1000 * simulate(schedule).end[ends, stage])


def test_the_counter_drops_at_the_end_of_the_last_operation():
    one = make_schedule("1f1b", stages=1, micro_batches=1)
    events = [e for e in as_trace(one)["traceEvents"] if e["ph"] == "C"]
    assert [(e["ts"], e["args"]["micro-batches"]) for e in events] == [(0, 1), (3000, 0)]


# --- Files


def test_files_are_written_all_or_none(tmp_path):
    old = tmp_path / "old.csv"
    old.write_text("before")
    for bad in (tmp_path / "none" / "x.json", tmp_path):
        with pytest.raises(UserError, match=re.escape(f"cannot write {bad}: ")) as caught:
            write({old: b"after", tmp_path / "new.csv": b"new", bad: b"x"})
        assert "name a file in a folder that exists" in str(caught.value)
        assert [each.name for each in tmp_path.iterdir()] == ["old.csv"]
        assert old.read_text() == "before"
    write({old: b"after"})
    assert old.read_text() == "after"
    assert [each.name for each in tmp_path.iterdir()] == ["old.csv"]


def test_a_name_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        write({tmp_path / ("x" * 300): b""})
    with pytest.raises(UserError, match="cannot write .: Is a directory"):
        write({Path(): b""})


def test_the_title_of_a_table_from_a_file():
    mine = dataclasses.replace(SMALL, name="mine.csv")
    assert any(word.startswith("mine.csv: 3 stages") for word in words(render(mine, "x.svg")))
