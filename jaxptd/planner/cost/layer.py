"""Terms of one layer and micro-batch: products, attention, and passes over memory.

Bytes of elementwise kernels are those of fused chains that read and write 16-bit values: a norm
reads and writes its input; adding to the residual stream reads two and writes one; a mask of
dropout is one byte. Backward of a norm reads what it needs twice, once for its input's gradient and
once for its weights'.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jaxptd.models.inventory import MLP, Attention, Stack
from jaxptd.planner.cost import attention, kernels
from jaxptd.planner.cost.setting import Setting
from jaxptd.planner.cost.terms import Term

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


def layer_terms(setting: Setting, stack: Stack) -> LayerTerms:
    """Terms of one layer of a stack and micro-batch."""
    found = list(_products(setting, stack))
    forward = [_product(setting, each, (each.T, each.N, each.K), "forward") for each in found]
    return LayerTerms(
        forward,
        [term for each in stack.attentions for term in attention.forward(setting, each)],
        _elementwise_forward(setting, stack),
        [_product(setting, each, (each.T, each.K, each.N), "dx") for each in found],
        [_product(setting, each, (each.K, each.N, each.T), "dw") for each in found],
        [term for each in stack.attentions for term in attention.backward(setting, each)],
        _elementwise_backward(setting, stack),
        _accumulation(setting, stack, len(found)),
        unread=[] if setting.program.again_all else forward[-1:],
    )


# ---- products -----------------------------------------------------------------------------------


class Product(NamedTuple):
    """A product `[T, K] x [K, N]` on a device."""

    name: str
    T: int
    K: int
    N: int


def _products(setting: Setting, stack: Stack) -> Iterator[Product]:
    """The products of a layer's pairs."""
    inner, T = setting.spread.inner, setting.tokens(stack)
    for pair in stack.of_text:
        D = pair.hidden
        if not isinstance(pair, Attention):
            yield Product("mlp in", T, D, _first(pair) // inner)
            yield Product("mlp out", T, pair.size // inner, D)
            continue
        queries = pair.heads * pair.head_size
        if pair.source is None:
            yield Product("qkv", T, D, _first(pair) // inner)
        else:
            yield Product("q of another sequence", T, D, queries // inner)
            keys, tokens = _first(pair) - queries, T * pair.source // pair.tokens
            yield Product("k, v of another sequence", tokens, D, keys // inner)
        yield Product("attention output", T, queries // inner, D)


def _first(pair: Attention | MLP) -> int:
    """Columns of a pair's first product, of queries, keys and values together."""
    if isinstance(pair, Attention):
        return pair.head_size * (pair.heads + 2 * pair.kv_heads)
    return pair.size * (2 if pair.gated else 1)


def _product(setting: Setting, each: Product, sizes: tuple[int, int, int], name: str) -> Term:
    """A product of forward or backward; a fused sum of gradients reads and writes float32."""
    program, (M, N, K) = setting.program, sizes
    written = 8 if name == "dw" and not program.accumulate else 2
    if name == "dw":
        K = max(1, K // program.pieces)
    else:
        M = max(1, M // program.pieces)
    accelerator = setting.cluster.accelerator
    term = kernels.product(accelerator, M, N, K, written=written, fp8=program.fp8)
    return term.times(program.pieces).named(f"{each.name} {name}")


def _accumulation(setting: Setting, stack: Stack, matrices: int) -> list[Term]:
    """The sum of gradients over micro-batches, unless the products add to it as they write."""
    program = setting.program
    if not program.accumulate:
        return []
    moves = program.accumulate * setting.layer_parameters(stack)
    term = kernels.moved(setting.cluster.accelerator, moves, matrices)
    return [term.named("gradients added up", "accumulation")]


# ---- elementwise --------------------------------------------------------------------------------


def _elementwise_forward(setting: Setting, stack: Stack) -> list[Term]:
    """Norms and sums of the residual stream; activation, biases and rotation inside a layer."""
    program = setting.program
    stream = (program.stream_forward + program.dropout) * len(stack.pairs)
    inner = 0
    for pair in stack.of_text:
        if isinstance(pair, Attention):
            heads = pair.heads * pair.head_size
            inner += 0 if program.apart else 4 * heads + 4 * program.bias * _first(pair)
            inner += 4 * program.rotary * (heads + pair.kv_heads * pair.head_size)
        else:
            inner += 2 * (_first(pair) + pair.size)
    return _passes(setting, stack, stream, inner, "forward")


def _elementwise_backward(setting: Setting, stack: Stack) -> list[Term]:
    """The gradients of the same, of their weights, and of biases."""
    program = setting.program
    stream = (program.stream_backward + 5 * program.dropout + 2 * program.bias) * len(stack.pairs)
    inner = 0
    for pair in stack.of_text:
        sums = program.bias and (program.sums_apart or isinstance(pair, Attention))
        inner += 2 * sums * _first(pair)
        if isinstance(pair, Attention):
            heads = pair.heads * pair.head_size
            inner += 0 if program.apart else 4 * heads + 4 * _first(pair)
            inner += 4 * program.rotary * (heads + pair.kv_heads * pair.head_size)
        else:
            inner += 2 * (2 * _first(pair) + pair.size)
    return _passes(setting, stack, stream, inner, "backward")


def _passes(setting: Setting, stack: Stack, stream: int, inner: int, name: str) -> list[Term]:
    """Terms of so many bytes for each value of the stream, and for each token inside a layer."""
    a = setting.cluster.accelerator
    outside = kernels.moved(a, setting.stream(stack) * stream, 2 * len(stack.pairs))
    moves = setting.tokens(stack) * inner / setting.spread.inner
    inside = kernels.moved(a, moves, 2 * len(stack.pairs))
    return [
        outside.named(f"residual stream {name}"),
        inside.named(f"activation and heads {name}"),
        *_quantised(setting, stack, name),
        *_cast(setting, stack),
    ]


def _cast(setting: Setting, stack: Stack) -> list[Term]:
    """16-bit copies of parameters that the state holds in float32."""
    if not setting.program.cast:
        return []
    moves = setting.program.cast * setting.layer_parameters(stack)
    return [kernels.moved(setting.cluster.accelerator, moves, 4).named("parameters to 16 bits")]


def _quantised(setting: Setting, stack: Stack, name: str) -> list[Term]:
    """8-bit copies of what products read: x and w forward, gradients of results backward."""
    if not setting.program.fp8:
        return []
    found = list(_products(setting, stack))
    results = sum(each.T * each.N for each in found)
    sources = sum(each.T * each.K + each.K * each.N for each in found)
    moves = QUANTISED * (sources if name == "forward" else results)
    term = kernels.moved(setting.cluster.accelerator, float(moves), 2 * len(found))
    return [term.named(f"8-bit copies {name}")]
