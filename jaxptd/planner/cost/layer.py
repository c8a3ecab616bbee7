"""Terms of one layer and micro-batch: matmuls, attention, and passes over memory.

Bytes of elementwise kernels are those of fused chains that read and write 16-bit values: a norm
reads and writes its input; adding to the residual stream reads two and writes one; a dropout mask
is one byte. Backward of a norm reads what it needs twice: for its input's gradient and for its
weights'.
"""

import itertools
from typing import NamedTuple

from jaxptd.costs import kernels
from jaxptd.costs.terms import Term
from jaxptd.parts.architecture import Stack
from jaxptd.parts.part import Product
from jaxptd.planner.cost.description import StepDescription

# ---- one layer -----------------------------------------------------------------------------------

QUANTISED = 3  # bytes moved per value that becomes 8-bit: two read, one written


class LayerTerms(NamedTuple):
    """Terms of a layer by what computes them, one list per pass.

    unread: terms of forward that recomputing a layer leaves out.
    always: matmuls that backward repeats with every policy.
    rerun: matmuls and attention that it repeats with `dots`.
    """

    products: list[Term]
    attention: list[Term]
    elementwise: list[Term]
    input_gradients: list[Term]
    weight_gradients: list[Term]
    attention_backward: list[Term]
    elementwise_backward: list[Term]
    accumulation: list[Term]
    unread: list[Term]
    always: list[Term]
    rerun: list[Term]

    @property
    def forward(self) -> list[Term]:
        return [*self.products, *self.attention, *self.elementwise]

    def backward(self, remat: str) -> list[Term]:
        """Terms of the backward pass, beginning with what it recomputes."""
        again = {
            "none": [],
            "attention": self.attention,
            "dots": [*self.rerun, *(t for t in self.elementwise if t not in self.unread)],
            "full": [term for term in self.forward if term not in self.unread],
        }[remat]
        return [
            *(term.named(f"{term.name} again") for term in (*again, *self.always)),
            *self.input_gradients,
            *self.weight_gradients,
            *self.attention_backward,
            *self.elementwise_backward,
            *self.accumulation,
        ]


def layer_terms(description: StepDescription, stack: Stack) -> LayerTerms:
    """Terms of one layer of a stack and micro-batch; of a period, of its layers in turn."""
    if stack.period > 1:
        every = [layer_terms(description, each) for each in stack.in_turn]
        return LayerTerms(*(list(itertools.chain(*lists)) for lists in zip(*every, strict=True)))
    products, work = _products(description, stack), description.work(stack)
    forward = [_forward(description, each) for each in products]
    routing = [term for part in stack.parts for term in part.routing_forward(work)]
    attention = [term for part in stack.parts for term in part.core_forward(work)]
    remade = [each for part in stack.parts for each in part.remade(work)]
    rerun = _rerun(description, products, forward, attention)
    return LayerTerms(
        forward,
        attention,
        [*_elementwise_forward(description, stack), *routing],
        [_product(description, each, (each.T, each.K, each.N), "dx") for each in products],
        [_product(description, each, (each.K, each.N, each.T), "dw") for each in products],
        [term for part in stack.parts for term in part.core_backward(work)],
        [
            *_elementwise_backward(description, stack),
            *(term for part in stack.parts for term in part.routing_backward(work)),
        ],
        _accumulation(description, stack, len(products)),
        unread=_unread(description, products, forward, routing),
        always=[_forward(description, each) for each in remade],
        rerun=[*rerun, *(term for part in stack.parts for term in part.core_again(work))],
    )


def _rerun(
    description: StepDescription, products: list[Product], forward: list[Term], core: list[Term]
) -> list[Term]:
    """The matmuls and attention that a program's policy `dots` runs again."""
    names = description.implementation.dots_again
    again = [term for each, term in zip(products, forward, strict=True) if each.name in names]
    return again + (core if "attention" in names else [])


def _unread(
    description: StepDescription, products: list[Product], forward: list[Term], routing: list[Term]
) -> list[Term]:
    """The terms that recomputing a layer leaves out: its last matmul, or what it repeats anyway."""
    apart = [term for each, term in zip(products, forward, strict=True) if each.apart]
    if apart:
        return [*apart, *routing]
    return [] if description.implementation.again_all else forward[-1:]


# ---- matmuls -------------------------------------------------------------------------------------


def _products(description: StepDescription, stack: Stack) -> list[Product]:
    """The matmuls of a layer's parts."""
    work = description.work(stack)
    return [product for part in stack.parts for product in part.products(work)]


def _forward(description: StepDescription, each: Product) -> Term:
    return _product(description, each, (each.T, each.N, each.K), "forward")


def _product(
    description: StepDescription, each: Product, sizes: tuple[int, int, int], name: str
) -> Term:
    """A matmul of forward or backward; fused gradient accumulation reads and writes float32."""
    implementation, (M, N, K) = description.implementation, sizes
    written = 8 if name == "dw" and not implementation.accumulate else 2
    if name == "dw":
        K = max(1, K // implementation.pieces)
    else:
        M = max(1, M // implementation.pieces)
    # Rows of experts have scales of their own, which no sum over rows can take out.
    fp8 = implementation.fp8 and not (each.wide or (each.routed and name == "dw"))
    accelerator = description.cluster.accelerator
    term = kernels.product(accelerator, M, N, K, batch=each.matrices, written=written, fp8=fp8)
    if each.routed:
        term = term._replace(seconds=term.seconds / implementation.expert_pace)
    return term.times(implementation.pieces).named(f"{each.name} {name}")


def _accumulation(description: StepDescription, stack: Stack, matrices: int) -> list[Term]:
    """Gradient accumulation over micro-batches, unless matmuls accumulate as they write."""
    implementation = description.implementation
    if not implementation.accumulate:
        return []
    moves = implementation.accumulate * description.layer_parameters(stack)
    term = kernels.moved(description.cluster.accelerator, moves, matrices)
    return [term.named("gradients added up", "accumulation")]


# ---- elementwise ---------------------------------------------------------------------------------


def _elementwise_forward(description: StepDescription, stack: Stack) -> list[Term]:
    """Norms of and additions to the residual stream; activation, biases and rotation in a layer."""
    implementation, parts = description.implementation, stack.parts
    stream = stack.norm.moved_forward(implementation) * stack.norms
    inner = sum(part.moved_forward(implementation) for part in parts)
    return _passes(description, stack, stream, inner, "forward")


def _elementwise_backward(description: StepDescription, stack: Stack) -> list[Term]:
    """The gradients of these, of their weights, and of biases."""
    implementation, parts = description.implementation, stack.parts
    stream = stack.norm.moved_backward(implementation) * stack.norms
    inner = sum(part.moved_backward(implementation) for part in parts)
    return _passes(description, stack, stream, inner, "backward")


def _passes(
    description: StepDescription, stack: Stack, stream: int, inner: int, name: str
) -> list[Term]:
    """Terms of given bytes per value of the stream, and per token inside a layer."""
    a = description.cluster.accelerator
    outside = kernels.moved(a, description.stream(stack) * stream, 2 * len(stack.parts))
    moves = description.tokens(stack) * inner / description.parallelism.inner
    inside = kernels.moved(a, moves, 2 * len(stack.parts))
    return [
        outside.named(f"residual stream {name}"),
        inside.named(f"activation and heads {name}"),
        *_quantised(description, stack, name),
        *_cast(description, stack),
    ]


def _cast(description: StepDescription, stack: Stack) -> list[Term]:
    """16-bit copies of parameters that the state holds in float32."""
    if not description.implementation.cast:
        return []
    moves = description.implementation.cast * description.layer_parameters(stack)
    return [kernels.moved(description.cluster.accelerator, moves, 4).named("parameters to 16 bits")]


def _quantised(description: StepDescription, stack: Stack, name: str) -> list[Term]:
    """8-bit copies of matmul inputs: x and w forward, gradients of results backward.

    Backward rounds again what it repeats.
    """
    if not description.implementation.fp8:
        return []
    products = [each for each in _products(description, stack) if not each.wide]
    results = sum(each.matrices * each.T * each.N for each in products)
    again = products if name == "forward" else [each for each in products if each.apart]
    sources = sum(each.matrices * (each.T * each.K + each.K * each.N) for each in again)
    moves = QUANTISED * (sources if name == "forward" else results + sources)
    term = kernels.moved(description.cluster.accelerator, float(moves), 2 * len(products))
    return [term.named(f"8-bit copies {name}")]


# ---- outside the layers: embedding, logits and loss, the optimizer -------------------------------


def first_terms(description: StepDescription) -> list[Term]:
    """Terms of a micro-batch before the layers."""
    work = description.work(description.model.stacks[0])
    return [term for end in description.model.before for term in end.terms(work)]


def last_terms(description: StepDescription) -> list[Term]:
    """Terms of a micro-batch after the layers, with those of the layers that run with heads."""
    work = description.work(description.model.stacks[-1])
    ((remat, _),) = description.parallelism.remats(1)
    terms = [term for end in description.model.behind for term in end.terms(work)]
    for stack in description.model.layers_behind:
        each = layer_terms(description, stack)
        terms += [*each.forward, *each.backward(remat)]
    return terms


def update_terms(description: StepDescription) -> list[Term]:
    """The optimizer's pass over its shard of the state, once per step."""
    updated = description.updated
    elements = description.own_parameters if updated is None else updated
    term = kernels.moved(
        description.cluster.accelerator, description.implementation.update * elements, 40
    )
    return [term.named("optimizer", "optimizer")]
