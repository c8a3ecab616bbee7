"""A run that cannot fit is refused before it starts; one that runs out of memory is explained."""

import jax
import pytest

import jaxptd
from jaxptd.analysis import memory_needs
from jaxptd.errors import UserError
from jaxptd.step import Program

HUGE = ("--model.num_layers=128", "--model.hidden_size=36864", "--model.num_heads=288")


def test_two_trillion_parameters_are_one_line_and_nothing_is_written(train) -> None:
    line = train.refused(*HUGE)
    assert "error: a training step needs at least 33.4 TB on a device (state 25." in line
    assert not train.run_dir.path.exists()


def test_a_model_that_cannot_be_verified_is_refused_before_anything_is_made(monkeypatch) -> None:
    monkeypatch.setattr(memory_needs, "host_memory", lambda: 500_000)
    config = jaxptd.load_config("test-tiny", ["--layout.tp=2"])
    with pytest.raises(UserError, match=r"at least \S+ kB .* this machine has 500.0 kB; use"):
        jaxptd.verify(config)


def test_a_step_that_runs_out_of_memory_says_what_helps(train, monkeypatch) -> None:
    def step(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 21474836480 bytes."
        )

    monkeypatch.setattr(Program, "train_step", step)
    line = train.refused("--layout.dp=2")
    assert "memory ran out for 21474836480 bytes more: by the formula a training step" in line
    assert "use layout.tp=2 and layout.dp=1 (" in line or "use layout.zero=3 (" in line
