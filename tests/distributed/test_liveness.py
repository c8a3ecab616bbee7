"""Real processes that are killed, stopped, stuck or fail: how the others end, and what they report.

The loop is a small version of the trainer's: steps with a collective, in phases. The others report
how long a process was silent or stuck. Their clock leaves out time in which they did not run
themselves, so a busy machine changes nothing.
"""

import itertools
import re
import signal

import pytest
from together import Together

STUCK_AFTER = 2.0  # seconds; the default is 40
LOOP = """
import os, sys, time
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxptd.distributed import coordination
from jaxptd.errors import UserError
from jaxptd.distributed.liveness import Liveness
from jaxptd.distributed.watchdog import Phase, Watchdog
from jaxptd.config import ProcessesConfig
from jaxptd.distributed.launchers import find
from jaxptd.step.program import Programs

config = ProcessesConfig(stuck_after={stuck_after})
world = find(config, os.environ)
coordination.join(world, config, devices=world.count)
jax.config.update("jax_num_cpu_devices", 1)
watchdog = Watchdog(config.stuck_after)
programs = Programs(watchdog)

def fail(step):
    if world.id != {culprit} or step != 20:
        return
    {what}

def say(line):
    print(line, flush=True)

with Liveness(world, watchdog, report=say, before_exit=lambda: say("cleaned up")).watching():
    mesh = jax.make_mesh((world.count,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    cut, numbers = NamedSharding(mesh, P("x")), np.arange(world.count)
    x = jax.make_array_from_callback(numbers.shape, cut, numbers.__getitem__)
    body = lambda x: jax.lax.psum(x, "x")
    total = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P()))
    for step in watchdog.steps(1, {steps}):
        with programs.ready("total", total, x) as compiled:
            y = compiled(x)
        with watchdog.phase(Phase.READING):
            fail(step)
        with watchdog.phase(Phase.WAITING):
            y.block_until_ready()
        if step == 10:
            print("going", flush=True)
        time.sleep(0.01)
    print("done", flush=True)
"""


@pytest.fixture
def start(tmp_path):
    """Starts the loop in several processes; something happens to one of them at step 20."""
    started = []

    def begin(what: str = "pass", *, culprit: int = 0, count: int = 2, steps: int = 10**6):
        code = LOOP.format(stuck_after=STUCK_AFTER, what=what, culprit=culprit, steps=steps)
        started.append(Together(code, [], tmp_path, count=count))
        return started[-1]

    yield begin
    for each in started:
        each.kill()


@pytest.mark.slow
def test_the_others_of_a_killed_process_name_it_and_end(start):
    run = start(count=3)
    run.wait_for("going")
    run.signal(1, signal.SIGKILL)
    ended = run.ended()
    assert [each.code for each in ended] == [3, -signal.SIGKILL, 3]
    for each in (ended[0], ended[2]):
        assert each.lines[-1] == "cleaned up"
        line = each.err.splitlines()[-1]
        assert line.startswith("error: process 1 of 3 has been silent for 2 s, last heard ")
        assert "killed, stopped or cut off; restart the run to resume from the last" in line


@pytest.mark.slow
def test_the_others_of_a_stopped_process_name_it_and_end(start):
    run = start(count=3)
    run.wait_for("going")
    run.signal(2, signal.SIGSTOP)
    ended = run.ended(without=2)
    assert [each.code for each in ended] == [3, 3, None]
    for each in ended[:2]:
        assert "error: process 2 of 3 has been silent for 2 s, last heard " in each.err


@pytest.mark.slow
def test_a_stopped_process_0_is_named_by_the_others(start):
    run = start()
    run.wait_for("going")
    run.signal(0, signal.SIGSTOP)
    ended = run.ended(without=0)
    assert ended[1].code == 3
    assert "error: process 0 of 2 has been silent for 2 s, last heard " in ended[1].err


@pytest.mark.slow
def test_a_killed_process_0_takes_the_service_along_and_is_named(start):
    run = start(count=3)
    run.wait_for("going")
    run.signal(0, signal.SIGKILL)
    ended = run.ended()
    assert [each.code for each in ended] == [-signal.SIGKILL, 3, 3]
    for each in ended[1:]:
        last = each.err.splitlines()[-1]
        assert last.startswith("error: process 0 of 3 is gone and with it the coordination")


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_what_it_is_in(start):
    run = start("time.sleep(1000)", culprit=1)
    run.wait_for("going")
    ended = run.ended()
    assert [each.code for each in ended] == [3, 3]
    for each in ended:
        assert "error: process 1 of 2 is stuck: reading data for 2 s at step 20" in each.err


@pytest.mark.slow
def test_a_hang_ends_a_run_of_one_process_too(start):
    run = start("time.sleep(1000)", count=1)
    run.wait_for("going")
    (ended,) = run.ended()
    assert ended.code == 3
    assert ended.err.startswith("error: the run is stuck: reading data for 2 s at step 20; restart")


@pytest.mark.slow
def test_who_compiles_for_long_is_not_stuck(start):
    compiling = f"with watchdog.phase(Phase.COMPILING): time.sleep({4.5 * STUCK_AFTER})"
    run = start(compiling, culprit=1, steps=30)
    ended = run.ended()
    assert [each.code for each in ended] == [0, 0]
    assert [each.lines[-1] for each in ended] == ["done", "done"]
    found = re.findall(r"process 1 of 2 still compiling.* for (\d+) s so far", ended[0].out)
    said = [int(seconds) for seconds in found]
    assert len(said) >= 2
    assert said[0] >= STUCK_AFTER
    assert all(later >= 2 * one - 1 for one, later in itertools.pairwise(said))


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_bad_input_found_by_one_process_ends_all_at_once(start, culprit):
    run = start("raise UserError('no such data; use other data')", culprit=culprit)
    run.wait_for("going")
    ended = run.ended()
    line = f"error: process {culprit} of 2: no such data; use other data\n"
    assert [(each.code, each.err) for each in ended] == [(2, line)] * 2


@pytest.mark.slow
def test_a_bug_in_one_process_ends_all_with_its_rank(start):
    run = start("1 / 0", culprit=1)
    ended = run.ended()
    assert [each.code for each in ended] == [1, 1]
    assert ended[0].err == "error: process 1 of 2: ZeroDivisionError: division by zero\n"
    assert "Traceback" in ended[1].err


@pytest.mark.slow
def test_a_whole_machine_that_stood_still_goes_on(start):
    run = start(steps=400)
    run.wait_for("going")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for rank in (1, 0):
            run.signal(rank, number)
        if number == signal.SIGSTOP:
            signal.sigtimedwait([], 2 * STUCK_AFTER)
    assert [each.code for each in run.ended()] == [0, 0]
