"""XLA's options: compiler options on GPUs only, one permute at a time on simulated devices."""

import types

import numpy as np
import pytest
import tiny

from jaxptd.config.xla import compiler_options
from jaxptd.mesh import Layout, on_gpus


@pytest.mark.parametrize(
    ("platform", "layout", "given"),
    [
        ("cuda", Layout(cp=4), 1),
        ("cuda", Layout(cp=2), 0),
        ("cuda", Layout(tp=4), 0),
        ("cuda", Layout(row=1, col=2), 1),
        ("cuda", Layout(row=2, col=2), 1),
        ("cpu", Layout(cp=4), 0),
        ("cpu", Layout(row=2, col=2), 0),
    ],
    ids=str,
)
def test_two_collectives_may_be_under_way_at_once_on_gpus(platform, layout, given) -> None:
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    assert len(compiler_options(tiny.config(layout), on_gpus=on_gpus(mesh)) or {}) == given


def test_8_bit_products_are_asked_for_on_gpus() -> None:
    config = tiny.config(Layout(cp=4), products="fp8")
    for platform, given in (("cuda", False), ("cpu", None)):
        mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
        options = compiler_options(config, on_gpus=on_gpus(mesh)) or {}
        assert options.get("xla_gpu_enable_triton_gemm") is given
