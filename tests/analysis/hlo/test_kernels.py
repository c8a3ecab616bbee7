"""The kernels of a scheduled program, and the bytes they move."""

import pytest

from jaxptd.analysis.hlo.kernels import (
    HOST,
    OTHER,
    PRODUCT,
    flops_of,
    in_8_bits,
    kernels,
    largest,
    summary,
)
from jaxptd.analysis.hlo.text import Pipeline, parse

KERNELS = """
%fused (p0: f32[8,256], p1: s32[]) -> f32[1,256] {
  %p0 = f32[8,256]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[1,256]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,256}
}

%product (p0: f32[256,256], p1: f32[256,256]) -> f32[256,256] {
  %p0 = f32[256,256]{1,0} parameter(0)
  %p1 = f32[256,256]{1,0} parameter(1)
  ROOT %dot = f32[256,256]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}
}

%body (p: (s32[], f32[8,256])) -> (s32[], f32[8,256]) {
  %p = (s32[], f32[8,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,256]{1,0} get-tuple-element(%p), index=1
  %row = f32[1,256]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8,256]) tuple(%i, %x)
}

ENTRY %main (a: f32[256,256], s: (s32[], f32[8,256])) -> f32[256,256] {
  %a = f32[256,256]{1,0} parameter(0)
  %s = (s32[], f32[8,256]) parameter(1)
  %w = (s32[], f32[8,256]) while(%s), condition=%c, body=%body, b={"known_trip_count":{"n":"5"}}
  %n = f32[256,256]{1,0} negate(%a)
  ROOT %m = f32[256,256]{1,0} fusion(%n, %n), kind=kCustom, calls=%product
}
"""


def test_kernels_are_counted_with_what_they_read() -> None:
    found = summary(KERNELS)
    assert found.count == 5 + 1 + 1
    one_row = 2 * 256 * 4 + 4  # one row read, one written, plus the index
    assert found.other_bytes == 5 * one_row + 2 * 256 * 256 * 4  # excludes the matmul's bytes


def test_the_largest_kernels_are_those_that_are_counted() -> None:
    rows = largest(KERNELS, 9)
    assert sum(size for size, _, _ in rows) == summary(KERNELS).other_bytes
    assert sum(count for _, count, _ in rows) == summary(KERNELS).count - 1  # no matmuls
    assert [size for size, _, _ in rows] == sorted((size for size, _, _ in rows), reverse=True)
    assert largest(KERNELS, 1) == rows[:1]


def test_loops_of_stages_count_with_their_mean_trips() -> None:
    """Two stages: one runs the loop three times, the other four."""
    known = 'b={"known_trip_count":{"n":"5"}}'
    text = KERNELS.replace(known, 'metadata={op_name="jit(step)/forward/while"}')
    found = summary(text, Pipeline(2, {"forward": 7}))
    assert found.count == round(7 / 2) + 1 + 1
    one_row = 2 * 256 * 4 + 4
    assert found.other_bytes == 7 * one_row // 2 + 2 * 256 * 256 * 4
    assert summary(text).count == 1 + 1 + 1  # without the pipeline, the loop's length is unknown


def test_memory_that_a_loop_will_fill_is_no_kernel() -> None:
    found = '  %m = f32[8,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
    entry = "  %a = f32[256,256]{1,0} parameter(0)\n"
    assert summary(KERNELS.replace(entry, entry + found)) == summary(KERNELS)


@pytest.mark.parametrize(("memory", "others"), [("", 2), (":S(5)", 0)])
def test_a_copy_reads_and_writes_once_and_one_of_the_host_is_of_its_own_kind(
    memory: str, others: int
) -> None:
    """The result of `copy-start` includes the array that it reads."""
    types = f"(f32[256,256]{{1,0}}, f32[256,256]{{1,0{memory}}}, u32[])"
    copy = f"  %c = {types} copy-start(%n)\n  %d = f32[256,256]{{1,0}} copy-done(%c)\n"
    text = KERNELS.replace("  ROOT %m", f"{copy}  ROOT %m")
    assert summary(text).other_bytes - summary(KERNELS).other_bytes == others * 256 * 256 * 4
    (copied,) = (each for each in kernels(text) if each.instruction.kind == "copy-start")
    assert copied.bytes == 2 * 256 * 256 * 4
    assert copied.kind == (HOST if memory else OTHER)


BRANCHES = """
%usual (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  ROOT %u = f32[4,4]{1,0} negate(%p), metadata={op_name="jit(step)/moe/cond/branch_1_fun/neg"}
}

%other (p: f32[4,4]) -> f32[4,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %q = f32[4,4]{1,0} negate(%p), metadata={op_name="jit(step)/moe/cond/branch_0_fun/neg"}
  ROOT %r = f32[4,4]{1,0} negate(%q), metadata={op_name="jit(step)/moe/cond/branch_0_fun/neg"}
}

ENTRY %main (a: f32[4,4], i: pred[]) -> f32[4,4] {
  %a = f32[4,4]{1,0} parameter(0)
  %i = pred[] parameter(1)
  ROOT %c = f32[4,4]{1,0} conditional(%i, %a, %a), true_computation=%usual, \
false_computation=%other, metadata={op_name="jit(step)/moe/cond"}
}
"""


def test_of_a_conditional_the_usual_branch_counts() -> None:
    found = summary(BRANCHES)
    assert found.count == 1
    assert found.other_bytes == 2 * 4 * 4 * 4
    assert "branch_1_fun" in largest(BRANCHES, 1)[0][2]


GROUPED = """
ENTRY %main (t: s32[3,9], x: bf16[640,32], w: bf16[4,32,48]) -> bf16[640,48] {
  %t = s32[3,9]{1,0} parameter(0)
  %x = bf16[640,32]{1,0} parameter(1)
  %w = bf16[4,32,48]{2,1,0} parameter(2)
  ROOT %y = bf16[640,48]{1,0} custom-call(%t, %x, %w), \
custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/times_kernel/pallas_call"}
}
"""


@pytest.mark.parametrize(
    ("of_rows", "name", "eight"),
    [("bf16", "times", False), ("f8e4m3fn", "times", True), ("f8e4m3fn", "outer", False)],
)
def test_grouped_matmuls_in_8_bits_are_those_of_rows(of_rows: str, name: str, eight: bool) -> None:
    operands = f"operand_layout_constraints={{s32[3,9]{{1,0}}, {of_rows}[640,32]{{1,0}}}}, custom"
    text = GROUPED.replace("custom_", f"{operands}_").replace("times_", f"{name}_")
    (kernel,) = kernels(text)
    assert in_8_bits(kernel.instruction) is eight


def test_a_grouped_matmul_is_a_product_of_all_its_rows() -> None:
    (kernel,) = kernels(GROUPED)
    assert kernel.kind == PRODUCT
    computations, entry = parse(GROUPED)
    scope = {each.name: each for each in computations[entry]}
    assert flops_of(kernel.instruction, scope, computations) == 2 * 640 * 32 * 48
