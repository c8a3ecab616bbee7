"""Table 5 and figures 13 to 15: the paper's layouts, what the pages say, and equal trainings."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.paper import __main__ as paper
from benchmarks.paper import published
from benchmarks.paper.images import figure13, table5
from benchmarks.paper.images.figure13 import Hearts, Trained
from benchmarks.paper.images.table5 import LAYOUTS, Row
from benchmarks.paper.memory import Memory

GB = 10**9


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table5, "PLUGINS", "flax")


def rows(*gigabytes: float) -> list[Row]:
    """The rows of the table with these peaks; the last has half of that on the host."""
    on_host = [0.0] * (len(gigabytes) - 1) + [gigabytes[-1] / 2]
    return [
        Row(name, Memory(0, 0, 1.0, int(peak * GB), int(host * GB)))
        for name, peak, host in zip(LAYOUTS, gigabytes, on_host, strict=True)
    ]


# ---- table 5 and figures 14 and 15 ------------------------------------------------------------


def test_rows_are_those_that_are_published() -> None:
    assert {row for where, row, _ in published.numbers() if where == "table 5"} == {*LAYOUTS}
    assert [row.published for row in rows(4, 3, 2, 1)] == [8.0, 4.8, 3.5, 3.0]
    assert [row.gpus for row in rows(4, 3, 2, 1)] == [2, 4, 4, 4]


def test_the_network_is_swin_unets_at_its_published_size() -> None:
    for name, layout in LAYOUTS.items():
        config = table5.config(name)
        images = config.model.images
        assert images is not None
        assert (images.size, images.patch, images.window, images.classes) == (224, 4, 7, 4)
        assert (images.depths, images.decoder_depths) == ((2, 2, 2, 2), (2, 2, 2))
        assert (config.model.hidden_size, config.model.num_heads) == (96, 3)
        assert (config.layout, config.model.dtype, config.model.remat) == (
            layout,
            "float32",
            "dots",
        )


def test_the_page_of_table_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table5, "compiled", lambda quick: rows(4, 3, 2, 1))
    for number in (["--table", "5"], ["--figure", "14"], ["--figure", "15"]):
        assert paper.main([*number, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_table5.md").read_text(encoding="utf-8")
    assert "| TP2D=4 | `row=2 col=2 zigzag gather heads` | 4 | 3.5 | 2.00 | 0.6 |" in text
    assert "offload=optimizer,activations` | 4 | 3.0 | 1.00 | 1.8 | 0.50 | 2.00 |" in text
    words = " ".join(text.split())
    assert "The four are in the published order. TP=2 to TP=4: -40% published, -25% comp" in words
    assert "27.2 million parameters" in words and "14 blocks without the 2 of the deep" in words
    assert "Published are 0.5 GB less on a GPU and 1.2 % more of the host's memory" in words
    assert "the host has 167 GB" in words
    assert "all rows have room on RTX 4090 and V100" in words
    assert "--quick" not in words
    assert paper.main(["--table", "5", "--quick", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_table5.md").read_text(encoding="utf-8")
    assert "`--quick`: XLA writes no softmax, norm or product in Triton" in " ".join(text.split())


def test_a_row_is_compiled_with_the_options_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        table5, "compiled_memory", lambda _, options: asked.append(options) or Memory(0, 0, 1.0)
    )
    for quick in (False, True):
        table5.compiled(quick=quick)
    assert len(asked) == 8
    assert all("xla_disable_hlo_passes" not in each for each in asked[:4])
    assert all("softmax" in each["xla_disable_hlo_passes"] for each in asked[4:])


def test_another_order_and_too_little_room_are_said() -> None:
    words = " ".join(table5.page(rows(40, 2, 3, 1), quick=False).split())
    assert "Not in the published order: TP=4 and TP2D=4." in words
    assert "all rows have room on none of them" in words


# ---- figure 13 --------------------------------------------------------------------------------


def hearts(moved: float) -> Hearts:
    """Hearts after two trainings whose losses and scores differ by `moved`."""
    side, label = 32, np.arange(3 * 32 * 32).reshape(3, 32, 32) % 4
    dice = np.where(np.arange(12) % 3 == 2, 0.5, np.nan)
    image = np.random.default_rng(0).normal(size=(3, side, side, 1))
    both = [Trained(np.linspace(1, 0.5, 12) + x, dice + x, label) for x in (0.0, moved)]
    return Hearts(image, label, dict(zip(figure13.LAYOUTS, both, strict=True)))


def test_the_page_and_the_picture_of_figure_13(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figure13, "trained", lambda steps: hearts(1e-3))
    assert paper.main(["--figure", "13", "--steps", "12", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "paper_figure13.md").read_text(encoding="utf-8")
    assert "| 12 | 0.5000 | 0.5010 | 0.5000 | 0.5010 |" in text
    words = " ".join(text.split())
    assert "largest difference of a loss is 1.0e-03" in words
    assert "Both find the same class in 100.00% of the pixels" in words
    assert "TP2D=4" in (tmp_path / figure13.PICTURE).read_text()


def test_a_stopped_training_makes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped:
        stopped = True

    monkeypatch.setattr(figure13.jaxptd, "train", lambda *_, **__: Stopped())
    with pytest.raises(KeyboardInterrupt):
        figure13.trained(4)


@pytest.mark.slow
def test_both_layouts_train_alike() -> None:
    found = figure13.trained(4)
    assert found.difference("loss") < 1e-12
    assert found.difference("dice") < 1e-12
    assert found.same_pixels == 1
