"""Records of programs whose steps were published: what each did, from its documentation.

`accumulate` 6: reads a 16-bit sum and gradient and writes a sum. `update` of mixed precision in
float16: gradients to float32 (6; not if they are already), unscaled and checked (8), clipped (8),
Adam over parameter, two moments and gradient (28), 16-bit parameters (6), gradients to zero (4). In
bfloat16 nothing is unscaled. `logit` of Megatron-LM's vocabulary
parallel loss: to float32 (6), maximum (4), difference (8), exponential and sum (12), quotient (8),
gradient (8), to 16 bits (6).
"""

import dataclasses
import types
from collections.abc import Mapping

from jaxptd.planner.cost import Program
from jaxptd.planner.own.program import ADDED

# Narayanan et al., arXiv 2104.04473, and Megatron-LM's examples/sc21: float16, unfused attention,
# DDP=torch without a pipeline (gradients are reduced during backward) and DDP=local with one.
MEGATRON_2021 = Program(
    "megatron-2021",
    attention="unfused",
    dropout=True,
    bias=True,
    rotary=False,
    accumulate=6,
    gradient=2,
    update=60,
    logit=52,
    tp_under="nothing",
    dp_under="backward without a pipeline",
    sends_hidden=False,
    sends_sharded=True,
)
# Korthikanti et al., arXiv 2205.05198, and Megatron-LM of that time: products of weight gradients
# add to float32, and backward's tensor-parallel collectives run beside products.
MEGATRON_2022 = dataclasses.replace(
    MEGATRON_2021,
    name="megatron-2022",
    accumulate=0,
    gradient=4,
    update=54,
    tp_under="weight gradients",
)
# NVIDIA NeMo with Transformer Engine: flash attention, Llama's block, collectives in pieces beside
# products, gradients and parameters beside backward and forward.
NEMO = Program(
    "nemo",
    attention="flash",
    dropout=False,
    bias=False,
    rotary=True,
    accumulate=0,
    gradient=2,
    update=40,
    logit=40,
    tp_under="products",
    dp_under="backward",
    sends_hidden=True,
    sends_sharded=False,
)
# MaxText: XLA's fusions and its latency-hiding scheduler; a sum of gradients reads and writes
# float32 and reads 16 bits.
MAXTEXT = dataclasses.replace(
    NEMO, name="maxtext", accumulate=10, tp_under="weight gradients", sends_hidden=False
)
# jaxptd without its compiled schedule: all collectives are exposed, gradients are sent in float32.
JAXPTD = dataclasses.replace(
    NEMO,
    name="jaxptd",
    accumulate=ADDED,
    gradient=4,
    tp_under="nothing",
    dp_under="nothing",
    sends_hidden=False,
)

PROGRAMS: Mapping[str, Program] = types.MappingProxyType(
    {program.name: program for program in (JAXPTD, MEGATRON_2021, MEGATRON_2022, NEMO, MAXTEXT)}
)
