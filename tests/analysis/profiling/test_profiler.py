"""Times of a step's parts, read from the events of a trace."""

import gzip
import json
from pathlib import Path

import pytest

from jaxptd.analysis.hlo.kernels import ATTENTION, COLLECTIVE, OTHER, PRODUCT
from jaxptd.analysis.profiling import events, part_times
from jaxptd.errors import UserError

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
    every = [{"dur": 10.0 * (i + 1), "args": {"hlo_op": name}} for i, name in enumerate(names)]
    found = part_times(every, HLO, runs=2)
    want = {("mlp", PRODUCT): 30, ("attention", ATTENTION): 30, ("mlp", COLLECTIVE): 40}
    want |= {("rest", OTHER): 60}
    assert found == {part: pytest.approx(us * 1e-6 / 2) for part, us in want.items()}


def test_without_instructions_there_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the profiler recorded no instruction"):
        events(tmp_path)


@pytest.mark.parametrize("streams", [True, False])
def test_of_a_gpu_only_what_ran_on_its_streams_counts(streams: bool, tmp_path: Path) -> None:
    """Other threads in a GPU's trace repeat the same events, as modules and as operations."""

    def event(thread: int, **more: object) -> dict[str, object]:
        return {"pid": 1, "tid": thread, **more}

    names = {7: "Stream #13(Compute)", 8: "XLA Ops"} if streams else {7: "tf_Eigen", 8: "other"}
    every = [event(t, ph="M", name="thread_name", args={"name": name}) for t, name in names.items()]
    every += [event(t, ph="X", dur=float(t), args={"hlo_op": "dot.1"}) for t in names]
    every += [event(7, ph="X", dur=1.0, args={}), event(9, ph="X", name="no arguments", dur=1.0)]
    with gzip.open(tmp_path / "host.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": every}, file)
    assert [each["dur"] for each in events(tmp_path)] == ([7.0] if streams else [7.0, 8.0])
