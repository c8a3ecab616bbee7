"""The meter: step times and rows of metrics."""

import contextlib
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxptd.commands.command_line import load_config
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
from jaxptd.run import progress as module
from jaxptd.run.health import Health
from jaxptd.run.progress import Meter
from jaxptd.step import Program

CONFIG = Path(__file__).parents[3] / "configs" / "test-tiny.yaml"


@functools.cache
def program(*overrides: str) -> Program:
    config = load_config(CONFIG, ["--model.vocab_size=257", *overrides])
    return Program(config, make_mesh(config.layout))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def metrics(loss: float = 2.0, norm: float = 1.0, skipped: int = 0, in_row: int = 0) -> dict:
    numbers = {"grad_norm": norm, "learning_rate": 0.5, "loss": loss}
    counts = {"skipped": jnp.int32(skipped), "skipped_in_row": jnp.int32(in_row)}
    return {name: jnp.float32(value) for name, value in numbers.items()} | counts


def run(meter: Meter, clock: Clock, steps: range, *, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        meter.add(step, metrics(loss=float(step)))


def test_it_says_when_it_waits_for_a_step():
    """Reading a step's metrics waits for the step, which the watchdog must know."""
    inside = []

    @contextlib.contextmanager
    def waiting():
        inside.append(True)
        yield
        inside.pop()

    class Late(float):
        def __float__(self):
            seen.append(bool(inside))
            return 1.0

    seen: list[bool] = []
    meter = Meter(program(), 0, waiting=waiting)
    meter.add(1, {**metrics(), "loss": Late()})
    meter.row()
    assert seen and all(seen)


def test_a_row_has_the_fields_of_the_contract_in_its_order(clock):
    meter = Meter(program(), 0)
    run(meter, clock, range(1, 2), seconds=4.0)
    assert list(meter.row().items()) == [
        ("step", 1),
        ("loss", 1.0),
        ("grad_norm", 1.0),
        ("learning_rate", 0.5),
        ("skipped", 0),
        ("tokens", 128),
        ("tokens_per_second", 32.0),
        ("step_time", 4.0),
        ("mfu", None),
    ]


def test_compilation_evaluations_and_checkpoints_are_in_no_later_step_time(clock):
    meter = Meter(program(), 10)  # resumed
    run(meter, clock, range(11, 12), seconds=60.0)  # compiles
    run(meter, clock, range(12, 16), seconds=2.0)
    row = meter.row()
    assert (row["step"], row["step_time"], row["tokens"]) == (15, 2.0, 15 * 128)
    with meter.paused("save"):
        clock.now += 1000.0
    run(meter, clock, range(16, 18), seconds=3.0)
    with meter.paused("evaluation"):
        clock.now += 1000.0
    assert meter.row()["step_time"] == 3.0


def test_every_step_can_be_logged(clock):
    meter, times = Meter(program(), 0), []
    for step, seconds in ((1, 60.0), (2, 2.0), (3, 3.0)):
        run(meter, clock, range(step, step + 1), seconds=seconds)
        times.append(meter.row()["step_time"])
    assert times == [60.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [((), 16), (("--model.tie_embeddings=false",), 16), (("--model.window=6",), 6)],
    ids=["tied", "untied", "window"],
)
def test_mfu_is_the_share_of_the_peak(overrides, keys, clock, monkeypatch):
    monkeypatch.setattr(module, "peak_flops", lambda mesh: 1e9)
    meter = Meter(program(*overrides), 0)
    run(meter, clock, range(1, 2), seconds=4.0)
    products = 257 * 16 + 2 * (4 * 16 * 16 + 2 * 16 * 64)  # the output layer, then two layers
    flops = 6 * products + 12 * 2 * 16 * keys
    assert meter.row()["mfu"] == pytest.approx(flops * 128 / 4.0 / 1e9)


def test_a_row_of_float16_has_its_scale_and_none_for_what_is_not_finite(clock):
    meter = Meter(program(), 0)
    clock.now += 1.0
    meter.add(1, {**metrics(float("nan"), float("inf"), 3, 2), "loss_scale": jnp.float32(8)})
    row = meter.row()
    assert (row["loss"], row["grad_norm"], row["skipped"], row["loss_scale"]) == (None, None, 3, 8)
    assert "skipped_in_row" not in row
    json.loads(json.dumps(row, allow_nan=False))


def test_a_row_has_a_number_for_each_layer_that_has_one(clock):
    meter = Meter(program(), 0)
    clock.now += 1.0
    meter.add(1, {**metrics(), "expert_load": jnp.array([jnp.nan, 1.5, 1.25])})
    row = meter.row()
    assert {name: x for name, x in row.items() if "load" in name} == {
        "expert_load/1": 1.5,
        "expert_load/2": 1.25,
    }
    assert [*row].index("expert_load/1") == [*row].index("tokens") - 2


def test_too_many_skipped_steps_are_found_at_the_next_at_the_latest():
    line = (
        "loss is nan at step 2, the last of 10 skipped steps in a row "
        r"\(train.max_skipped=10\); the last good checkpoint is step 1;"
    )

    def meter() -> Meter:
        meter = Meter(program(), 0, check=Health(10, lambda: [1]).check_step)
        meter.add(1, metrics(float("nan"), skipped=9, in_row=9))
        meter.add(2, metrics(float("nan"), skipped=10, in_row=10))
        return meter

    for find in (
        Meter.row,
        Meter.wait,
        lambda meter: meter.skipping,
        lambda meter: meter.add(3, metrics()),
    ):
        with pytest.raises(UserError, match=line):
            find(meter())
    with pytest.raises(UserError, match=line), meter().paused("save"):
        pytest.fail("a checkpoint would be saved here")


def test_a_meter_knows_that_the_newest_step_was_skipped():
    meter = Meter(program(), 0)
    meter.add(1, metrics())
    assert not meter.skipping
    meter.add(2, metrics(float("nan"), skipped=1, in_row=1))
    assert meter.skipping
