"""Figures 8 to 10: pages, pictures, and equal trainings."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import models
from benchmarks.paper.curves import figure9, figure10
from benchmarks.paper.curves.figure10 import Curves
from benchmarks.paper.models import MODELS
from jaxptd.mesh import Layout

THERE = [model for model in MODELS if not model.missing]


def test_the_page_and_the_picture_of_figures_8_and_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Curves("GPT", "float32", np.linspace(5, 3, 12), np.linspace(5, 3, 12) + 1e-6)
    monkeypatch.setattr(figure9, "curves", lambda steps: found)
    for number in ("8", "9"):
        argv = ["--figure", number, "--steps", "12", "--out", str(tmp_path)]
        assert paper.main(argv) == 0
    text = (tmp_path / "paper_figure9.md").read_text(encoding="utf-8")
    assert "| 12 | 3.0000 | 3.0000 | 20.09 | 20.09 |" in text
    assert "37.2 with TP and 29.1 with TP2D" in " ".join(text.split())
    assert "figure 9: perplexity" in (tmp_path / figure9.PICTURE).read_text()


def test_the_page_and_the_picture_of_figure_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def losses(model: models.PaperModel, layout: Layout, *, dtype: str, steps: int) -> np.ndarray:
        moved = 1e-3 if (layout.row, dtype) == (2, "float32") else 0.0
        return np.linspace(5, 3, steps) + moved * (np.arange(steps) == 3)

    monkeypatch.setattr(figure10, "losses", losses)
    argv = ["--figure", "10", "--models", "GPT", "BERT", "--steps", "20"]
    assert paper.main([*argv, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_figure10.md").read_text(encoding="utf-8")
    assert "| BERT | float32 | 5.0000 | 3.0000 | 1.0e-03 | 4 |" in text
    assert "| GPT | float64 | 5.0000 | 3.0000 | 0.0e+00 | 1 |" in text
    assert (
        "37.2" in text and f"![Losses of both layouts, and their differences]({figure10.PICTURE})"
    )
    svg = (tmp_path / figure10.PICTURE).read_text()
    assert "TP2D=4, 2 x 2" in svg and ">BERT<" in svg
    assert paper.main(argv) == 0
    assert text.partition("\n\n")[0] in capsys.readouterr().out


def test_a_stopped_training_makes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        stopped, metrics = True, {"loss": [5.0]}

    monkeypatch.setattr(figure10.jaxptd, "train", lambda *_, **__: Stopped())
    with pytest.raises(KeyboardInterrupt):
        figure10.trained([MODELS[0]], steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("model", THERE, ids=lambda model: model.name)
def test_both_layouts_train_alike(model: models.PaperModel) -> None:
    curves = [figure10.losses(model, each, dtype="float64", steps=4) for each in figure10.LAYOUTS]
    found = Curves(model.name, "float64", *curves)
    assert found.differences.max() < 1e-12
    assert found.tp[-1] < found.tp[0]
