"""The time left is correct within 20 % after a minute, on a simulated clock."""

import dataclasses
import random

import jax.numpy as jnp
import pytest
import tiny

from jaxptd.mesh import Layout, make_mesh
from jaxptd.run import progress as module
from jaxptd.run.progress import Meter
from jaxptd.step import Program

METRICS = {"loss": jnp.float32(1), "skipped": jnp.int32(0), "skipped_in_row": jnp.int32(0)}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run: its sizes, and the durations of its operations in seconds."""

    steps: int = 1200
    eval_every: int = 200
    save_every: int = 400
    eval_batches: int = 8
    step: float = 0.1
    evaluation: float = 0.3
    save: float = 0.2
    compiling: float = 20.0  # a step; an evaluation takes a third
    noise: float = 0.1  # relative to each duration
    resumed: int = 0


SCENARIOS = {
    "the quickstart": Scenario(),
    "nothing but steps": Scenario(eval_every=0, save_every=0),
    "no evaluation in the first minute": Scenario(
        steps=5000, step=1.0, eval_every=100, eval_batches=32, evaluation=9.0, save_every=1000
    ),
    "evaluations take most of the time": Scenario(
        steps=600, eval_every=10, eval_batches=64, evaluation=2.5
    ),
    "saves take a third of the time": Scenario(steps=800, save_every=20, save=1.0),
    "long steps": Scenario(steps=300, step=8.0, eval_every=50, evaluation=20.0, save=30.0),
    "noise": Scenario(noise=0.6),
    "resumed": Scenario(steps=3000, resumed=1100),
}


class Clock:
    """A clock that the simulation sets."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Simulation:
    """A run's loop, as in `train.py`, with a clock instead of devices."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self.scenario, self.clock, self.choose = scenario, clock, random.Random(0)
        config = tiny.config(Layout())
        train = dataclasses.replace(
            config.train,
            steps=scenario.steps,
            eval_every=scenario.eval_every,
            eval_batches=scenario.eval_batches,
        )
        saving = dataclasses.replace(config.checkpoint, every=scenario.save_every)
        config = dataclasses.replace(config, train=train, checkpoint=saving)
        self.meter = Meter(Program(config, make_mesh(config.layout)), scenario.resumed)

    def spend(self, seconds: float) -> None:
        noise = self.scenario.noise
        self.clock.now += seconds * self.choose.uniform(1 - noise, 1 + noise)

    def run(self) -> list[tuple[float, float | None]]:
        """(time, estimated seconds left) after each step."""
        found, scenario, compiled = [], self.scenario, 0
        for step in range(scenario.resumed + 1, scenario.steps + 1):
            first = step == scenario.resumed + 1
            self.spend(scenario.step + first * scenario.compiling)
            self.meter.add(step, METRICS)
            if due(step, scenario.eval_every, scenario.steps):
                with self.meter.paused("evaluation"):
                    self.spend(scenario.evaluation + (not compiled) * scenario.compiling / 3)
                    compiled = 1
            if due(step, scenario.save_every, scenario.steps):
                with self.meter.paused("save"):
                    self.spend(scenario.save)
            found.append((self.clock.now, self.meter.seconds_left()))
        return found


def due(step: int, every: int, end: int) -> bool:
    return every > 0 and (step % every == 0 or step == end)


@pytest.mark.parametrize("name", SCENARIOS)
def test_after_a_minute_of_steps_it_is_right_within_20_percent(name, monkeypatch):
    clock, scenario = Clock(), SCENARIOS[name]
    monkeypatch.setattr(module, "time", clock)
    estimates = Simulation(scenario, clock).run()
    begin, end = estimates[0][0], estimates[-1][0]
    assert end - begin > 100  # otherwise nothing is tested
    later = [(now, left) for now, left in estimates if now > begin + 60]
    assert estimates[-1][1] == 0.0
    for now, left in later[:-1]:
        # Near the end one evaluation or save is a large share of what is left.
        slack = scenario.evaluation + scenario.save + scenario.step
        assert left == pytest.approx(end - now, rel=0.2, abs=1.5 * slack), now - begin


def test_before_a_step_is_measured_it_is_unknown(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    simulation = Simulation(Scenario(steps=3), clock)
    assert simulation.meter.seconds_left() is None
    assert [left is None for _, left in simulation.run()] == [True, True, False]
