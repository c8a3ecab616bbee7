"""What a person sees, on a terminal and in a pipe, and the numbers that the meter makes of it."""

import contextlib
import functools
import io
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxptd.config.command_line import load_config
from jaxptd.errors import UserError
from jaxptd.mesh import make_mesh
from jaxptd.run import progress
from jaxptd.run.progress import Display, Meter, Output, check_finite, printable
from jaxptd.step import Program

CONFIG = Path(__file__).parents[2] / "configs" / "test-tiny.yaml"
ROW = {"step": 20, "loss": 3.14159, "tokens_per_second": 12345.6}
EVALUATION = {"validation_loss": 2.5, "perplexity": 12.18}


def shown(*, terminal: bool, rows=(ROW,), **options) -> str:
    """What a console shows of a run whose steps up to 10 were done before."""
    console = Console(force_terminal=terminal, file=io.StringIO(), width=100, **options)
    display = Display(console)
    with display.steps(done=10, total=30):
        for row in rows:
            display.advance(row["step"])
            display.report(row, seconds_left=90.0)
    return console.file.getvalue()


def test_a_pipe_gets_a_plain_line_a_logged_step():
    rows = [ROW, {**ROW, "step": 30, "loss": 2.0, **EVALUATION}]
    assert shown(terminal=False, rows=rows).splitlines() == [
        "step 20/30  loss 3.1416  12,346 tokens/s  1.5 min left",
        "step 30/30  loss 2.0000  12,346 tokens/s  validation 2.5000 (perplexity 12.18)"
        "  1.5 min left",
    ]


def test_a_terminal_gets_a_bar_with_loss_speed_and_time_left():
    text = shown(terminal=True)
    assert "20/30" in text
    assert "━" in text
    assert "loss 3.1416  12,346 tokens/s" in text
    assert "compiling" in text  # until the first report
    assert "step 20/30  loss" not in text  # no line of its own


def test_on_a_terminal_an_evaluation_stays_as_a_line():
    text = shown(terminal=True, rows=[{**ROW, **EVALUATION}])
    assert "step 20/30  loss 3.1416  12,346 tokens/s  validation 2.5000" in text


def test_a_line_is_not_cut_and_not_taken_for_markup():
    console = Console(file=io.StringIO(), width=20)
    line = "a [bold]line[/bold] that is wider than [the console] :smile:"
    Display(console).say(line)
    assert console.file.getvalue() == line + "\n"


def test_a_terminal_of_another_encoding_shows_question_marks():
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Display(Console(file=file)).say("é\ufffd")
    file.flush()
    assert file.buffer.getvalue() == b"\xe9?\n"
    assert printable("é\ufffd", "utf-8") == "é\ufffd"


def test_a_reader_that_has_gone_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    display = Display(Output(file=Gone()))
    with display.steps(done=0, total=30):
        display.say("to nobody")
        display.report(ROW, seconds_left=90.0)
    assert display._console.file.getvalue() == ""


# ---- the meter ------------------------------------------------------------------------------


@functools.cache
def program(*overrides: str) -> Program:
    config = load_config(CONFIG, ["--model.vocab_size=257", *overrides])
    return Program(config, make_mesh(config.layout))


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
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
    """Reading a step's numbers waits for it; a watchdog has to know that it is no hang."""
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
    with meter.paused():
        clock.now += 1000.0
    run(meter, clock, range(16, 18), seconds=3.0)
    with meter.paused():
        clock.now += 1000.0
    assert meter.row()["step_time"] == 3.0


def test_every_step_can_be_logged(clock):
    meter, times = Meter(program(), 0), []
    for step, seconds in ((1, 60.0), (2, 2.0), (3, 3.0)):
        run(meter, clock, range(step, step + 1), seconds=seconds)
        times.append(meter.row()["step_time"])
    assert times == [60.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "overrides", [(), ("--model.tie_embeddings=false",)], ids=["tied", "untied"]
)
def test_mfu_is_the_share_of_the_peak(overrides, clock, monkeypatch):
    monkeypatch.setattr(progress, "peak_flops", lambda mesh: 1e9)
    meter = Meter(program(*overrides), 0)
    run(meter, clock, range(1, 2), seconds=4.0)
    products = 257 * 16 + 2 * (4 * 16 * 16 + 2 * 16 * 64)  # output, then two layers
    flops = 6 * products + 12 * 2 * 16 * 16
    assert meter.row()["mfu"] == pytest.approx(flops * 128 / 4.0 / 1e9)


def test_a_row_of_float16_has_its_scale_and_none_for_what_is_not_finite(clock):
    meter = Meter(program(), 0)
    clock.now += 1.0
    meter.add(1, {**metrics(float("nan"), float("inf"), 3, 2), "loss_scale": jnp.float32(8)})
    row = meter.row()
    assert (row["loss"], row["grad_norm"], row["skipped"], row["loss_scale"]) == (None, None, 3, 8)
    assert "skipped_in_row" not in row
    json.loads(json.dumps(row, allow_nan=False))


def test_skipped_steps_are_shown():
    text = shown(terminal=False, rows=[{**ROW, "loss": None, "skipped": 2}, {**ROW, "skipped": 0}])
    assert text.splitlines() == [
        "step 20/30  loss not finite  12,346 tokens/s  2 skipped  1.5 min left",
        "step 20/30  loss 3.1416  12,346 tokens/s  1.5 min left",
    ]


def test_too_many_skipped_steps_are_found_at_the_next_at_the_latest():
    line = (
        "loss is nan at step 2, the last of 10 in a row that were skipped "
        r"\(train.max_skipped=10\); the last good checkpoint is step 1;"
    )

    def meter() -> Meter:
        meter = Meter(program(), 0, saved=lambda: [1])
        meter.add(1, metrics(float("nan"), skipped=9, in_row=9))
        meter.add(2, metrics(float("nan"), skipped=10, in_row=10))
        return meter

    for find in (
        Meter.row,
        Meter.wait,
        lambda meter: meter.skipping,
        lambda meter: meter.check({}),
        lambda meter: meter.add(3, metrics()),
    ):
        with pytest.raises(UserError, match=line):
            find(meter())
    with pytest.raises(UserError, match=line), meter().paused():
        pytest.fail("a checkpoint would be saved here")


def test_a_run_knows_that_it_is_skipping_and_which_parameter_is_no_number():
    meter = Meter(program(), 0)
    meter.add(1, metrics())
    assert not meter.skipping
    meter.add(2, metrics(float("nan"), skipped=1, in_row=1))
    assert meter.skipping
    meter.check({"w": jnp.ones(3)})
    with pytest.raises(UserError, match="parameter b is not finite after step 2, which is not"):
        meter.check({"w": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])})


def test_finite_numbers_pass():
    check_finite(1, {"loss": 1e30, "grad_norm": 0.0})
    with pytest.raises(UserError, match="validation_loss is inf at step 7"):
        check_finite(7, {"loss": 1.0, "validation_loss": float("inf")})
