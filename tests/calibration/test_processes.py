"""Calibrates with several processes, each standing for a node with its devices."""

from pathlib import Path

import pytest
from together import Together

from jaxptd.hardware.table import read_figures

CODE = """
import functools
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from jaxptd.calibration import timer as machine
from jaxptd.commands import calibrate as command
from jaxptd.calibration.suite import SampleSizes
from jaxptd.errors import run_command
from jaxptd.plan import main

machine._node = lambda device: device.process_index
command.CPU = SampleSizes(((256, 256, 256),), (2**18,), ((64, 2),), (2**18,))
command.Timer = functools.partial(command.Timer, repetitions=2, long_enough=0.002)
if __name__ == "__main__":
    run_command(main)
"""


@pytest.mark.slow
def test_the_network_between_two_processes_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "two.yaml"
    argv = ["calibrate", "--out", str(out), "--gpu", "h200", "--quiet"]
    first, second = Together(CODE, argv, tmp_path).ended()
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert second.lines == []
    figures = read_figures(out)["two"]
    shares = {name: figure for name, figure in figures.items() if name.endswith("_share")}
    assert {figure.kind for figure in shares.values()} == {"measured"}
    assert "4 simulated CPU devices" in figures["network_share"].source
    assert "all-reduce of 256 KiB over 2 nodes" in out.read_text()
