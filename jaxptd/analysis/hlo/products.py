"""Reads the FLOPs of a GPU program's products from its text: two for each multiplication."""

import math
import re
from collections.abc import Mapping

from jaxptd.analysis.hlo.text import Computations, Instruction

_LISTS = r'"?{name}"?[=:] ?[\[{{]([\d", ]*)[\]}}]'


def flops_of(
    kernel: Instruction, scope: Mapping[str, Instruction], computations: Computations
) -> int:
    """FLOPs of one execution of a kernel of products or attention.

    Args:
        kernel: a dot, a fusion around dots, or a call of cuBLAS or cuDNN.
        scope: the instructions of its computation, by name.
        computations: of the program.

    Raises:
        ValueError: a product in a form that is not known.
    """
    if "__cudnn$fmha" in kernel.rest:
        return _attention(kernel)
    if kernel.kind == "dot" or "__cublas" in kernel.rest:
        return _product(kernel, scope)
    inner = computations.get(kernel.called("calls"), [])
    within = {each.name: each for each in inner}
    return sum(flops_of(each, within, computations) for each in inner)


def in_8_bits(product: Instruction) -> bool:
    """True if cuBLASLt multiplies 8-bit numbers."""
    return "__cublas$lt$matmul$f8" in product.rest


def head_size(attention: Instruction) -> int:
    """The numbers of a head, of a kernel of attention."""
    return attention.arrays[0].shape[-1]


def _product(product: Instruction, scope: Mapping[str, Instruction]) -> int:
    contracted = _numbers(product, "lhs_contracting_dims") or _numbers(
        product, "lhs_contracting_dimensions"
    )
    left = scope[product.operands[0]].arrays[0].shape
    return 2 * math.prod(product.arrays[0].shape) * math.prod(left[i] for i in contracted)


def _attention(kernel: Instruction) -> int:
    """Two products of the scores forward, five backward; half of them with a causal mask."""
    scores = re.search(
        r'"intermediate_tensor_shape": ?\{[^{]*?"dimensions": ?\[([\d", ]*)\]', kernel.rest
    )
    if not scores:
        raise ValueError(f"attention without the shape of its scores: {kernel.name}")
    seen = math.prod(map(int, re.findall(r"\d+", scores[1])))
    products = 5 if "Backward" in kernel.rest else 2
    causal = '"mask_type": "CAUSAL"' in kernel.rest or '"mask_type":"CAUSAL"' in kernel.rest
    return 2 * products * seen * head_size(kernel) // (2 if causal else 1)


def _numbers(each: Instruction, name: str) -> list[int]:
    found = re.search(_LISTS.format(name=name), each.rest)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
