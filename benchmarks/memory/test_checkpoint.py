"""The benchmark of checkpoints: both ways restore what they saved, and times become speeds."""

import dataclasses

import jax.numpy as jnp
import pytest
import tiny

from benchmarks.lib.measure import DifferentError
from benchmarks.memory import checkpoint
from jaxptd.errors import UserError
from jaxptd.mesh import Layout


@pytest.mark.slow
def test_both_ways_restore_what_they_saved(tmp_path):
    config = tiny.config(Layout(dp=2, tp=2))
    size, found = checkpoint.measure(config, tmp_path, repeats=1)
    assert [way.name for way in found] == ["jaxptd", "orbax"]
    assert size > 12 * 4000  # three float32 numbers for each of more than 4000 parameters
    for way in found:
        assert [len(seconds) for seconds in way.seconds.values()] == [1] * len(checkpoint.TIMES)
        blocking, in_all = (way.seconds[f"save behind: {n}"][0] for n in ("blocking", "in all"))
        assert 0 < blocking < in_all
    assert list(tmp_path.iterdir()) == []
    lines = checkpoint.section(config, size, found).splitlines()
    assert lines[0] == "## 4 devices, layout dp=2 tp=2"
    assert [line.count("|") for line in lines[4:]] == [len(checkpoint.HEAD) + 1] * 6


def test_another_state_is_noticed(tmp_path):
    state = {"w": jnp.arange(4.0)}
    way = list(checkpoint.ways(state))[1]
    wrong = dataclasses.replace(way, restore=lambda _: {"w": jnp.arange(4.0) + 1})
    with pytest.raises(DifferentError, match="orbax restored another state"):
        wrong.turn(state, tmp_path)


def test_medians_and_speeds():
    state = {"w": jnp.arange(4.0)}
    ours, plain = checkpoint.ways(state)
    for way, factor in ((ours, 1), (plain, 2)):
        for name in checkpoint.TIMES:
            way.seconds[name] = [factor * s for s in (4.0, 1.0, 9.0)]
    config = tiny.config(Layout())
    text = checkpoint.section(config, 2_000_000_000, [ours, plain])
    assert "| save | 4.00 | 500 | 8.00 | 250 | **0.50** |" in text
    assert "| save behind: blocking | 4.00 |  | 8.00 |  | **0.50** |" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repeats", "0"], "--repeats 0: measure 1 turn or more"),
        (["--folder", "nowhere"], "--folder nowhere is not there; name a folder"),
    ],
)
def test_bad_options_are_one_line(words, message):
    with pytest.raises(UserError, match=message):
        checkpoint.main(words)
