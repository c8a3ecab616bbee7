"""Reads a compiled GPU program's kernels and the bytes they move, from its scheduled text.

A kernel reads each operand once (a slice or a gather only the elements it takes, an update in place
nothing) and writes its result. Loops count with their known trip counts; a pipeline's stages are
averaged.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jaxptd.analysis.hlo.text import WHOLE, Computations, Instruction, Pipeline, parse

_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "conditional"}
_NO_KERNEL |= {"partition-id", "replica-id", "after-all", "iota", "opt-barrier", "async-update"}
_COPY = "copy-start"  # its result also lists the array that it reads
_COLLECTIVE = re.compile(r"(all-|reduce-scatter|collective-)")
_PRODUCT = re.compile("__cublas|__triton_gemm|nested_gemm")
_GROUPED = re.compile(r"\b(times|outer)_kernel\b")  # of `jaxptd.kernels.grouped`
_HOST_MEMORY = "S(5)"  # in a layout
PRODUCT, ATTENTION, COLLECTIVE, OTHER = "products", "attention kernel", "collectives", "other"
HOST = "host copies"
KINDS = (PRODUCT, ATTENTION, OTHER, COLLECTIVE, HOST)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel, its executions in a step, and the total bytes that it moves."""

    instruction: Instruction
    kind: str
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """Executions of kernels in a step, and the bytes moved by those of kind `OTHER`."""

    count: int
    other_bytes: int


def summary(text: str, pipeline: Pipeline = WHOLE) -> Summary:
    """Summarises the kernels of a scheduled program."""
    every = list(kernels(text, pipeline))
    others = sum(kernel.bytes for kernel in every if kernel.kind == OTHER)
    return Summary(sum(kernel.count for kernel in every), others)


def largest(text: str, number: int, pipeline: Pipeline = WHOLE) -> list[tuple[int, int, str]]:
    """The kernels of kind `OTHER` that move the most bytes; identical ones are added up.

    Returns:
        For each: bytes, executions, and its result with the end of its JAX name.
    """
    sums: dict[str, tuple[int, int]] = {}
    for kernel in kernels(text, pipeline):
        if kernel.kind != OTHER:
            continue
        each = kernel.instruction
        words = f"{each.result}  {each.op_name[-60:] or each.kind}"
        size, count = sums.get(words, (0, 0))
        sums[words] = (size + kernel.bytes, count + kernel.count)
    rows = [(size, count, words) for words, (size, count) in sums.items()]
    return sorted(rows, reverse=True)[:number]


def kernels(text: str, pipeline: Pipeline = WHOLE) -> Iterator[Kernel]:
    """Every kernel of a scheduled program."""
    computations, entry = parse(text)
    stages = pipeline.stages
    for instruction, scope, times in _kernels(computations, entry, stages, pipeline):
        kind = kind_of(instruction, computations)
        size = moved_bytes(instruction, scope, computations)
        yield Kernel(instruction, kind, round(times / stages), times * size // stages)


def kind_of(instruction: Instruction, computations: Computations) -> str:
    """The kind of a kernel, one of `KINDS`."""
    if _COLLECTIVE.match(instruction.kind):
        return COLLECTIVE
    if instruction.kind == _COPY and _HOST_MEMORY in instruction.result:
        return HOST
    # XLA wraps a library's kernel in a fusion if an operand is a slice of a stack.
    parts = [instruction, *computations.get(instruction.called("calls"), [])]
    if any("__cudnn$fmha" in each.rest for each in parts):
        return ATTENTION
    return PRODUCT if any(map(_is_product, parts)) else OTHER


def _kernels(
    computations: Computations, name: str, times: int, pipeline: Pipeline
) -> Iterator[tuple[Instruction, dict[str, Instruction], int]]:
    """Every instruction that is a kernel, its computation by name, and its executions."""
    scope = {each.name: each for each in computations[name]}
    for each in computations[name]:
        if each.body or each.branches:
            for body, runs in pipeline.runs(each, times, computations):
                yield from _kernels(computations, body, runs, pipeline)
        elif is_kernel(each):
            yield each, scope, times


def is_kernel(instruction: Instruction) -> bool:
    """True for an instruction that runs by itself, without calling a computation."""
    if instruction.kind in _NO_KERNEL or instruction.kind.endswith("-done"):
        return False
    return "AllocateBuffer" not in instruction.rest  # memory that a loop will fill


def _is_product(instruction: Instruction) -> bool:
    """True for a matmul, as a dot, a library's kernel, or one of `jaxptd.kernels.grouped`."""
    is_one = instruction.kind == "dot" or bool(_PRODUCT.search(instruction.rest))
    return is_one or is_grouped(instruction)


def moved_bytes(
    kernel: Instruction, scope: Mapping[str, Instruction], computations: Computations
) -> int:
    """Bytes that one execution of a kernel reads and writes."""
    body = computations.get(kernel.called("calls"))
    if not body:
        read = sum(scope[name].size for name in kernel.operands if name in scope)
        return read + (read if kernel.kind == _COPY else kernel.size)
    read = sum(_read(body, each, each.size) for each in body if each.kind == "parameter")
    return read + _written(body)


def _read(body: list[Instruction], value: Instruction, whole: int) -> int:
    """Bytes that a fusion reads of one of its operands."""
    total = 0
    for each in body:
        if value.name not in each.operands:
            continue
        first = each.operands[0] == value.name
        if each.kind == "bitcast":
            total += _read(body, each, whole)
        elif each.kind in ("slice", "dynamic-slice", "gather") and first:
            total += each.size
        elif not (each.kind in ("dynamic-update-slice", "scatter") and first):
            return whole
    return min(total, whole)


def _written(body: list[Instruction]) -> int:
    """Bytes that a fusion writes; for an update in place only the update."""
    sizes = {each.name: each.size for each in body}
    root = next(each for each in body if each.is_root)
    updates = [each for each in body if each.kind == "dynamic-update-slice"]
    in_place = sum(each.size - sizes[each.operands[1]] for each in updates)
    return max(root.size - in_place, 0)


# ---- matmuls -------------------------------------------------------------------------------------
# Reads the FLOPs of a GPU program's matmuls from its text: two per multiplication.

_LISTS = r'"?{name}"?[=:] ?[\[{{]([\d", ]*)[\]}}]'


def flops_of(
    kernel: Instruction, scope: Mapping[str, Instruction], computations: Computations
) -> int:
    """FLOPs of one execution of a matmul or attention kernel.

    Args:
        kernel: a dot, a fusion around dots, a call of cuBLAS or cuDNN, or a grouped matmul.
        scope: the instructions of its computation, by name.
        computations: of the program.

    Raises:
        ValueError: the matmul has an unknown form.
    """
    if "__cudnn$fmha" in kernel.rest:
        return _attention(kernel)
    if kernel.kind == "dot" or "__cublas" in kernel.rest:
        return _product(kernel, scope)
    if is_grouped(kernel):
        rows = scope[kernel.operands[1]].arrays[0].shape
        return 2 * math.prod(rows) * kernel.arrays[0].shape[-1]
    inner = computations.get(kernel.called("calls"), [])
    within = {each.name: each for each in inner}
    return sum(flops_of(each, within, computations) for each in inner)


def is_grouped(product: Instruction) -> bool:
    """True for a matmul of rows in groups, of which FLOPs count as if all rows were there."""
    return product.kind == "custom-call" and bool(_GROUPED.search(product.rest))


def in_8_bits(product: Instruction) -> bool:
    """True if cuBLASLt multiplies 8-bit numbers, or our kernel for groups."""
    of_groups = _GROUPED.search(product.rest)
    if of_groups:  # the gradient of a matrix widens them
        return of_groups[1] == "times" and "f8e4m3fn[" in product.rest
    return "__cublas$lt$matmul$f8" in product.rest


def head_size(attention: Instruction) -> int:
    """The head size of an attention kernel."""
    return attention.arrays[0].shape[-1]


def _product(product: Instruction, scope: Mapping[str, Instruction]) -> int:
    contracted = _numbers(product, "lhs_contracting_dims") or _numbers(
        product, "lhs_contracting_dimensions"
    )
    left = scope[product.operands[0]].arrays[0].shape
    return 2 * math.prod(product.arrays[0].shape) * math.prod(left[i] for i in contracted)


def _attention(kernel: Instruction) -> int:
    """Two matmuls of the scores forward, five backward; a causal mask halves the FLOPs."""
    scores = re.search(
        r'"intermediate_tensor_shape": ?\{[^{]*?"dimensions": ?\[([\d", ]*)\]', kernel.rest
    )
    if not scores:
        raise ValueError(f"attention lacks the shape of its scores: {kernel.name}")
    seen = math.prod(map(int, re.findall(r"\d+", scores[1])))
    products = 5 if "Backward" in kernel.rest else 2
    causal = '"mask_type": "CAUSAL"' in kernel.rest or '"mask_type":"CAUSAL"' in kernel.rest
    return 2 * products * seen * head_size(kernel) // (2 if causal else 1)


def _numbers(each: Instruction, name: str) -> list[int]:
    match = re.search(_LISTS.format(name=name), each.rest)
    return [int(n) for n in re.findall(r"\d+", match[1])] if match else []
