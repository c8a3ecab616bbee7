"""Short texts and HTML tables of settings and numbers; every value is escaped."""

from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

from jaxptd import Config, Layout, ModelConfig, TrainConfig, describe_mesh
from jaxptd.analysis.comparison import Row
from jaxptd.analysis.memory_report import MemoryReport
from jaxptd.analysis.profiling import ProfileReport
from jaxptd.analysis.traffic.step import CommsReport
from jaxptd.analysis.verification import Report
from jaxptd.api import ShownState
from jaxptd.costs.collective import ALL_REDUCE, Collective
from jaxptd.display import Table, html_of

NASTY = "<script>alert('&')</script>"
LAYOUT = Layout(dp=2, tp=4)
MOVED = [Collective(ALL_REDUCE, ("tp",), 12, 34_000_000)]
ROWS = [
    Row(f"blocks.{i}.w", "gradient", error=1e-16 * i, allowed=1e-14 * (i != 40)) for i in range(50)
]

SHOWN = {
    "layout": LAYOUT,
    "one device": Layout(),
    "config": Config(ModelConfig(num_layers=3), LAYOUT, train=TrainConfig(run_dir=NASTY)),
    "defaults": Config(),
    "mesh": describe_mesh(LAYOUT),
    "verify": Report(LAYOUT, "float64", ROWS),
    "comms": CommsReport(LAYOUT, NASTY, MOVED, MOVED, MOVED, []),
    "comms, not compiled": CommsReport(LAYOUT, NASTY, MOVED, None, MOVED, []),
    "memory": MemoryReport(LAYOUT, NASTY, [{"part": "parameters", "formula": 4096}]),
    "profile": ProfileReport(NASTY, {("mlp", "products"): 0.001}),
}


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_a_few_lines_and_a_table(name: str) -> None:
    shown = SHOWN[name]
    assert len(repr(shown).splitlines()) <= 12
    assert len(repr(shown)) < 1000
    html = shown._repr_html_()
    assert ElementTree.fromstring(html.replace("<br>", "<br/>")).tag in ("div", "table", "pre")
    assert "<script>" not in html


@pytest.mark.parametrize("name", ["config", "comms", "memory", "profile"])
def test_values_are_escaped(name: str) -> None:
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)" in SHOWN[name]._repr_html_()
    assert NASTY in repr(SHOWN[name])


def test_settings_are_the_expression_that_makes_them() -> None:
    config = SHOWN["config"]
    assert eval(repr(config)) == config
    assert repr(Config()) == "Config()"
    long = ModelConfig(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50304)
    config = Config(long, Layout(pp=2, schedule="zb-h1"), train=TrainConfig(global_batch_size=512))
    assert eval(repr(config)) == config
    assert len(repr(config).splitlines()) == 5


def test_a_verification_shows_what_is_wrong_first() -> None:
    lines = repr(SHOWN["verify"]).splitlines()
    assert lines[0].startswith("dp=2 tp=4: NOT equal to one device in float64: 1 of 50")
    assert lines[1] == "1 of 50 comparisons"
    assert lines[3].split() == ["blocks.40.w", "gradient", "4.0e-15", "0.0e+00", "WRONG"]
    assert not SHOWN["verify"].equal
    right = Report(LAYOUT, "float64", ROWS[:40])
    assert [row.name for row in right.nearest()] == ["blocks.37.w", "blocks.38.w", "blocks.39.w"]


def test_comms_show_whether_the_formula_agrees() -> None:
    assert "the jaxpr moves what the formula says" in repr(SHOWN["comms"])
    other = CommsReport(LAYOUT, "", MOVED, MOVED, [], [])
    assert "does NOT move" in repr(other)
    assert not other.as_formula


def test_a_table_aligns_numbers_and_leaves_out_what_is_missing() -> None:
    table = Table("", ("a", "b"), [("x", 1234567), ("long name", None)])
    assert str(table).splitlines() == ["a                  b", "x          1,234,567", "long name"]
    assert html_of("a < b", table).startswith("<div><p>a &lt; b</p><table><thead>")


def test_a_large_state_is_a_line() -> None:
    state = ShownState({f"w{i}": jnp.ones((1000,)) for i in range(20)})
    assert repr(state) == "w0, w1, w2, w3 and 16 more: 20 arrays, 20000 numbers, 80.0 kB"
