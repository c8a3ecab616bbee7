"""Counts in a program's text how often the host waits for its GPU."""

from jaxptd.analysis.hlo.text import Pipeline
from jaxptd.analysis.hlo.timeline import host_waits

KNOWN = 'backend_config={"known_trip_count":{"n":"5"}}'


def program(loop: str = "", inside: str = "") -> str:
    """Program of ticks (five if `loop` says so), each containing `inside`."""
    return f"""
%something (s: s32[]) -> s32[] {{
  %s = s32[] parameter(0)
  ROOT %n = s32[] negate(%s), metadata={{op_name="forward/cond/branch_1_fun/neg"}}
}}

%nothing (s: s32[]) -> s32[] {{
  ROOT %s = s32[] parameter(0)
}}

%body (s: s32[]) -> s32[] {{
  %s = s32[] parameter(0)
  {inside}
  ROOT %e = s32[] add(%s, %s)
}}

ENTRY %main (s: s32[]) -> s32[] {{
  %s = s32[] parameter(0)
  ROOT %w = s32[] while(%s), condition=%c, body=%body, {loop}
}}
"""


CONDITIONAL = (
    "%c = s32[] conditional(%s, %s, %s), true_computation=%nothing, false_computation=%something, "
    'metadata={op_name="forward/cond"}'
)
WITHIN = "%w = s32[] while(%s), condition=%c, body=%something"


def test_a_loop_of_known_length_makes_nothing_wait() -> None:
    assert host_waits(program(KNOWN)) == 0


def test_a_loop_of_unknown_length_waits_before_each_trip_and_at_its_end() -> None:
    assert host_waits(program()) == 2
    ticks = 'metadata={op_name="ticks/while"}'
    assert host_waits(program(ticks), Pipeline(2, {"ticks": 7})) == (7 + 2) / 2


def test_a_conditional_waits_once_whichever_branch_runs() -> None:
    assert host_waits(program(KNOWN, CONDITIONAL)) == 5
    assert host_waits(program(KNOWN, CONDITIONAL), Pipeline(2, {"forward": 3})) == 5


def test_waits_within_waits_count_as_often_as_they_run() -> None:
    assert host_waits(program(KNOWN, WITHIN)) == 5 * 2
    loop = "while(%s), condition=%c, body=%nothing"
    text = program(KNOWN, CONDITIONAL).replace("negate(%s)", loop)
    assert host_waits(text, Pipeline(2, {"forward": 3})) == 5 + 3 * 2 / 2
