"""The parts of a step: who they are, their least time, and what a profile says of them."""

import gzip
import json
import re
import sys
from pathlib import Path

import pytest
import tiny

from jaxptd import profile
from jaxptd.analysis.compiled_step import compile_step
from jaxptd.analysis.flops import executed, flops
from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.analysis.kernels import ATTENTION, COLLECTIVE, OTHER, PRODUCT, kernels
from jaxptd.analysis.step_parts import SCOPES, least, lines, scope_of
from jaxptd.analysis.step_picture import picture
from jaxptd.errors import UserError
from jaxptd.mesh import Layout

CONFIG = str(Path(__file__).parents[2] / "configs" / "test-tiny.yaml")


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(f)/while/body/transpose(jvp(layers))/mlp/dot_general", "mlp"),
        ("jit(f)/jvp(loss)/norm/reduce_sum", "norm"),
        ("jit(f)/transpose(jvp(embedding))/scatter-add", "embedding"),
        ("jit(f)/dot_product_attention_fwd", "rest"),
        ("", "rest"),
    ],
)
def test_the_innermost_scope_counts(name: str, scope: str) -> None:
    assert scope_of(name) == scope


@pytest.fixture(scope="module")
def step():
    program = tiny.program(Layout(tp=2), micro_batches=1)
    return program, compile_step(program).as_text()


def test_every_scope_is_in_a_step_and_all_its_products_are_in_one(step) -> None:
    program, text = step
    found = {scope_of(kernel.instruction.op_name) for kernel in kernels(text)}
    assert found == set(SCOPES)
    times = least(program, text)
    products = {scope: times[scope, PRODUCT] for scope in SCOPES}
    assert sum(products.values()) * PEAK_FLOPS["H200"] == pytest.approx(executed(program, flops))
    assert products["rest"] == products["norm"] == products["optimizer"] == 0
    # Of the MLP three times 2 T D 4D, twice.
    tokens, hidden, layers = 8 * 8, 16, program.model.num_layers
    one = 2 * tokens * hidden * 4 * hidden / 2
    assert products["mlp"] * PEAK_FLOPS["H200"] == pytest.approx(layers * 3 * 2 * one)
    others = sum(kernel.bytes for kernel in kernels(text) if kernel.kind == OTHER)
    assert sum(times[scope, OTHER] for scope in SCOPES) == pytest.approx(others / BANDWIDTH)


HLO = """HloModule step

ENTRY main () -> f32[8] {
  %a = f32[8]{0} constant({...})
  %dot.1 = f32[8]{0} dot(%a, %a), metadata={op_name="jvp(layers)/mlp/dot_general"}
  %fmha.2 = f32[8]{0} custom-call(%dot.1), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="attention/x"}
  %all-reduce.3 = f32[8]{0} all-reduce(%fmha.2), metadata={op_name="transpose(jvp(mlp))/psum"}
  %while.4 = f32[8]{0} while(%all-reduce.3), body=%body, metadata={op_name="layers/while"}
  ROOT %fusion.5 = f32[8]{0} negate(%while.4)
}
"""  # noqa: E501


def test_what_a_trace_says_is_added_up_by_part_and_a_loop_counts_by_what_it_runs() -> None:
    names = ("dot.1", "dot.1", "fmha.2", "all-reduce.3", "while.4", "fusion.5", "of another step")
    events = [{"dur": 10.0 * (i + 1), "args": {"hlo_op": name}} for i, name in enumerate(names)]
    found = profile.of_events(events, HLO, runs=2)
    want = {("mlp", PRODUCT): 30, ("attention", ATTENTION): 30, ("mlp", COLLECTIVE): 40}
    want |= {("rest", OTHER): 60}
    assert found == {part: pytest.approx(us * 1e-6 / 2) for part, us in want.items()}


def test_lines_are_longest_first_with_their_shares() -> None:
    times = {("mlp", PRODUCT): 3e-3, ("loss", OTHER): 1e-3, ("norm", OTHER): 0.0}
    assert lines(times) == [["mlp", "products", "3", "75.0%"], ["loss", "other", "1", "25.0%"]]


def test_the_picture_has_a_bar_a_scope() -> None:
    figure = picture({"a step": {("mlp", PRODUCT): 3e-3, ("mlp", COLLECTIVE): 1e-3}}, "ms")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "a step: 4 ms"
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches if bar.get_width()]
    assert bars == [(0.0, 3.0), (3.0, 1.0)]


def test_a_profile_of_this_machine(capsys, tmp_path: Path) -> None:
    drawn = tmp_path / "step.svg"
    command = ["--config", CONFIG, "--steps", "2", "--layout.tp", "2", "--picture", str(drawn)]
    assert profile.main([*command, "--trace", str(tmp_path / "trace")]) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (\w+) \| ([\w ]+) \| ([\d.e-]+) \| ([\d.]+)% \|$", printed, re.M)
    assert {("mlp", PRODUCT), ("attention", COLLECTIVE), ("optimizer", OTHER)} <= {
        (scope, kind) for scope, kind, _, _ in rows
    }
    assert sum(float(share) for *_, share in rows) == pytest.approx(100, abs=1)
    assert "ms a step, measured" in drawn.read_text()
    assert list((tmp_path / "trace").glob("**/*.trace.json.gz"))
    with pytest.raises(UserError, match="is there already; name a new directory"):
        profile.main([*command, "--trace", str(tmp_path / "trace")])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps=0 must be at least 1"),
        (["--picture", "step.png"], "--picture=step.png: name a file that ends in .svg"),
        (["--trace", "/dev/null/trace"], "--trace: Not a directory: /dev/null/trace"),
        (["--picture", "/dev/null/step.svg"], "--picture: .*: /dev/null"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        profile.main(["--config", CONFIG, *options])


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "benchmarks.gpu.step_pictures")
    monkeypatch.setattr(profile, "measure", None)
    with pytest.raises(
        UserError, match=r"matplotlib.axes is not installed; pip install -e '.\[viz\]'"
    ):
        profile.main(["--config", CONFIG, "--picture", "step.svg"])


def test_without_instructions_there_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the profiler left no instruction"):
        profile.events(tmp_path)


@pytest.mark.parametrize("streams", [True, False])
def test_of_a_gpu_only_what_ran_on_its_streams_counts(streams: bool, tmp_path: Path) -> None:
    """Its trace tells the same once more, as lines of modules and of operations."""

    def event(thread: int, **more: object) -> dict[str, object]:
        return {"pid": 1, "tid": thread, **more}

    names = {7: "Stream #13(Compute)", 8: "XLA Ops"} if streams else {7: "tf_Eigen", 8: "other"}
    every = [event(t, ph="M", name="thread_name", args={"name": name}) for t, name in names.items()]
    every += [event(t, ph="X", dur=float(t), args={"hlo_op": "dot.1"}) for t in names]
    every += [event(7, ph="X", dur=1.0, args={}), event(9, ph="X", name="no arguments", dur=1.0)]
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": every}, file)
    assert [each["dur"] for each in profile.events(tmp_path)] == ([7.0] if streams else [7.0, 8.0])
