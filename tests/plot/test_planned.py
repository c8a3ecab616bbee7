"""A plan's picture and table: bars add up to its figures, dots stay below their roof."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from command_lines import refused

import jaxptd
from jaxptd import Config, ModelConfig, TrainConfig, UserError, plot
from jaxptd import plan as command
from jaxptd.planner.planning import Plan
from jaxptd.plot import figures

OPTIONS = ["--config", "test-tiny", "--model.dtype", "bfloat16", "--layout.tp", "2"]
OPTIONS += ["--gpus", "2", "--gpu", "h100", "--top", "1"]


@pytest.fixture(scope="module")
def made() -> Plan:
    model = ModelConfig(
        num_layers=4,
        hidden_size=256,
        num_heads=4,
        seq_length=512,
        vocab_size=1024,
        dtype="bfloat16",
    )
    config = Config(model, train=TrainConfig(global_batch_size=8))
    return jaxptd.plan(config, gpus=4, gpu="h100", top=3)


def ends(axes) -> list[float]:
    """The end of each layout's bar: the sum of its pieces."""
    return np.sum([[bar.get_width() for bar in each] for each in axes.containers], axis=0).tolist()


def test_bars_are_the_time_and_the_memory_of_each_layout(made: Plan) -> None:
    time, memory, *_ = plot.plan(made).get_axes()
    assert ends(time) == pytest.approx([each.step.seconds for each in made.best])
    in_gib = [each.memory.total / 2**30 for each in made.best]
    assert ends(memory) == pytest.approx(in_gib)
    (limit,) = memory.lines
    assert limit.get_xdata() == pytest.approx([made.limit / 2**30] * 2)
    names = [label.get_text() for label in time.get_yticklabels()]
    assert [name.partition(":")[0] for name in names] == ["1", "2", "3"]
    assert all(axes.yaxis_inverted() for axes in (time, memory))  # the best is on top


def test_every_part_of_the_best_is_a_dot_below_its_roof(made: Plan) -> None:
    _, _, moved, computed = plot.plan(made).get_axes()
    terms = [term for term in made.best[0].step.terms if term.seconds > 0]
    dots = [[each.get_offsets()[0] for each in axes.collections] for axes in (moved, computed)]
    assert [len(each) for each in dots] == [
        sum(bool(term.bytes and not term.flops) for term in terms),
        sum(bool(term.flops) for term in terms),
    ]
    assert min(map(len, dots)) > 3
    a = made.cluster.accelerator
    rates = [term.flops / term.seconds / 1e12 for term in terms if term.flops]
    assert [y for _, y in dots[1]] == pytest.approx(rates)
    for x, y in dots[1]:
        assert y * 1e12 <= min(a.bf16_flops, x * a.hbm_bandwidth)
    roof = computed.lines[0].get_ydata()
    assert max(roof) == pytest.approx(a.bf16_flops / 1e12)
    hbm = moved.lines[0].get_ydata()
    assert hbm == pytest.approx([a.hbm_bandwidth / 1e9] * 2)
    assert max(y for x, y in dots[0] if x == 0) <= hbm[0]


def test_small_parts_are_one() -> None:
    layouts = [{str(n): float(n) for n in range(10)}, {"9": 1.0}]
    parts, colors = figures._parts(layouts)
    assert list(parts) == ["9", "8", "7", "6", "5", "4", figures.OTHERS]
    assert parts[figures.OTHERS] == [6.0, 0.0]
    assert parts["9"] == [9.0, 1.0]
    assert len({colors[name] for name in parts}) == 7
    assert list(figures._parts([{"a": 1.0}])[0]) == ["a"]


def test_a_plan_is_a_table(made: Plan) -> None:
    lines = repr(made).splitlines()
    batch = made.config.train.global_batch_size
    devices = f"4 x h100, 8 a node, {made.limit / 2**30:.1f} GiB per device"
    assert lines[0] == f"{devices}; global batch {batch} x 512 tokens"
    assert lines[1].split()[:3] == ["layout", "micro-batch", "remat"]
    assert "MFU ± model error" in lines[1]
    assert lines[-1].startswith(f"± is {made.error:.0%} of the prediction, the model's error on ")
    assert len(lines) == 3 + len(made.best)
    root = ElementTree.fromstring(made._repr_html_())
    assert len(root.findall(".//tr")) == 1 + len(made.best)
    assert "".join(root.itertext()).count(lines[0]) == 1


def test_the_command_draws(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    picture, config = tmp_path / "plan.svg", tmp_path / "plan.yaml"
    files = ["--picture", str(picture), "--out", str(config)]
    assert command.main([*OPTIONS, "--quiet", *files]) == 0
    words = "jaxptd train --config test-tiny --model.dtype bfloat16 --layout.tp 2 "
    assert capsys.readouterr().out.startswith(words)
    text = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "plan for 2 x h100" in text
    assert jaxptd.load_config(str(config)).layout.tp == 2
    other = tmp_path / "other.yaml"
    wrong = [*OPTIONS, "--out", str(other), "--picture", str(tmp_path / "a.pdf")]
    assert ".png or .svg" in refused(capsys, command.main, wrong)
    assert not other.exists()


def test_without_matplotlib_the_line_names_the_extra(made: Plan, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in [each for each in sys.modules if each.startswith("jaxptd.plot.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(
        UserError, match=r"a picture needs matplotlib; .*pip install -e '\.\[viz\]'"
    ):
        plot.plan(made)
