"""Looks for a bug in the code at hand, and prints each detector's findings as lines of JSON.

`python -m benchmarks.mutations.probe SECONDS CASE ...`, run in the folder of the code

A case is a layout with options for the tiny config, such as `layout.tp=4 model.dropout=0`. For each
case the step is traced (`check_vma` may raise), and its collectives are counted and compared with
the formula. Then `verify` runs it in float64, and, if that is equal, in the other precisions. The
first line contains the seconds that Python and its imports took since the given time.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax

from jaxptd import load_config, make_mesh, simulate
from jaxptd.analysis import verification
from jaxptd.analysis.count import count, formula
from jaxptd.analysis.verification import REFERENCE_DTYPE
from jaxptd.config import Config
from jaxptd.costs.collective import subtract
from jaxptd.step import Program

TINY = "model.seq_length=8 model.vocab_size=13 train.global_batch_size=8 train.micro_batches=2"
DEVICES = 8
KEPT = 160  # characters of a finding


def config_of(case: str) -> Config:
    """The config of a case, based on the options of `TINY`."""
    return load_config("test-tiny", [f"--{each}" for each in f"{TINY} {case}".split()])


def main(begin: float, cases: Sequence[str]) -> None:
    """Prints a line for each detector and case; a detector runs only if no earlier one raised.

    begin: when the process was started, in seconds since the epoch.
    """
    simulate(DEVICES)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    _print(ready=round(time.time() - begin, 2))
    configs = {case: config_of(case) for case in cases}
    programs: dict[str, Program] = {}
    if any(_look("tracing", case, partial(_trace, case, configs, programs)) for case in cases):
        return  # a step that cannot be traced cannot communicate or compute
    for case, program in programs.items():
        _look("comms", case, partial(_moves, program))
    for case, dtype in _runs(configs):
        if _look("verify", case, partial(_differs, configs[case], dtype), dtype=dtype):
            return


def _runs(configs: dict[str, Config]) -> Iterator[tuple[str, Any]]:
    """The cases in each precision, starting with float64."""
    for dtype in ("float64", "float32", *REFERENCE_DTYPE):
        for case, config in configs.items():
            if dtype not in REFERENCE_DTYPE or dtype == config.model.dtype:
                yield case, dtype


def _look(detector: str, case: str, look: Callable[[], str], **more: str) -> bool:
    """Prints what a detector says, or its error if it raises; returns True if there is any."""
    begin = time.perf_counter()
    try:
        found = look()
    except Exception as error:  # any: the code is broken
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
    seconds = round(time.perf_counter() - begin, 2)
    _print(detector=detector, case=case, found=found[:KEPT], seconds=seconds, **more)
    return bool(found)


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def _trace(case: str, configs: dict[str, Config], programs: dict[str, Program]) -> str:
    programs[case] = program = Program(configs[case], make_mesh(configs[case].layout))
    program.train_step.trace(program.abstract_state, program.abstract_batch)  # type: ignore[attr-defined]
    return ""


def _moves(program: Program) -> str:
    """Describes how what the step moves differs from the formula; empty if it does not."""
    found = subtract(count(program), formula(program))
    each = (f"{row.kind} over {' x '.join(row.axes)}: {row.bytes:+} bytes" for row in found)
    return "; ".join(each)


def _differs(config: Config, dtype: Any) -> str:
    report = verification.verify(config, dtype=dtype)
    return report.verdict if report.wrong else ""


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
