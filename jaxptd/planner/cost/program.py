"""Records of programs: their kernels, and what they overlap."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Program:
    """The kernels and overlaps of a program, as documented. No number here is fitted.

    Args:
        name: of the program.
        attention: `unfused` writes scores to memory; `flash` does not, and skips what a causal
            mask hides.
        dropout: it has dropout, of scores too if attention is unfused.
        bias: its products have a bias.
        rotary: it rotates queries and keys.
        accumulate: bytes moved to add a parameter's gradient to the sum of the step; 0: the product
            that makes the gradient adds as it writes.
        gradient: bytes of an element of gradients that is sent.
        update: bytes moved for each parameter by the optimizer.
        logit: bytes moved for each logit by the loss, forward and backward.
        tp_under: what hides the tensor-parallel collectives of backward.
        dp_under: what hides the reduction of gradients.
        sends_hidden: messages between stages run beside the stages' work.
        sends_sharded: each of the tp devices sends its share of an activation, and a gather in the
            node follows; with sequence parallelism there is nothing to gather.
        cast: bytes moved to cast a parameter to 16 bits, forward and backward each.
        stacked: how often what a layer keeps is moved again, forward and backward each, because
            layers that run in a loop keep it in an array of all of them.
        again_all: full recomputation runs a layer's last product, too, whose result nothing reads.
        pieces: products are cut into so many, by tokens.
        fp8: the products of layers are of 8-bit numbers.
        apart: queries, keys and values are products of their own, which add their biases as they
            write; else copies split the results of one, and join gradients.
        sums_apart: the gradient of an MLP's first bias is a pass of its own, and not part of its
            activation's backward.
        stream_forward: bytes moved for each number of the residual stream by a norm and the sum
            before it, unless a product adds as it writes.
        stream_backward: the same of backward of a norm and of the sum behind it.
        balanced: devices of a ring have as many visible scores each, where a mask is causal.
    """

    name: str
    attention: Literal["unfused", "flash"]
    dropout: bool
    bias: bool
    rotary: bool
    accumulate: int
    gradient: int
    update: int
    logit: int
    tp_under: Literal["nothing", "weight gradients", "products"]
    dp_under: Literal["nothing", "backward", "backward without a pipeline"]
    sends_hidden: bool
    sends_sharded: bool
    cast: int = 0
    stacked: int = 0
    again_all: bool = True
    pieces: int = 1
    fp8: bool = False
    apart: bool = False
    sums_apart: bool = True
    stream_forward: int = 10
    stream_backward: int = 16
    balanced: bool = True
