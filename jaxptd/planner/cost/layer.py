"""Terms of one layer and micro-batch: products, attention, and passes over memory.

Bytes of elementwise kernels are those of fused chains that read and write 16-bit values: a norm
reads and writes its input; adding to the residual stream reads two and writes one; a mask of
dropout is one byte. Backward of a norm reads what it needs twice, once for its input's gradient and
once for its weights'.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxptd.models.architecture import MLP, Attention, Head, Stack
from jaxptd.planner.cost import kernels
from jaxptd.planner.cost.description import StepDescription
from jaxptd.planner.cost.terms import Term

# ---- attention -----------------------------------------------------------------------------------
# Terms of attention between its products: a fused kernel, or scores that go through memory.

# Bytes for each score of unfused attention: the causal softmax reads the half that it sees and
# writes zeros to the rest (Megatron-LM's scaled_upper_triang_masked_softmax); dropout reads and
# writes all, and its mask.
SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 3, 4
SCORE_DROPOUT = 5


def is_fused(description: StepDescription, attention: Attention) -> bool:
    """True if a kernel computes it; fused kernels have no bias by distance."""
    return description.implementation.attention == "flash" and not attention.has_bias


def attention_forward(description: StepDescription, attention: Attention) -> list[Term]:
    """The kernel; unfused, two products and the softmax between them."""
    if is_fused(description, attention):
        return _flash(description, attention, backward=False)
    heads, T, S = _scores(description, attention)
    a, H = description.cluster.accelerator, attention.head_size
    return [
        _named(kernels.product(a, T, S, H, batch=heads), "scores forward"),
        _softmax(description, attention, SOFTMAX_FORWARD, "softmax forward"),
        _named(kernels.product(a, T, H, S, batch=heads), "context forward"),
    ]


def attention_backward(description: StepDescription, attention: Attention) -> list[Term]:
    """The kernel; unfused, four products and the softmax's gradient."""
    if is_fused(description, attention):
        return _flash(description, attention, backward=True)
    heads, T, S = _scores(description, attention)
    a, H = description.cluster.accelerator, attention.head_size
    to_scores, to_heads = (T, S, H), (T, H, S)
    return [
        *(_named(kernels.product(a, *to_scores, batch=heads), "scores backward") for _ in "p"),
        *(_named(kernels.product(a, *to_heads, batch=heads), "context backward") for _ in "qkv"),
        _softmax(description, attention, SOFTMAX_BACKWARD, "softmax backward"),
    ]


def visible(description: StepDescription, attention: Attention) -> float:
    """Share of the scores of the busiest device that masks leave.

    A token sees itself and those before it, at most `reach`; in a ring of contiguous parts the last
    device sees nearly all.
    """
    keys, reach = attention.key_tokens, attention.reach
    if not attention.causal:
        return min(1.0, reach / keys)
    ring = description.parallelism.cp * description.parallelism.row
    if not description.implementation.balanced and ring > 1 and reach == keys:
        return 1 - 1 / (2 * ring)
    return reach / keys * (1 - reach / (2 * keys))


def _scores(description: StepDescription, attention: Attention) -> tuple[int, int, int]:
    """Heads times sequences of a device, queries, and keys."""
    parallelism = description.parallelism
    heads = parallelism.micro_batch * attention.heads // parallelism.inner
    return (
        max(1, heads),
        attention.tokens // (parallelism.cp * parallelism.row),
        attention.key_tokens,
    )


def _flash(description: StepDescription, attention: Attention, *, backward: bool) -> list[Term]:
    heads, T, S = _scores(description, attention)
    H = attention.head_size
    flops = 4.0 * heads * T * S * H * visible(description, attention)
    term = kernels.flash(description.cluster.accelerator, flops, H, backward=backward)
    return [term.named("attention backward" if backward else "attention forward")]


def _softmax(description: StepDescription, attention: Attention, each: int, name: str) -> Term:
    heads, T, S = _scores(description, attention)
    dropout = description.implementation.dropout
    size = (each + SCORE_DROPOUT * dropout) * heads * T * S
    return _named(kernels.moved(description.cluster.accelerator, size, 1 + dropout), name)


def _named(term: Term, name: str) -> Term:
    return term.named(name, "attention")


# ---- one layer -----------------------------------------------------------------------------------

QUANTISED = 3  # bytes moved for each value that becomes 8-bit: two read, one written


class LayerTerms(NamedTuple):
    """Terms of a layer by what computes them, each list once forward or backward."""

    products: list[Term]
    attention: list[Term]
    elementwise: list[Term]
    input_gradients: list[Term]
    weight_gradients: list[Term]
    attention_backward: list[Term]
    elementwise_backward: list[Term]
    accumulation: list[Term]
    unread: list[Term]

    @property
    def forward(self) -> list[Term]:
        return [*self.products, *self.attention, *self.elementwise]

    def backward(self, remat: str) -> list[Term]:
        """Terms of the backward pass, first of what it computes again."""
        again = {
            "none": [],
            "attention": self.attention,
            "dots": self.elementwise,
            "full": [term for term in self.forward if term not in self.unread],
        }[remat]
        return [
            *(term.named(f"{term.name} again") for term in again),
            *self.input_gradients,
            *self.weight_gradients,
            *self.attention_backward,
            *self.elementwise_backward,
            *self.accumulation,
        ]


def layer_terms(description: StepDescription, stack: Stack) -> LayerTerms:
    """Terms of one layer of a stack and micro-batch."""
    products = list(_products(description, stack))
    forward = [
        _product(description, each, (each.T, each.N, each.K), "forward") for each in products
    ]
    return LayerTerms(
        forward,
        [term for each in stack.attentions for term in attention_forward(description, each)],
        _elementwise_forward(description, stack),
        [_product(description, each, (each.T, each.K, each.N), "dx") for each in products],
        [_product(description, each, (each.K, each.N, each.T), "dw") for each in products],
        [term for each in stack.attentions for term in attention_backward(description, each)],
        _elementwise_backward(description, stack),
        _accumulation(description, stack, len(products)),
        unread=[] if description.implementation.again_all else forward[-1:],
    )


# ---- products ------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A product `[T, K] x [K, N]` on a device."""

    name: str
    T: int
    K: int
    N: int


def _products(description: StepDescription, stack: Stack) -> Iterator[Product]:
    """The products of a layer's pairs."""
    inner, T = description.parallelism.inner, description.tokens(stack)
    for sublayer in stack.of_text:
        D = sublayer.hidden
        if not isinstance(sublayer, Attention):
            yield Product("mlp in", T, D, _first(sublayer) // inner)
            yield Product("mlp out", T, sublayer.size // inner, D)
            continue
        queries = sublayer.heads * sublayer.head_size
        if sublayer.source is None:
            yield Product("qkv", T, D, _first(sublayer) // inner)
        else:
            yield Product("q of another sequence", T, D, queries // inner)
            keys, tokens = _first(sublayer) - queries, T * sublayer.source // sublayer.tokens
            yield Product("k, v of another sequence", tokens, D, keys // inner)
        yield Product("attention output", T, queries // inner, D)


def _first(sublayer: Attention | MLP) -> int:
    """Columns of a pair's first product, of queries, keys and values together."""
    if isinstance(sublayer, Attention):
        return sublayer.head_size * (sublayer.heads + 2 * sublayer.kv_heads)
    return sublayer.size * (2 if sublayer.gated else 1)


def _product(
    description: StepDescription, each: Product, sizes: tuple[int, int, int], name: str
) -> Term:
    """A product of forward or backward; a fused sum of gradients reads and writes float32."""
    implementation, (M, N, K) = description.implementation, sizes
    written = 8 if name == "dw" and not implementation.accumulate else 2
    if name == "dw":
        K = max(1, K // implementation.pieces)
    else:
        M = max(1, M // implementation.pieces)
    accelerator = description.cluster.accelerator
    term = kernels.product(accelerator, M, N, K, written=written, fp8=implementation.fp8)
    return term.times(implementation.pieces).named(f"{each.name} {name}")


def _accumulation(description: StepDescription, stack: Stack, matrices: int) -> list[Term]:
    """The sum of gradients over micro-batches, unless the products add to it as they write."""
    implementation = description.implementation
    if not implementation.accumulate:
        return []
    moves = implementation.accumulate * description.layer_parameters(stack)
    term = kernels.moved(description.cluster.accelerator, moves, matrices)
    return [term.named("gradients added up", "accumulation")]


# ---- elementwise ---------------------------------------------------------------------------------


def _elementwise_forward(description: StepDescription, stack: Stack) -> list[Term]:
    """Norms and sums of the residual stream; activation, biases and rotation inside a layer."""
    implementation = description.implementation
    stream = (implementation.stream_forward + implementation.dropout) * len(stack.sublayers)
    inner = 0
    for sublayer in stack.of_text:
        if isinstance(sublayer, Attention):
            heads = sublayer.heads * sublayer.head_size
            inner += (
                0
                if implementation.apart
                else 4 * heads + 4 * implementation.bias * _first(sublayer)
            )
            inner += 4 * implementation.rotary * (heads + sublayer.kv_heads * sublayer.head_size)
        else:
            inner += 2 * (_first(sublayer) + sublayer.size)
    return _passes(description, stack, stream, inner, "forward")


def _elementwise_backward(description: StepDescription, stack: Stack) -> list[Term]:
    """The gradients of the same, of their weights, and of biases."""
    implementation = description.implementation
    stream = (
        implementation.stream_backward + 5 * implementation.dropout + 2 * implementation.bias
    ) * len(stack.sublayers)
    inner = 0
    for sublayer in stack.of_text:
        sums = implementation.bias and (
            implementation.sums_apart or isinstance(sublayer, Attention)
        )
        inner += 2 * sums * _first(sublayer)
        if isinstance(sublayer, Attention):
            heads = sublayer.heads * sublayer.head_size
            inner += 0 if implementation.apart else 4 * heads + 4 * _first(sublayer)
            inner += 4 * implementation.rotary * (heads + sublayer.kv_heads * sublayer.head_size)
        else:
            inner += 2 * (2 * _first(sublayer) + sublayer.size)
    return _passes(description, stack, stream, inner, "backward")


def _passes(
    description: StepDescription, stack: Stack, stream: int, inner: int, name: str
) -> list[Term]:
    """Terms of so many bytes for each value of the stream, and for each token inside a layer."""
    a = description.cluster.accelerator
    outside = kernels.moved(a, description.stream(stack) * stream, 2 * len(stack.sublayers))
    moves = description.tokens(stack) * inner / description.parallelism.inner
    inside = kernels.moved(a, moves, 2 * len(stack.sublayers))
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
    """8-bit copies of what products read: x and w forward, gradients of results backward."""
    if not description.implementation.fp8:
        return []
    products = list(_products(description, stack))
    results = sum(each.T * each.N for each in products)
    sources = sum(each.T * each.K + each.K * each.N for each in products)
    moves = QUANTISED * (sources if name == "forward" else results)
    term = kernels.moved(description.cluster.accelerator, float(moves), 2 * len(products))
    return [term.named(f"8-bit copies {name}")]


# ---- outside the layers: embedding, logits and loss, the optimizer -------------------------------


def first_terms(description: StepDescription) -> list[Term]:
    """Looks up the tokens of a micro-batch and adds their gradients up: five passes of 16 bits."""
    a = description.cluster.accelerator
    moves = 5 * 2 * sum(description.stream(stack) for stack in description.model.stacks)
    return [_at_ends(kernels.moved(a, moves, 4), "embedding")]


def last_terms(description: StepDescription) -> list[Term]:
    """Logits, the loss over the sharded vocabulary, and their gradients, of a micro-batch."""
    return [term for head in description.model.heads for term in _head(description, head)]


def _head(description: StepDescription, head: Head) -> list[Term]:
    a, T = description.cluster.accelerator, description.tokens(description.model.stacks[-1])
    D, V = head.hidden, head.columns // description.parallelism.inner
    sizes = {"logits forward": (T, V, D), "logits dx": (T, D, V), "logits dw": (D, V, T)}
    products = [_at_ends(kernels.product(a, *size), name) for name, size in sizes.items()]
    square = [_at_ends(kernels.product(a, T, D, D).times(3), "head's square")] * head.squares
    loss = kernels.moved(a, description.implementation.logit * float(T) * V, 8)
    return [*products, *square, _at_ends(loss, "loss")]


def update_terms(description: StepDescription) -> list[Term]:
    """The optimizer's pass over its shard of the state, once a step."""
    updated = description.updated
    elements = (
        description.stage_parameters / description.parallelism.shards
        if updated is None
        else updated
    )
    term = kernels.moved(
        description.cluster.accelerator, description.implementation.update * elements, 40
    )
    return [term.named("optimizer", "optimizer")]


def _at_ends(term: Term, name: str) -> Term:
    return term.named(name, "embedding and loss")
