"""Seconds of kernels, computed by hand."""

import dataclasses
import math

import pytest

from jaxptd.costs import kernels
from jaxptd.costs.kernels import FILL, LAUNCH
from jaxptd.hardware import find_accelerator

FULL = {"products_share": 1.0, "hbm_share": 1.0}
A100 = dataclasses.replace(find_accelerator("a100"), **FULL)
SMS, PEAK, HBM = A100.multiprocessors, A100.bf16_flops, A100.hbm_bandwidth


def test_a_product_takes_whole_waves_of_tiles() -> None:
    K = 4096
    wave = 2 * 256 * 128 * (K + FILL) / (PEAK / SMS)
    machine = dataclasses.replace(A100, hbm_bandwidth=1e15)
    one = kernels.product(machine, 256 * SMS, 128, K)
    more = kernels.product(machine, 256 * (SMS + 1), 128, K)
    assert (one.resource, more.resource) == ("matmuls", "matmuls")
    assert one.seconds == pytest.approx(wave + LAUNCH)
    assert one.flops == 2 * 256 * SMS * 128 * K
    # a few smaller tiles are faster than a second wave of the largest
    assert wave < more.seconds - LAUNCH <= 2 * wave


def test_few_tiles_are_divided_along_k_over_free_multiprocessors() -> None:
    machine = dataclasses.replace(A100, hbm_bandwidth=1e15)

    def tile(K: float) -> float:
        return 2 * 64 * 64 * (K + FILL) / (PEAK / SMS * 0.65)

    def seconds(tiles: int, K: int) -> float:
        return kernels.product(machine, 64 * tiles, 64, K).seconds - LAUNCH

    assert seconds(1, 4096) == pytest.approx(tile(4096 / 16))
    assert seconds(SMS // 4, 4096) == pytest.approx(tile(4096 / 4))


@pytest.mark.parametrize(
    ("M", "N", "K", "measured"),
    [
        # From a step of 124M on an H200 (27 Nov 2026): weight gradients, and matmuls of tokens.
        (768, 768, 32768, 55.3e-6),
        (768, 3072, 32768, 206.4e-6),
        (32768, 768, 768, 55.6e-6),
        (32768, 3072, 768, 207e-6),
        (32768, 50304, 768, 3159e-6),
        (50304, 768, 32768, 3287e-6),
    ],
)
def test_products_take_as_long_as_timed_on_an_h200(M: int, N: int, K: int, measured: float) -> None:
    """Predictions are up to a quarter too slow for short K, because tiles overlap."""
    predicted = kernels.product(find_accelerator("h200"), M, N, K).seconds
    assert 1 <= predicted / measured < 1.25


def test_a_large_product_is_near_its_peak() -> None:
    large = kernels.product(A100, 16384, 16384, 16384)
    assert large.seconds == pytest.approx(2 * 16384**3 / PEAK, rel=0.02)
    half = dataclasses.replace(A100, products_share=0.5)
    slow = kernels.product(half, 16384, 16384, 16384).seconds
    assert slow - LAUNCH == pytest.approx(2 * (large.seconds - LAUNCH))


def test_a_thin_product_is_bound_by_what_it_moves() -> None:
    term = kernels.product(A100, 8192, 8192, 16, batch=3)
    moved = 3 * 2 * (8192 * 16 * 2 + 8192**2)
    assert (term.resource, term.bytes) == ("HBM", moved)
    assert term.seconds == pytest.approx(moved / HBM + LAUNCH)
    assert kernels.product(A100, 8192, 8192, 16, written=8).bytes == 2 * 8192 * 32 + 8 * 8192**2


def test_passes_over_memory() -> None:
    term = kernels.moved(A100, 1e9, 3)
    assert term.seconds == pytest.approx(1e9 / HBM + 3 * LAUNCH)
    assert (term.bytes, term.flops, term.resource) == (1e9, 0, "HBM")


def test_fused_attention_reaches_its_share_and_backward_does_five_products_for_two() -> None:
    forward = kernels.flash(A100, 1e12, 128, backward=False)
    backward = kernels.flash(A100, 1e12, 128, backward=True)
    assert forward.seconds == pytest.approx(1e12 / PEAK / A100.attention_forward_share + LAUNCH)
    assert backward.flops == 2.5 * forward.flops
    assert backward.seconds == pytest.approx(2.5e12 / PEAK / A100.attention_backward_share + LAUNCH)
    small = kernels.flash(A100, 1e12, 64, backward=False)
    assert small.seconds - LAUNCH == pytest.approx(2 * (forward.seconds - LAUNCH))
    large = kernels.flash(A100, 1e12, 256, backward=False)
    assert large.seconds == forward.seconds
    assert math.isclose(small.rate * small.seconds, 1e12)
