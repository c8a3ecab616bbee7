"""Runs code in two real processes: gloo on loopback, two simulated devices each."""

import socket
import subprocess
import sys
import textwrap

from checkpointing import ROOT

START = """
    import os, resource, signal, sys
    from pathlib import Path
    sys.path[:0] = [{root!r}, {tests!r}]
    import jax
    process, folder = int(sys.argv[1]), sys.argv[3]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{{sys.argv[2]}}", 2, process)
    from checkpointing import abstract, assert_same_shards, make_state
    from jaxptd.checkpoint import CheckpointError, Checkpoints
    from jaxptd.stores import place
    folder = place(folder)
    checkpoints = Checkpoints(folder, keep=9)
    target = abstract(make_state(0, 2, 2))
"""
# Goes on from step 1, which one process has saved.
RESTORES_ONE_AND_SAVES_TWO = """
    step, state = checkpoints.restore_newest(target, report=print)
    assert step == 1
    assert_same_shards(state, make_state(1, 2, 2))
    checkpoints.save(2, make_state(2, 2, 2), description={"by": 2})
    assert checkpoints.steps() == [1, 2]
    assert_same_shards(checkpoints.restore(2, target), make_state(2, 2, 2))
"""


def two_processes(*codes, folder):
    """Runs code in two processes; `make_state(seed, 2, 2)` shards its arrays over both."""
    start = START.format(root=str(ROOT), tests=str(ROOT / "tests" / "helpers"))
    code = "".join(map(textwrap.dedent, (start, *codes)))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "error", "-c", code]
    running = [
        subprocess.Popen(
            [*command, str(process), port, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        outputs = [each.communicate(timeout=120) for each in running]
    finally:
        for each in running:
            each.kill()
    for each, (_, error) in zip(running, outputs, strict=True):
        assert each.returncode == 0, error
    return [_without_gloo(out) for out, _ in outputs], [_without_gloo(err) for _, err in outputs]


def _without_gloo(text):
    """The lines of a text without gloo's, parts of which two threads may mix."""
    words = ("[Gloo]", "peer ranks")
    return [line for line in text.splitlines() if not any(word in line for word in words)]
