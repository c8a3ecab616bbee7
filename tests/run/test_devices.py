"""Flags for simulated devices, and the share of a GPU's memory."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
from turns import slow

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.config.xla import KERNELS_UNSPLIT, ONE_PERMUTE_AT_A_TIME
from jaxptd.errors import UserError
from jaxptd.mesh import Layout
from jaxptd.run import devices
from jaxptd.run.devices import FRACTIONS, prepare

RUN_RSA = """
import jax, numpy as np
from jax.sharding import PartitionSpec as P
from jaxptd.config import Config
from jaxptd.run.devices import prepare
from jaxptd.attention.kernel import Dropout, Scores
from jaxptd.attention.xla import Xla
from jaxptd.mesh import Layout, make_mesh
from jaxptd.attention.attend import AttentionInputs, Ring
from jaxptd.ring_attention import attend

layout = Layout(cp=8, ring="rsa")
prepare(Config(layout=layout))

def both_ways(q, k, v, do):
    how = dict(ring=Ring("cp", "rsa"), kernel=Xla(Dropout(0.0, None)), scores=Scores(32**-0.5))
    o, back = jax.vjp(lambda *qkv: attend(*qkv, AttentionInputs(), **how), q, k, v)
    return o, *back(do)

cut, mesh = P(None, "cp"), make_mesh(layout)
run = jax.jit(jax.shard_map(both_ways, mesh=mesh, in_specs=cut, out_specs=cut))
arrays = np.random.default_rng(0).standard_normal((4, 1, 2048, 4, 32)).astype(np.float32)
for _ in range(80):
    found = jax.block_until_ready(run(*arrays))
print(np.isfinite(found[1]).all())
"""


@pytest.mark.slow
def test_permutes_that_wait_for_nothing_of_each_other_do_not_meet() -> None:
    """Uses large arrays, for which XLA runs independent operations at the same time. Without the
    flag the process hangs or aborts, though not always.
    """
    found = subprocess.run(
        [sys.executable, "-c", RUN_RSA], capture_output=True, text=True, timeout=300
    )
    assert found.stdout == "True\n", found.stderr[-500:]


@pytest.mark.parametrize(
    ("layout", "given"),
    [
        (Layout(pp=2), True),
        (Layout(cp=2), True),
        (Layout(row=2), True),
        (Layout(dp=2, tp=2), False),
        (Layout(dp=2, tp=2, sequence_parallel=True), False),
        (Layout(tp=2, sequence_parallel=True, collective_matmul=True), True),
    ],
    ids=str,
)
def test_where_anything_is_permuted_it_is_one_at_a_time_and_in_order(
    layout, given, monkeypatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    prepare(Config(model=ModelConfig(num_layers=2, num_heads=4), layout=layout))
    for flag in (ONE_PERMUTE_AT_A_TIME, KERNELS_UNSPLIT):
        assert (flag in os.environ["XLA_FLAGS"]) == given


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that JAX has not initialized, with no memory share set in the environment."""
    for name in FRACTIONS:
        monkeypatch.setenv(name, "")
    stats = {"bytes_limit": 73_600_000_000}
    gpu = SimpleNamespace(platform="gpu", device_kind="H100", memory_stats=lambda: stats)
    monkeypatch.setattr(devices, "_started", lambda: [gpu, gpu])
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu, gpu])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)


def test_the_share_of_a_gpus_memory_is_set_before_it_starts_and_said(gpus) -> None:
    words = "1 of 2 x H100, 73.6 GB of memory each (XLA_CLIENT_MEM_FRACTION=0.92)"
    assert prepare(Config()) == words
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.92


@pytest.mark.parametrize("name", FRACTIONS)
def test_a_share_of_memory_that_the_user_set_stays(name, gpus, monkeypatch) -> None:
    monkeypatch.setenv(name, "0.5")
    assert f"73.6 GB of memory each ({name}=0.5)" in prepare(Config())
    assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5


def test_where_jax_has_started_no_share_is_set(gpus, monkeypatch) -> None:
    def started(name: str, _: object) -> None:
        if name == "jax_num_cpu_devices":
            raise RuntimeError

    monkeypatch.setattr(jax.config, "update", started)
    assert prepare(Config()) == "1 of 2 x H100, 73.6 GB of memory each"
    assert not any(os.environ[name] for name in FRACTIONS)


def test_a_process_simulates_so_many_devices_at_most() -> None:
    layout = Layout(dp=devices.MOST + 8)
    train = TrainConfig(global_batch_size=layout.dp)
    with pytest.raises(UserError, match=r"needs 520 devices, .* simulates at most 512 devices"):
        prepare(Config(layout=layout, train=train))


@pytest.mark.parametrize("name", [slow("verify"), "comms"])
def test_an_accelerator_that_is_not_there_is_one_line(name) -> None:
    command = [sys.executable, "-m", "jaxptd", name, "--train.platform", "auto"]
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: JAX cannot start its devices: ")
    assert ended.stderr.endswith("use train.platform=cpu to simulate devices\n")
    assert "cuda" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--nonsense", "XLA_FLAGS=--nonsense: Unknown flag in XLA_FLAGS: --nonsense; unset or"),
        ("--xla_force_host_platform_device_count=x", "Couldn't interpret value x for flag xla_for"),
    ],
)
def test_flags_that_xla_does_not_know_are_refused_before_it_ends_the_process(
    monkeypatch, flags, words
) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(UserError, match="^the environment has XLA_FLAGS=") as caught:
        prepare(Config())
    assert words in str(caught.value)
    assert os.environ["XLA_FLAGS"] == flags
