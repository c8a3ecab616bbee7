"""The table of estimated times: its rates, its columns, and how long a pipeline waits."""

import types

import pytest

from benchmarks.gpu import estimate
from benchmarks.gpu.estimate import BEYOND, CASES, HEAD, INSIDE, Estimate, rates, row, waiting
from jaxptd.analysis.hlo.kernels import OTHER, PRODUCT
from jaxptd.analysis.hlo.timeline import Times
from jaxptd.errors import UserError
from jaxptd.models.stages import make_plan

SIZES = {"pp": 8, "dp": 24, "cp": 1, "row": 1, "col": 1, "tp": 8}


@pytest.mark.parametrize(
    ("axes", "found"),
    [
        (("tp",), ("NVLink", INSIDE)),
        (("dp",), ("network", BEYOND)),
        (("dp", "tp"), ("network", BEYOND)),
        ((), ("NVLink", INSIDE)),
    ],
    ids=str,
)
def test_the_last_axes_of_the_mesh_are_in_a_node(axes: tuple, found: tuple) -> None:
    assert rates(SIZES).link(axes) == found
    assert rates(SIZES | {"dp": 8, "tp": 1}).link(("dp",)) == ("NVLink", INSIDE)


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_config(name: str) -> None:
    assert CASES[name].config.layout.num_devices in (8, 16, 1536)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("145b 1f1b, full", 1 + 7 / 96), ("145b", 1.0486), ("145b interleaved", 1 + 7 / (5 * 24))],
)
def test_a_pipeline_takes_longer_by_what_its_stages_wait(name: str, factor: float) -> None:
    config = CASES[name].config
    resolved = types.SimpleNamespace(plan=make_plan(config))
    program = types.SimpleNamespace(resolved=resolved, config=config)
    assert waiting(program) == pytest.approx(factor, abs=1e-4)


def test_a_row_adds_the_times_up() -> None:
    times = Times(
        {PRODUCT: 2.0, "attention kernel": 1.0, OTHER: 0.5}, {("tp",): 2.0}, {("tp",): 0.5}
    )
    config = CASES["145b"].config
    parameters = 10**11
    found = row("145b", config, Estimate(times, 1.25, parameters, 3 * 2**30))
    assert len(found) == len(HEAD)
    rate = 6 * parameters * 2304 * 2048 / (4 * 1.25) / 1536 / 989.5e12
    assert found[4:] == [
        *("3.000", "0.500", "2.000", "75%", "1.250", "5.000"),
        *(f"{rate:.1%}", "3.0"),
    ]


def test_bad_cases_are_refused() -> None:
    with pytest.raises(UserError, match="invalid choice: 'nothing'"):
        estimate.main(["--cases", "nothing"])
