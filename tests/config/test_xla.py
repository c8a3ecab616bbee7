"""XLA's options: compiler options on GPUs only, one permute at a time on simulated devices."""

import types

import numpy as np
import pytest
import tiny

from jaxptd.config.xla import GPU_MEMORY, compiler_options
from jaxptd.mesh import Layout, on_gpus


@pytest.mark.parametrize(
    ("platform", "layout", "given"),
    [
        ("cuda", Layout(cp=4), 2),
        ("cuda", Layout(cp=2), None),
        ("cuda", Layout(tp=4), None),
        ("cuda", Layout(row=1, col=2), 2),
        ("cuda", Layout(row=2, col=2), 2),
        ("cpu", Layout(cp=4), None),
        ("cpu", Layout(row=2, col=2), None),
    ],
    ids=str,
)
def test_two_collectives_may_be_under_way_at_once_on_gpus(platform, layout, given) -> None:
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    options = compiler_options(tiny.config(layout), on_gpus=on_gpus(mesh)) or {}
    assert options.get("xla_gpu_experimental_parallel_collective_overlap_limit") == given


def test_the_scheduler_counts_on_the_memory_that_a_run_takes() -> None:
    """XLA: 0.80 of the memory, times the option in per cent."""
    options = compiler_options(tiny.config(Layout()), on_gpus=True) or {}
    assert 0.80 * options["xla_gpu_memory_limit_slop_factor"] / 100 == pytest.approx(GPU_MEMORY)


def test_8_bit_products_are_asked_for_on_gpus() -> None:
    config = tiny.config(Layout(cp=4), products="fp8")
    for platform, given in (("cuda", False), ("cpu", None)):
        mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
        options = compiler_options(config, on_gpus=on_gpus(mesh)) or {}
        assert options.get("xla_gpu_enable_triton_gemm") is given
