"""XLA's options for a step: only on GPUs, and their effect on permutes."""

import math
import re
import types
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from turns import slow

from jaxptd import collectives
from jaxptd.analysis.jaxprs import equations, traced
from jaxptd.config.xla import GPU_MEMORY
from jaxptd.mesh import Layout, on_gpus
from jaxptd.step import Program
from jaxptd.step.program import compiler_options


@pytest.mark.parametrize(
    ("platform", "layout", "given"),
    [
        ("cuda", Layout(cp=4), 2),
        ("cuda", Layout(cp=2), None),
        ("cuda", Layout(tp=4), None),
        ("cuda", Layout(row=1, col=2), 2),
        ("cuda", Layout(row=2, col=2), 2),
        ("cuda", Layout(dp=2, zero=2), 2),
        ("cuda", Layout(dp=2, zero=1), 2),
        ("cuda", Layout(dp=2), None),
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


@pytest.mark.parametrize(
    ("layout", "choice", "off"),
    [
        (Layout(dp=2, zero=1), {"micro_batches": 1}, True),
        (Layout(dp=2, zero=1), {"micro_batches": 2}, True),
        (Layout(dp=2, zero=1), {"micro_batches": 2, "scan_layers": False}, False),
        (Layout(dp=2, zero=2), {"micro_batches": 1}, True),
        (Layout(dp=2, zero=2), {"micro_batches": 2}, True),
        (Layout(dp=2, zero=2), {"micro_batches": 1, "scan_layers": False}, False),
        (Layout(dp=2, zero=3), {"micro_batches": 1}, False),
        (Layout(dp=2, pp=2, zero=2), {"micro_batches": 1}, False),
    ],
    ids=str,
)
def test_copies_of_stacks_are_kernels_where_a_loop_has_its_blocks(layout, choice, off) -> None:
    options = compiler_options(tiny.config(layout, **choice), on_gpus=True) or {}
    name = "dynamic-slice-copy-fusion-async-wrapper"
    assert (options.get("xla_disable_hlo_passes") == name) == off


@pytest.mark.parametrize(
    ("layout", "choice", "two"),
    [
        (Layout(dp=2, zero=3), {}, True),
        (Layout(offload="parameters"), {}, True),
        (Layout(dp=2, zero=3), {"scan_layers": False}, False),
        (Layout(dp=2, zero=2), {"micro_batches": 1}, False),
        (Layout(dp=2, pp=2, zero=3), {}, False),
    ],
    ids=str,
)
def test_two_trips_are_one_where_a_loop_fetches_layers(layout, choice, two) -> None:
    options = compiler_options(tiny.config(layout, **choice), on_gpus=True) or {}
    assert options.get("xla_gpu_enable_while_loop_double_buffering", False) is two


@pytest.mark.parametrize(
    ("offload", "eliminated"), [((), True), ("parameters", True), ("optimizer", False)], ids=str
)
def test_stacks_are_filled_with_zeros_where_moments_are_on_the_host(offload, eliminated) -> None:
    options = compiler_options(tiny.config(Layout(offload=offload)), on_gpus=True) or {}
    assert options["xla_gpu_enable_dus_accumulator_zero_init_elimination"] is eliminated


def test_the_scheduler_counts_on_the_memory_that_a_run_takes() -> None:
    """XLA uses 0.80 of the memory, times the option in percent."""
    options = compiler_options(tiny.config(Layout()), on_gpus=True) or {}
    assert 0.80 * options["xla_gpu_memory_limit_slop_factor"] / 100 == pytest.approx(GPU_MEMORY)


def test_8_bit_products_are_asked_for_on_gpus() -> None:
    config = tiny.config(Layout(cp=4), products="fp8")
    for platform, given in (("cuda", False), ("cpu", None)):
        mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
        options = compiler_options(config, on_gpus=on_gpus(mesh)) or {}
        assert options.get("xla_gpu_enable_triton_gemm") is given


# ---- the devices that a permute connects ---------------------------------------------------------

Groups = frozenset[frozenset[int]]
JOINED = "xla_gpu_collective_permute_connected_components"
RING_STEPS = {"sequence_parallel": True, "collective_matmul": True}


def connected(line: np.ndarray, pairs: Iterable[tuple[int, int]]) -> Groups:
    """Groups of a line's devices that pairs of places connect."""
    group = {place: {place} for place in range(len(line))}
    for source, target in pairs:
        both = group[source] | group[target]
        group |= dict.fromkeys(both, both)
    return frozenset(frozenset(int(line[place]) for place in each) for each in group.values())


def divisions(program: Program) -> set[Groups]:
    """The groups into which each permute of a step divides all devices."""
    sizes: Mapping[str, int] = {str(axis): n for axis, n in program.mesh.shape.items()}
    numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    found = set()
    for each in equations(traced(program).jaxpr):
        if each.primitive.name == "ppermute":
            axes = each.params["axis_name"]
            axes = [str(axis) for axis in (axes if isinstance(axes, tuple) else (axes,))]
            last = np.moveaxis(numbers, [list(sizes).index(a) for a in axes], range(-len(axes), 0))
            lines = last.reshape(-1, math.prod(sizes[axis] for axis in axes))
            parts = [connected(line, each.params["perm"]) for line in lines]
            found.add(frozenset().union(*parts))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, tp=2, **RING_STEPS),
        slow(Layout(pp=3, cp=2)),
        slow(Layout(row=2, col=2, cp=2, matmul2d="fox")),
        Layout(row=2, col=2, matmul2d="cannon"),
        slow(Layout(cp=4, ring="rsa")),
        slow(Layout(cp=3)),
        slow(Layout(pp=2)),
        slow(Layout(pp=4, schedule="interleaved")),
        slow(Layout(pp=3, schedule="interleaved")),
        slow(Layout(pp=4, schedule="zb-v")),
        slow(Layout(pp=2, tp=2, cp=2, schedule="zb-v", **RING_STEPS)),
        slow(Layout(pp=2, row=2, col=2)),
        slow(Layout(row=2, col=4, matmul2d="summa")),
    ],
    ids=str,
)
def test_permutes_join_what_they_connect_where_no_group_is_in_two_divisions(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA raises an error, or deadlocks, if one group belongs to two divisions."""
    monkeypatch.setattr(collectives, "permutes_natively", lambda: True)
    sizes = {"num_layers": 12, "hidden_size": 48, "num_heads": 12, "seq_length": 24, "batch": 24}
    program = tiny.program(layout, **sizes, micro_batches=12 if layout.pp > 1 else 1)
    found = divisions(program)
    assert found
    groups = [group for division in found for group in division]
    options = compiler_options(program.config, on_gpus=True) or {}
    assert options.get(JOINED, False) is (len(groups) == len(set(groups)))


def test_where_nothing_is_permuted_the_option_is_not_given() -> None:
    for layout in (Layout(tp=4), Layout(dp=4, zero=3)):
        assert JOINED not in (compiler_options(tiny.config(layout), on_gpus=True) or {})


def test_products_and_xla_s_own_kernels_are_not_split_over_threads() -> None:
    """XLA would otherwise start a collective before the preceding loop has ended."""
    x = jnp.ones((1024, 1024))
    compiled = jax.jit(lambda x: jnp.tanh(x) @ x).lower(x).compile().as_text()
    assert " dot(" in compiled
    assert "ynn" not in compiled
    assert not re.search(r'outer_dimension_partitions":\["', compiled)
