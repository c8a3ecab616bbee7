"""Estimated times of a scheduled program: kernels in order, overlapped with collectives."""

import pytest

from jaxptd.analysis.hlo.kernels import ATTENTION, OTHER, PRODUCT, flops_of, kernels, summary
from jaxptd.analysis.hlo.text import Pipeline, parse
from jaxptd.analysis.hlo.timeline import AxisNames, Rates, Times, estimate

SIZES = {"dp": 2, "tp": 2}
SIZE = 64 * 4  # bytes of f32[8,8]


def link(axes: AxisNames) -> tuple[str, float]:
    return ("fast", SIZE) if axes == ("tp",) else ("slow", SIZE / 4)


# A matmul, a kernel that moves one array and a send over tp take 1 s each; a send over dp 4 s.
RATES = Rates(flops=2 * 8**3, flops_8_bits=4 * 8**3, attention=8**3, memory=SIZE, link=link)
FAST = Rates(flops=2 * 8**3, flops_8_bits=4 * 8**3, attention=8**3, memory=1e12, link=link)
TP, DP = "source_target_pairs={{0,1},{1,0}}", "source_target_pairs={{0,2},{2,0}}"
PRODUCT_OF_8 = """
%product (p0: f32[8,8], p1: f32[8,8]) -> f32[8,8] {
  %p0 = f32[8,8]{1,0} parameter(0)
  %p1 = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def program(*lines: str, before: str = "") -> str:
    body = "".join(f"  {line}\n" for line in lines)
    head = "ENTRY %main (x: f32[8,8]) -> f32[8,8] {\n  %x = f32[8,8]{1,0} parameter(0)\n"
    return f"{PRODUCT_OF_8}{before}\n{head}{body}}}\n"


def start(name: str, pairs: str = TP) -> str:
    return f"%{name} = (f32[8,8], f32[8,8]) collective-permute-start(%x), {pairs}"


def done(name: str) -> str:
    return f"%{name}.done = f32[8,8]{{1,0}} collective-permute-done(%{name})"


def product(name: str) -> str:
    return f"%{name} = f32[8,8]{{1,0}} fusion(%x, %x), kind=kOutput, calls=%product"


def times(*lines: str, rates: Rates = FAST, before: str = "") -> Times:
    return estimate(program(*lines, before=before), rates, SIZES)


def test_kernels_take_their_flops_or_their_bytes() -> None:
    copy = "%c = f32[8,8]{1,0} copy(%x)"
    assert times(product("a"), product("b")).kernels[PRODUCT] == pytest.approx(2)
    found = times(product("a"), copy, rates=RATES)
    assert found.kernels[PRODUCT] == pytest.approx(3)  # reads two arrays, writes one
    assert found.kernels[OTHER] == pytest.approx(2)
    assert found.total == pytest.approx(5)


def test_what_is_sent_beside_kernels_is_hidden_as_long_as_they_run() -> None:
    apart = times(start("a"), done("a"), product("b"))
    assert (apart.exposed["tp",], apart.hidden, apart.total) == (1, 0, pytest.approx(2))
    beside = times(start("a"), product("b"), done("a"))
    assert (beside.exposed["tp",], beside.hidden, beside.total) == (0, 1, pytest.approx(1))
    longer = times(start("a", DP), product("b"), done("a"))
    assert longer.sent["dp",] == pytest.approx(4)
    assert longer.exposed["dp",] == pytest.approx(3)
    assert longer.hidden == pytest.approx(1 / 4)


def test_a_link_sends_one_at_a_time_and_links_send_at_once() -> None:
    both = times(start("a"), start("b"), product("c"), done("a"), done("b"))
    assert both.exposed["tp",] == pytest.approx(1)
    two = times(start("a", DP), start("b"), product("c"), done("b"), done("a"))
    assert (two.exposed["tp",], two.exposed["dp",]) == (0, pytest.approx(3))


def test_what_is_not_started_ahead_is_waited_for() -> None:
    found = times(product("b"), f"%a = f32[8,8]{{1,0}} collective-permute(%x), {TP}")
    assert found.exposed["tp",] == pytest.approx(1)


def test_loops_take_their_body_at_each_trip_and_a_pipelines_the_mean_of_stages() -> None:
    body = f"""
%body (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  {start("a")}
  {product("b")}
  ROOT {done("a")}
}}
"""
    known = 'while(%x), condition=%c, body=%body, b={"known_trip_count":{"n":"3"}}'
    found = times(f"%w = f32[8,8]{{1,0}} {known}", before=body)
    assert (found.kernels[PRODUCT], found.sent["tp",]) == (pytest.approx(3), 3)
    named = 'while(%x), condition=%c, body=%body, metadata={op_name="jit(f)/layers/while"}'
    text = program(f"%w = f32[8,8]{{1,0}} {named}", before=body)
    found = estimate(text, FAST, SIZES, Pipeline(2, {"layers": 10}))
    assert found.kernels[PRODUCT] == pytest.approx(5)


EIGHT = """ENTRY %main (x: f8e4m3fn[16,32], y: f8e5m2[4,32], s: f32[]) -> bf16[16,4] {
  %x = f8e4m3fn[16,32]{1,0} parameter(0)
  %y = f8e5m2[4,32]{1,0} parameter(1)
  %s = f32[] parameter(2)
  ROOT %p = (bf16[16,4]{1,0}, s8[99]{0}) custom-call(%x, %y, %s, %s), \
custom_call_target="__cublas$lt$matmul$f8", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""


def test_products_of_8_bits_have_a_rate_of_their_own() -> None:
    product = 2 * 16 * 4 * 32
    found = estimate(EIGHT, FAST, SIZES)
    assert found.kernels[PRODUCT] == pytest.approx(product / FAST.flops_8_bits)
    slow = Rates(1e12, 1e12, 1.0, memory=1.0, link=link)
    bytes_moved = 16 * 32 + 4 * 32 + 2 * 4 + 2 * 16 * 4 + 99
    assert estimate(EIGHT, slow, SIZES).kernels[PRODUCT] == pytest.approx(bytes_moved)


CUBLAS = """ENTRY %main (x: bf16[16,32], y: bf16[4,32]) -> bf16[16,4] {
  %x = bf16[16,32]{1,0} parameter(0)
  %y = bf16[4,32]{1,0} parameter(1)
  ROOT %p = (bf16[16,4]{1,0}, s8[99]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}
"""
FMHA = """ENTRY %main (q: bf16[1,2,64,16]) -> bf16[1,2,64,16] {
  %q = bf16[1,2,64,16]{3,2,1,0} parameter(0)
  ROOT %p = (bf16[1,2,64,16]{3,2,1,0}, u8[0]{0}) custom-call(%q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": \
{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["1", "2", "64", "64"]}, \
"mask_type": "CAUSAL"}}
}
"""

# A layer's weight is a slice of the stack of all layers, so XLA puts the call into a fusion.
SLICED = """
%sliced (p0: bf16[6,4,32], p1: s32[], p2: bf16[16,32]) -> (bf16[16,4], s8[99]) {
  %p0 = bf16[6,4,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = bf16[16,32]{1,0} parameter(2)
  %w = bf16[1,4,32]{2,1,0} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,4,32}
  %y = bf16[4,32]{1,0} bitcast(%w)
  ROOT %inner = (bf16[16,4]{1,0}, s8[99]{0}) custom-call(%p2, %y), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config": \
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}

ENTRY %main (x: bf16[16,32], y: bf16[6,4,32], i: s32[]) -> bf16[16,4] {
  %x = bf16[16,32]{1,0} parameter(0)
  %y = bf16[6,4,32]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %p = (bf16[16,4]{1,0}, s8[99]{0}) fusion(%y, %i, %x), kind=kCustom, calls=%sliced
}
"""


@pytest.mark.parametrize(
    ("text", "flops"),
    [
        (CUBLAS, 2 * 16 * 4 * 32),
        (SLICED, 2 * 16 * 4 * 32),
        (FMHA, 2 * 2 * (2 * 64 * 64) * 16 // 2),
        (FMHA.replace("CAUSAL", "NO_MASK"), 2 * 2 * (2 * 64 * 64) * 16),
        (FMHA.replace("Softmax", "SoftmaxBackward"), 2 * 5 * (2 * 64 * 64) * 16 // 2),
    ],
    ids=["cublas", "sliced", "causal", "all", "backward"],
)
def test_flops_of_library_calls(text: str, flops: int) -> None:
    computations, entry = parse(text)
    scope = {each.name: each for each in computations[entry]}
    assert flops_of(scope["p"], scope, computations) == flops


@pytest.mark.parametrize("text", [CUBLAS, SLICED], ids=["alone", "in a fusion"])
def test_the_calls_of_cublas_are_products(text: str) -> None:
    assert [each.kind for each in kernels(text)] == [PRODUCT]
    assert summary(text).other_bytes == 0


def test_attention_is_a_kind_of_its_own() -> None:
    rates = Rates(flops=1e12, flops_8_bits=2e12, attention=1.0, memory=1e12, link=link)
    found = estimate(FMHA, rates, SIZES)
    assert found.kernels[ATTENTION] == 2 * 2 * (2 * 64 * 64) // 2  # independent of the head size


def test_attention_without_its_shape_is_an_error() -> None:
    computations, entry = parse(FMHA.replace("intermediate_tensor_shape", "shape"))
    scope = {each.name: each for each in computations[entry]}
    with pytest.raises(ValueError, match="lacks the shape of its scores: p"):
        flops_of(scope["p"], scope, computations)
