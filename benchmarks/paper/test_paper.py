"""The command, pages that can be made quickly, small trained models, and formulas."""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks.lib.pages import RESULTS, TABLE
from benchmarks.paper import __main__ as paper
from benchmarks.paper import activations, pictures, trained
from benchmarks.paper.published import MODELS, PaperModel
from benchmarks.paper.trained import Hearts, Trained
from jaxptd.analysis.memory_report import published_layer
from jaxptd.errors import UserError
from jaxptd.mesh import Axis, Layout, make_mesh
from jaxptd.ring_attention import Ring, Scores, ring_qk

ASKED = (
    "give one of --list, --all, --memory, --ring, --groups, --weak-scaling, or tables and figures"
)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("", ASKED),
        ("--list --ring", ASKED),
        ("--weak-scaling --figure 7", ASKED),
        ("--table 6", "argument --table: invalid choice: 6"),
        ("--table 5 --models T5", "--models has no effect with --table 5; leave it out"),
        ("--table 5 4 --quick", "--quick has no effect with --table 4; leave it out"),
        ("--weak-scaling --fresh --compile", "--compile has no effect with --weak-scaling --fr"),
        ("--table 2 --fresh", "--fresh has no effect with --table 2"),
        ("--all --jobs 0", "--jobs 0: use 1 or more"),
        ("--all --steps 9", "--steps has no effect with --all; leave it out"),
        ("--table 4 --steps 0", "--steps has no effect with --table 4; leave it out"),
        ("--figure 10 --steps 0", "--steps 0: use 2 to"),
        ("--figure 10 --models Swin", "argument --models: invalid choice"),
    ],
)
def test_bad_options_are_refused_in_a_line(argv: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        paper.main(argv.split())
    assert line in str(error.value)


def test_the_page_of_papers_has_the_list(capsys: pytest.CaptureFixture) -> None:
    assert paper.main(["--list"]) == 0
    page = (RESULTS.parents[1] / "docs" / "papers.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in page
    assert {page.name for page in paper.PAGES.values()} == {*paper.MAKERS}


@pytest.mark.parametrize("option", ["--groups", "--table 3"])
def test_what_is_only_counted_is_as_published(option: str, tmp_path: Path) -> None:
    assert paper.main([*option.split(), "--out", str(tmp_path)]) == 0
    (made,) = tmp_path.iterdir()
    tables = [TABLE.findall(each.read_text()) for each in (made, RESULTS / made.name)]
    assert tables[0] == tables[1] != []


def test_all_makes_each_page_once_and_the_list_unless_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, fails = [], ""

    def seconds(words: str, out: Path) -> float:
        if words == fails:
            raise UserError("no plugin")
        made.append(words)
        return 61.0

    monkeypatch.setattr(paper, "_seconds", seconds)
    monkeypatch.setattr(paper, "ThreadPoolExecutor", lambda jobs: ThreadPoolExecutor(1))  # in order
    fails = paper.ALL[1]
    with pytest.raises(UserError, match="--table 2 --figure 7 11: no plugin"):
        paper.main(["--all", "--jobs", "1", "--out", str(tmp_path)])
    assert made == [words for words in paper.ALL if words != fails]
    assert not list(tmp_path.iterdir())
    fails = ""
    assert paper.main(["--all", "--jobs", "2", "--out", str(tmp_path)]) == 0
    asked = [paper._names(paper._parser().parse_args(words.split())) for words in paper.ALL]
    every = [paper.PAGES[name].name for names in asked for name in names]
    assert sorted(every) == sorted(paper.MAKERS)
    listed = (tmp_path / paper.LIST).read_text()
    assert all(line.endswith("| 61 |") for line in listed.splitlines() if line.startswith("| `"))


def test_pages_that_simulate_devices_are_made_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(paper, "make", lambda page, *_: made.append(page.name))
    assert paper.main(["--table", "2", "1", "--figure", "7", "8", "9"]) == 0
    assert made == [f"paper_{each}" for each in ("table1", "figure9", "table2", "figure7")]


# ---- small models that are trained --------------------------------------------------------------


def test_figures_8_to_10_follow_from_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(model: PaperModel, layout: Layout, *, dtype: str, steps: int) -> np.ndarray:
        moved = 1e-3 if (layout.row, dtype) == (2, "float32") else 0.0
        return np.linspace(5, 3, steps) + moved * (np.arange(steps) == 3)

    monkeypatch.setattr(trained, "losses", losses)
    out = ["--steps", "12", "--out", str(tmp_path)]
    assert paper.main(["--figure", "10", "--models", "GPT", "BERT", *out]) == 0
    text = (tmp_path / "paper_figure10.md").read_text(encoding="utf-8")
    assert "| BERT | float32 | 5.0000 | 3.0000 | 1.0e-03 | 4 |" in text
    assert "| GPT | float64 | 5.0000 | 3.0000 | 0.0e+00 | 1 |" in text
    assert ">BERT<" in (tmp_path / "paper_figure10.svg").read_text()
    assert paper.main(["--figure", "8", *out]) == 0
    text = (tmp_path / "paper_figure9.md").read_text(encoding="utf-8")
    assert "| 12 | 3.0000 | 3.0000 | 20.09 | 20.09 |" in text and "1.0e-03" in text


def test_figure_13_follows_from_the_trainings(tmp_path: Path) -> None:
    label = np.arange(3 * 32 * 32).reshape(3, 32, 32) % 4
    dice = np.where(np.arange(12) % 3 == 2, 0.5, np.nan)
    image = np.random.default_rng(0).normal(size=(3, 32, 32, 1))
    both = [Trained(np.linspace(1, 0.5, 12) + x, dice + x, label) for x in (0.0, 1e-3)]
    found = Hearts(image, label, dict(zip(trained.SWIN_LAYOUTS, both, strict=True)))
    text = trained.figure_13(found)
    assert "| 12 | 0.5000 | 0.5010 | 0.5000 | 0.5010 |" in text
    assert "in loss 1.0e-03" in text and "same class in 100.00% of the pixels" in text
    pictures.save("paper_figure13", found, tmp_path)
    assert "TP2D=4" in (tmp_path / "paper_figure13.svg").read_text()


def test_a_stopped_training_makes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = argparse.Namespace(stopped=True)
    monkeypatch.setattr(trained.jaxptd, "train", lambda *_, **__: stopped)
    with pytest.raises(KeyboardInterrupt):
        trained.trained(steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_both_layouts_train_alike(model: PaperModel) -> None:
    (found,) = trained.trained([model], ["float64"], steps=4)
    assert found.differences.max() < 1e-12
    assert found.tp[-1] < found.tp[0]


@pytest.mark.slow
def test_both_layouts_segment_alike() -> None:
    found = trained.hearts(4)
    assert found.difference("loss") < 1e-12 and found.difference("dice") < 1e-12
    assert found.same_pixels == 1


# ---- memory of activations, and the ring --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", activations.RING_LAYOUTS)
def test_one_more_layer_costs_what_the_formula_says(name: str) -> None:
    layout = activations.RING_LAYOUTS[name]
    found = activations.growth(activations.ring_config(activations.Size(4, 256, 64), layout))
    assert found.kept == found.formula
    parameters = 12 * 64**2 / (4 if name != "ring" else 1)
    assert found.state / 12 == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize("N", [2, 4, 8])
def test_both_need_as_much_at_the_break_even(N: int) -> None:
    size = activations.Size(1, round(activations.break_even(64, N)), 64)
    assert size.L == 24 * 64
    one, other = (activations.published(size, N, ring=each) for each in (False, True))
    assert one == pytest.approx(other)
    size = activations.Size(B=2, L=16, H=8)  # B L H = 256, B Z L^2 / N = 512
    sums = [activations.published(size, 4, ring=each) for each in (False, True)]
    assert sums == [48 * 16 + 8 * 64 + 2 * 256 + 512, 48 * 64 + 10 * 64 + 512]


def test_published_activations_are_those_of_the_formulas_in_words() -> None:
    unit = activations.SEQUENCES * activations.MODEL.seq_length * activations.MODEL.hidden_size
    scores = 5 * 16 * 1024 / 1024
    sums = 34 + scores, 10 + (24 + scores) / 4, (34 + scores) / 4
    wanted = dict(zip(activations.LAYOUTS, sums, strict=True))
    for config in activations.configs():
        if config.model.remat == "none":
            assert published_layer(config, "none") == wanted[config.layout] * unit


def test_blocks_of_the_picture_are_those_that_travel() -> None:
    """Block numbers, sent around a ring of devices, are at each step where they are drawn."""
    n = pictures.DEVICES

    def visits(keys: jax.Array) -> jax.Array:
        """keys[1, 1], their block's number -> [1, n]: the block that is here at each step."""
        held = [keys]
        for _ in range(n - 1):
            held.append(jax.lax.ppermute(held[-1], Axis.CP, [(i, (i + 1) % n) for i in range(n)]))
        return jnp.concatenate(held, axis=1)

    mesh, spec = make_mesh(Layout(cp=n)), P(Axis.CP)
    run = jax.shard_map(visits, mesh=mesh, in_specs=spec, out_specs=spec)
    found = np.asarray(jax.jit(run)(jnp.arange(n).reshape(n, 1)))
    drawn = [[pictures.block(device, step) for step in range(n)] for device in range(n)]
    assert found.tolist() == drawn


def test_after_all_steps_rows_of_scores_are_complete() -> None:
    n, rng = pictures.DEVICES, np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 8, 1, 4)).astype(np.float32)
    rows = jax.jit(
        jax.shard_map(
            lambda q, k: ring_qk(q, k, Ring(Axis.CP, "rsa"), Scores(scale=1.0, causal=False)),
            mesh=make_mesh(Layout(cp=n, ring="rsa")),
            in_specs=P(None, Axis.CP),
            out_specs=P(None, None, Axis.CP),
        )
    )(q, k)
    np.testing.assert_allclose(rows, np.einsum("BTNH,BSNH->BNTS", q, k), rtol=1e-5, atol=1e-6)
