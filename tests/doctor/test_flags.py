"""Environment variables: values of a listed set only, and what is wrong about some."""

import pytest

from jaxptd.config.xla import process_flags
from jaxptd.doctor.flags import SHOWN, flags
from jaxptd.doctor.page import Row
from jaxptd.layout import Layout

RING = Layout(cp=2)


def verdicts(environ: dict[str, str], gpus: int = 0) -> dict[str, str]:
    return {row.name: str(row.verdict) for row in flags(environ, RING, gpus=gpus)}


@pytest.mark.parametrize(
    ("name", "bad", "good", "verdict"),
    [
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.98", "0.95", "note"),
        ("XLA_CLIENT_MEM_FRACTION", ".99", "much", "note"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "true", "note"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "default", "problem"),
        ("JAX_ENABLE_X64", "1", "0", "note"),
        ("JAX_DISABLE_JIT", "true", "false", "problem"),
        ("JAX_DEBUG_NANS", "True", "0", "note"),
        ("CUDA_LAUNCH_BLOCKING", "1", "0", "problem"),
        ("NCCL_DEBUG", "info", "WARN", "note"),
        ("NCCL_P2P_DISABLE", "1", "0", "note"),
        ("NCCL_SHM_DISABLE", "1", "0", "note"),
        ("NCCL_IB_DISABLE", "1", "0", "note"),
    ],
)
def test_values_that_harm(name, bad, good, verdict) -> None:
    assert verdicts({name: bad}) == {name: verdict}
    assert verdicts({name: good}) == {name: "ok"}


def test_every_rule_is_tested() -> None:
    marks = next(m for m in test_values_that_harm.pytestmark if m.name == "parametrize")
    rules = {name for name, rule in SHOWN.items() if rule} - {"JAX_DEFAULT_MATMUL_PRECISION"}
    assert {row[0] for row in marks.args[1]} == rules
    assert verdicts({"JAX_DEFAULT_MATMUL_PRECISION": "highest"}).popitem()[1] == "note"


def test_a_machine_with_gpus_that_are_not_used() -> None:
    assert verdicts({"JAX_PLATFORMS": "cpu"}, gpus=8) == {"JAX_PLATFORMS": "note"}
    assert verdicts({"JAX_PLATFORMS": "cuda,cpu"}, gpus=8) == {"JAX_PLATFORMS": "ok"}
    assert verdicts({"JAX_PLATFORMS": "cpu"}) == {"JAX_PLATFORMS": "ok"}
    assert verdicts({"JAX_PLATFORMS": ""}, gpus=8) == {"variables": "ok"}
    for hidden in ("", "-1"):
        visible = {"CUDA_VISIBLE_DEVICES": hidden}
        assert verdicts(visible, gpus=8) == {"CUDA_VISIBLE_DEVICES": "note"}
    assert verdicts({"CUDA_VISIBLE_DEVICES": "0"}, gpus=8) == {"CUDA_VISIBLE_DEVICES": "ok"}
    assert verdicts({"CUDA_VISIBLE_DEVICES": ""}) == {"variables": "ok"}
    library = {"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}
    assert verdicts(library, gpus=8) == {"LD_LIBRARY_PATH": "note"}
    assert verdicts(library) == {"variables": "ok"}


def test_values_of_other_variables_are_not_shown() -> None:
    environ = {"NCCL_SECRET": "s3cret", "JAX_TOKEN": "t0ken", "AWS_KEY": "k3y", "HOME": "/home/x"}
    assert flags(environ, RING, gpus=1) == [Row("other variables", "JAX_TOKEN, NCCL_SECRET")]
    (row,) = flags({"LD_LIBRARY_PATH": "/secret/cuda"}, RING, gpus=1)
    assert "secret" not in repr(row)


def test_a_flag_that_jaxptd_sets_otherwise() -> None:
    theirs = "--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_dump_to=/d"
    shown, overridden = flags({"XLA_FLAGS": theirs}, RING, gpus=0)
    assert shown == Row("XLA_FLAGS", theirs)
    assert overridden.finding.startswith("--xla_cpu_enable_concurrency_optimized_scheduler=true ")
    assert "sets it to false" in overridden.remedy
    assert len(flags({"XLA_FLAGS": theirs}, Layout(dp=2), gpus=0)) == 1  # set for rings only
    assert len(flags({"XLA_FLAGS": " ".join(process_flags(RING))}, RING, gpus=0)) == 1
