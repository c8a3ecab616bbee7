"""Work of packed documents: counts by definition, and figures of the page that quotes them."""

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.context import balance
from benchmarks.lib.pages import RESULTS
from jaxptd.context_parallel import CHUNK, STRATEGIES

ONE = balance.Lengths(1024, 1.0)
DOCS = RESULTS.parents[1] / "docs"


def test_windows_are_cut_from_a_row_of_documents() -> None:
    every = ONE.sequences(40)
    assert every.shape == (40, balance.T)
    assert set(np.unique(np.diff(every, axis=1))) == {0, 1}
    mean = balance.T / (every[:, -1] + 1).mean()
    assert 0.8 < mean / (1024 * np.exp(0.5)) < 1.3


def test_one_long_document_is_level_in_a_zigzag() -> None:
    segment_T, zigzag = np.zeros(balance.T, np.int64), STRATEGIES["zigzag"].order
    met, holder = balance.met(segment_T), balance.holders(zigzag, 8)
    assert met.sum() == 64 * 65 // 2
    assert (np.bincount(holder) == 8).all()
    assert balance.largest(met.sum(1), holder, 8) == 1.0
    assert balance.hop_by_hop(met, holder, 8) == 1.0
    assert balance.scores(segment_T).sum() == balance.T * (balance.T + 1) // 2
    line = balance.holders(STRATEGIES["blockwise"].order, 8)
    assert 1.8 < balance.largest(met.sum(1), line, 8) < 2


def test_a_hop_waits_for_the_slowest_device() -> None:
    """Two documents in one half each: with two devices in a row nothing is visited in the hop."""
    segment_T = np.repeat([0, 1, 2], [balance.T // 2, balance.T // 4, balance.T // 4])
    met, line = balance.met(segment_T), balance.holders(STRATEGIES["blockwise"].order, 2)
    first, second = 32 * 33 / 2, 16 * 17
    assert balance.hop_by_hop(met, line, 2) == pytest.approx(2 * first / (first + second))
    assert balance.hop_by_hop(met, line, 2) == balance.largest(met.sum(1), line, 2)


def test_placed_blocks_reach_the_goal_and_orders_of_documents_do_not() -> None:
    every = ONE.sequences(20)
    found = [balance.largest(balance.met(x).sum(1), balance.placed(x, 8), 8) for x in every]
    assert np.mean(found) <= balance.GOAL < np.mean([balance.best_order(x, 8) for x in every[:3]])
    assert (np.bincount(balance.placed(every[0], 16)) == balance.T // CHUNK // 16).all()


def test_no_dealing_is_below_the_bound() -> None:
    work = np.array([90, 1, 1, 1, 10, 10, 10, 10])
    assert balance.at_least(work, 2) == pytest.approx(93 / 133 * 2)
    found, _ = balance.of_replicas(work[balance.dealt(work, 2, 4)], 2, 4)
    assert found == pytest.approx(balance.at_least(work, 2))


def rows(page: Path) -> list[list[str]]:
    """The cells of all tables."""
    lines = re.findall(r"^\| (.*) \|$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"\*\*", "", line).split(" | ") for line in lines]


def test_the_page_has_the_figures_of_the_results() -> None:
    found = {(x[0], x[1]): x for x in rows(RESULTS / "balance.md") if len(x) == 8}
    page = [x for x in rows(DOCS / "context_parallel.md") if len(x) == 5]
    quoted = [x for x in page if (x[0], x[1]) in found]
    assert len(quoted) == 7
    for documents, devices, *figures in quoted:
        cells = found[documents, devices]
        assert figures == [cells[i].partition(" / ")[0] for i in (2, 3, 5)]


@pytest.mark.slow
def test_the_command_writes_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "DOCUMENTS", balance.DOCUMENTS[:1])
    monkeypatch.setattr(balance, "LENGTH", 2048)
    out = tmp_path / "balance.md"
    assert balance.main(["--sequences", "10", "--timed", "--out", str(out)]) == 0
    assert len(rows(out)) == 3 + 4 + 4 + 2
