"""The paper's page and picture: published numbers, sentences from counts, and what is refused."""

import dataclasses
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from benchmarks.grid.gpu import Compiled, laid_out
from benchmarks.paper import __main__ as paper
from benchmarks.paper import models, pages, published, table4
from benchmarks.paper.curves import figure9
from benchmarks.paper.curves.figure10 import Curves
from benchmarks.paper.models import MODELS, chosen
from benchmarks.paper.table4 import BASE, Step, layouts
from jaxptd.analysis.collective import ALL_REDUCE
from jaxptd.analysis.hlo.timeline import Move, Work
from jaxptd.commands.command_line import load_config
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

GPT, BERT, T5 = MODELS
THERE = [model for model in MODELS if not model.missing]
ASKED = (
    "give one of --list, --all, --memory, --ring, --groups, --weak-scaling, or tables and figures"
)
LATER = dataclasses.replace(T5, family="a family to come", config="t5-2.5b")


def test_published_speedups_are_those_of_the_published_hours() -> None:
    for model in MODELS:
        ratio = published.hours(model.name, "TP") / published.hours(model.name, "TP2D")
        assert ratio == pytest.approx(published.speedup(model.name), abs=0.005)
    assert published.communication("TP") == pytest.approx(0.093)
    assert published.iteration("GPT", "TP") == 1416


# ---- models -----------------------------------------------------------------------------------


def test_gpt_and_bert_are_there_and_lay_out_on_four_devices() -> None:
    assert GPT in THERE and BERT in THERE
    for model in THERE:
        found = list(layouts(load_config(model.config)))
        assert [layout.num_devices for layout in found] == [4] * 6
        assert found[0] == Layout(tp=4) and BASE == "TP=4"
        assert {layout.matmul2d for layout in found[2:]} == {"gather", "summa", "fox", "cannon"}
        assert all(layout.row == layout.col == 2 for layout in found[2:])


def test_bert_has_the_layers_of_gpt() -> None:
    ours, theirs = (load_config(model.config).model for model in (BERT, GPT))
    for field in ("num_layers", "hidden_size", "num_heads", "seq_length", "dtype", "remat"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_a_model_to_come_is_left_out_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MODELS", (GPT, BERT, LATER))
    assert chosen([]) == [GPT, BERT]
    with pytest.raises(UserError, match="--models T5: there is no model.family=a family to come"):
        chosen(["GPT", "T5"])
    words = "T5 is left out: there is no model.family=a family to come yet."
    assert models.omitted([GPT, BERT]) == words
    assert (
        models.omitted([GPT])
        == f"BERT is left out: it was not asked for (`--models BERT`). {words}"
    )


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            [],
            ASKED,
        ),
        (
            ["--list", "--ring"],
            ASKED,
        ),
        (
            ["--weak-scaling", "--figure", "7"],
            ASKED,
        ),
        (["--table", "6"], "argument --table: invalid choice: 6"),
        (["--table", "5", "--models", "T5"], "--models has no effect with --table 5; leave it out"),
        (["--figure", "14", "--steps", "9"], "--steps has no effect with --figure 14; leave it"),
        (["--all", "--figure", "9"], "give one of --list, --all"),
        (["--table", "3", "5", "--quick"], "--quick has no effect with --table 3; leave it out"),
        (["--table", "5", "4", "--quick"], "--quick has no effect with --table 4; leave it out"),
        (["--all", "--jobs", "0"], "--jobs 0: use 1 or more"),
        (["--table", "3", "--jobs", "2"], "--jobs has no effect with --table 3; leave it out"),
        (["--all", "--steps", "9"], "--steps has no effect with --all; leave it out"),
        (["--table", "4", "--steps", "0"], "--steps has no effect with --table 4; leave it out"),
        (["--table", "2", "--compile"], "--compile has no effect with --table 2; leave it out"),
        (["--weak-scaling", "--models", "GPT"], "--models has no effect with --weak-scaling"),
        (["--figure", "10", "--steps", "1"], "--steps 1: use 2 to"),
        (["--figure", "10", "--steps", "0"], "--steps 0: use 2 to"),
        (["--figure", "10", "--models", "Swin"], "argument --models: invalid choice"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_a_line(argv: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        paper.main(argv)
    assert line in str(error.value)


# ---- table 4 ----------------------------------------------------------------------------------

GIB = 2**30


def compiled_step(layout: Layout, *, size: int, alone: int, others: float) -> Step:
    """A step that sends `size` bytes in four all-reduces, of which `alone` overlap with nothing."""
    config = laid_out(load_config(GPT.config), layout)
    axes = ("tp",) if layout.tp > 1 else ("row", "col")
    works = [Work()] * alone + [Work(products=1)] * (4 - alone)
    found = [
        Move(f"m{i}", "forward", size * 2 // 12, 1, work, ALL_REDUCE, axes)
        for i, work in enumerate(works)
    ]
    return Step(
        "GPT", Compiled(config, "", 3 * GIB, GIB, GIB, found, int(others)), int(989.5e12 / 10)
    )


def steps() -> list[Step]:
    tp = compiled_step(Layout(tp=4), size=90 * 10**9, alone=2, others=4.3e11)
    grid = compiled_step(Layout(row=2, col=2), size=180 * 10**9, alone=1, others=2.15e11)
    return [tp, tp, grid]


def test_a_step_takes_what_its_kernels_and_its_messages_without_work_take() -> None:
    tp, _, grid = steps()
    assert tp.computing == pytest.approx(0.2)
    assert tp.sent == pytest.approx(90e9, rel=1e-6)
    assert tp.seconds == pytest.approx(0.2 + 45 / 450)
    assert grid.seconds == pytest.approx(0.15 + 45 / 450)
    assert grid.unhidden == pytest.approx(0.15 + 0.4)
    assert grid.any_links(tp) == pytest.approx([0.5, 0.2 / 0.15])
    cells = dict(zip(table4.HEAD, grid.row(tp), strict=True))
    assert (cells["beside work"], cells["TP=4 over it"]) == ("75%", "1.20")
    assert (cells["all sent, ms"], cells["predicted, ms"]) == ("400.0", "250.0")


def test_the_page_of_table_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table4, "compiled_steps", lambda _: steps())
    monkeypatch.setattr(table4, "PLUGINS", "flax")
    assert paper.main(["--table", "4", "--models", "GPT", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_table4.md").read_text(encoding="utf-8")
    assert "Made by `python -m benchmarks.paper --table 4 --models GPT --out" in text
    assert "| GPT | 118 | 64 | 1.84 | 1.00 | 1.20 (`gather`) | 0.73 | 0.50 to 1.33 |" in text
    words = " ".join(text.split())
    assert "9.3% of a step of GPT with TP=4" in words and "would be 1.10 times as fast" in words
    assert "94% of what was gained is outside communication" in words
    assert "sends more: at least 2.00 times the bytes" in words
    assert "GPT over TP=4: 1.00 with sequence parallelism, 1.20 with the fastest grid" in words
    assert "between 0.50 and 1.33 with links of any speed" in words
    assert "none of TP=4's, it would have 2.67" in words


# ---- all of them ------------------------------------------------------------------------------


def test_the_list_has_every_table_and_figure(capsys: pytest.CaptureFixture) -> None:
    assert paper.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    wanted = [f"--table {n}" for n in range(1, 6)] + [f"--figure {n}" for n in range(7, 16)]
    assert {f"`{name}`" for name in wanted} < {line.split(" | ")[0][2:] for line in lines}


def test_all_makes_each_page_once_and_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def seconds(words: str, out: Path) -> float:
        made.append((words, out))
        return 61.0

    monkeypatch.setattr(paper, "_seconds", seconds)
    monkeypatch.setattr(paper, "ThreadPoolExecutor", lambda jobs: ThreadPoolExecutor(1))  # in order
    assert paper.main(["--all", "--jobs", "2", "--out", str(tmp_path)]) == 0
    assert len(made) == len(set(made)) == 13 and {out for _, out in made} == {tmp_path}
    asked = [paper._names(paper._parser().parse_args(shlex.split(words))) for words, _ in made]
    every = [pages.PAGES[name].name for names in asked for name in names]
    assert sorted(every) == sorted({page.name for page in pages.PAGES.values()})
    words = [words for words, _ in made]
    assert words[:3] == ["--table 4", "--table 2 --figure 7 11", "--figure 10 --steps 80"]
    assert {"--weak-scaling --compile", "--weak-scaling --fresh", "--table 5 --quick"} < {*words}
    listed = (tmp_path / paper.LIST).read_text()
    assert "| `--table 5` |" in listed and "2 processes at a time" in listed
    assert all(line.endswith("| 61 |") for line in listed.splitlines() if line.startswith("| `"))


def test_a_page_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def seconds(words: str, out: Path) -> float:
        if words.startswith("--table 2"):
            raise UserError("no plugin")
        made.append(words)
        return 1.0

    monkeypatch.setattr(paper, "_seconds", seconds)
    with pytest.raises(UserError, match="--table 2: no plugin"):
        paper.main(["--all", "--jobs", "1", "--out", str(tmp_path)])
    assert len(made) == 12 and not list(tmp_path.iterdir())


def test_several_pages_are_made_together_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Curves("GPT", "float32", np.linspace(5, 3, 12), np.linspace(5, 3, 12) + 1e-6)
    trained = []
    monkeypatch.setattr(figure9, "curves", lambda steps: trained.append(steps) or found)
    argv = ["--figure", "8", "9", "--steps", "12", "--out", str(tmp_path)]
    assert paper.main(argv) == 0
    assert trained == [12] and (tmp_path / "paper_figure9.md").exists()


def test_pages_that_simulate_devices_are_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(paper, "_make", lambda page, options, words: made.append(page.name))
    assert paper.main(["--table", "2", "1", "--figure", "7", "10"]) == 0
    assert made == [f"paper_{each}.md" for each in ("table1", "figure10", "table2", "figure7")]


def test_pages_of_all_name_their_folder_as_seen_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    monkeypatch.setattr(paper, "_all", lambda out, jobs: made.append(out))
    monkeypatch.chdir(Path(__file__).parents[2])
    assert paper.main(["--all"]) == 0
    assert made == [Path("benchmarks/results")]


@pytest.mark.slow
def test_a_page_of_all_is_made_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert paper._seconds("--table 3", tmp_path) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["paper_table3.md"]
    with pytest.raises(UserError, match="^--steps 1: use 2 to"):
        paper._seconds("--figure 9 --steps 1", tmp_path)


def test_the_page_of_papers_has_the_list(capsys: pytest.CaptureFixture) -> None:
    assert paper.main(["--list"]) == 0
    page = (Path(__file__).parents[2] / "docs" / "papers.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page
