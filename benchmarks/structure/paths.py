"""The functions of the package that Python enters on three paths through a training step.

A run of a small GPT (`test-tiny` without dropout) reads its first batch, and JAX traces its step,
which runs the package's Python. A path records the functions of `jaxptd` from the first call of one
function to the first return of another. The config, the mesh, the shapes of parameters and state,
and the step that JAX will trace are made before that, as in a run, and are on no path.

A function is a `def`, nested or not. It is identified by its file and qualified name and counted
once; properties and wrappers of decorators are functions like any other. A lambda or comprehension
belongs to the function around it; a lambda in a module or class counts by itself. Bodies of modules
and classes do not count, nor do methods that `dataclass` and `NamedTuple` generate: they are in no
file.
"""

import functools
import gc
import inspect
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax

import jaxptd
from jaxptd.distributed.launchers import find
from jaxptd.distributed.watchdog import Watchdog
from jaxptd.errors import UserError
from jaxptd.run.progress import Display, Output
from jaxptd.train import make_run

PACKAGE = Path(jaxptd.__file__).parent
ROOT = f"{PACKAGE}{os.sep}"
MONITORING: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")  # calls before Python 3.12
# A gradient's path begins where ZeRO gives each parameter a slot for its gradient. The path leaves
# out the layers' formulas and derivatives, which are the same at every stage of ZeRO, but includes
# the loop over layers (`zero/loop.py`), which reduces their gradients.
FORMULAS = r"(attention|config|kernels|layers|matmul|models|parts|vision)/"
FORMULAS += r"|context_parallel|ring_attention|summa2d"


class Route(NamedTuple):
    """A path: the function whose call begins it, and the one whose return ends it.

    wanted: the most files and functions allowed. without: a pattern of files that do not count.
    """

    begin: str
    end: str
    wanted: tuple[int, int]
    options: tuple[str, ...] = ("--train.micro_batches=1",)
    without: str = "$^"


ROUTES = {
    "from read_batch to the update": Route("Run.read_batch", "StepBody.train", (30, 150)),
    "of one dense block on tp=2": Route(
        "Block.__call__", "Block.__call__", (12, 50), ("--layout.tp=2",)
    ),
    "that handle a gradient under ZeRO 2": Route(
        "Zero.begin_step",
        "StepBody.train",
        (12, 80),
        ("--layout.dp=2", "--layout.zero=2", "--train.micro_batches=2"),
        FORMULAS,
    ),
}


def entered(route: Route) -> dict[str, list[str]]:
    """The functions on a path by file, in the order in which they are entered.

    Raises:
        UserError: the step calls no function with the name of the path's first or last.
    """
    found: dict[str, list[str]] = {}
    begun = over = False
    ignore = MONITORING.DISABLE if MONITORING else False  # the tool stops reporting this code

    def call(code: CodeType, *_: Any) -> Any:
        nonlocal begun
        if not code.co_filename.startswith(ROOT):
            return ignore
        file, name = Path(code.co_filename).relative_to(PACKAGE).as_posix(), code.co_qualname
        begun |= name == route.begin
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not name.endswith(INLINED)
        if begun and not over and is_function and not re.match(route.without, file):
            while ".<locals>." in name and name.endswith(">"):
                name = name.rpartition(".<locals>.")[0]
            if name not in found.setdefault(file, []):
                found[file].append(name)

    def leave(code: CodeType, *_: Any) -> Any:
        nonlocal over
        over |= begun and code.co_qualname == route.end
        return None if code.co_qualname == route.end else ignore

    jax.clear_caches()
    for each in gc.get_objects():  # clears caches of the package, to trace as in a new process
        if isinstance(each, functools._lru_cache_wrapper) and "jaxptd" in str(each.__module__):
            each.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        watch(first_step(route, folder), call, leave)
    if not over:
        name = route.end if begun else route.begin
        raise UserError(f"no step calls {name}; name another function in {Path(__file__).name}")
    return found


def first_step(route: Route, folder: str) -> Callable[[], object]:
    """Makes a run; the function reads its first batch and traces its first step."""
    options = f"--data.source={__file__}", f"--train.run_dir={folder}", "--model.dropout=0"
    config = jaxptd.load_config("test-tiny", [*options, *route.options])
    display = Display(Output(file=io.StringIO()))
    run = make_run(config, find(config.processes, {}), display=display, watchdog=Watchdog())
    state: Any = run.program.abstract_state
    program, programs = run.program.train_step, run.programs  # the loop has them before it begins

    def step() -> None:
        batch = run.read_batch(run.data.train, 0)
        with programs.ready("train_step", program, state, batch) as jitted:
            jitted.trace(state, batch)  # type: ignore[attr-defined]

    return step


def watch(step: Callable[[], object], call: Callable[..., Any], leave: Callable[..., Any]) -> None:
    """Runs a step and reports each function call and return in it, with its code."""
    if MONITORING is None:  # Python 3.11

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            frame.f_trace_lines = False
            if event == "return":
                leave(frame.f_code)
            return trace if event != "call" or call(frame.f_code) is None else None

        sys.settrace(trace)
        step()
        sys.settrace(None)
        return
    events, tool = MONITORING.events, MONITORING.PROFILER_ID
    MONITORING.use_tool_id(tool, __name__)
    for event, function in ((events.PY_START, call), (events.PY_RETURN, leave)):
        MONITORING.register_callback(tool, event, function)
    MONITORING.set_events(tool, events.PY_START | events.PY_RETURN)
    try:
        step()
    finally:
        MONITORING.set_events(tool, 0)
        MONITORING.free_tool_id(tool)
        MONITORING.restart_events()
