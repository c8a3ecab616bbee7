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
"""


def two_processes(code, folder):
    """Runs code in two processes; `make_state(seed, 2, 2)` shards its arrays over both."""
    start = START.format(root=str(ROOT), tests=str(ROOT / "tests" / "helpers"))
    code = textwrap.dedent(start) + textwrap.dedent(code)
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
