"""Terms of one layer and micro-batch: products, attention, and passes over memory.

Bytes of elementwise kernels are those of fused chains that read and write 16-bit values: a norm
reads and writes its input; adding to the residual stream reads two and writes one; a mask of
dropout is one byte. Backward of a norm reads what it needs twice, once for its input's gradient and
once for its weights'.
"""

from typing import NamedTuple

from jaxptd.planner.cost import kernels
from jaxptd.planner.cost.setting import Setting
from jaxptd.planner.cost.terms import Term

# Bytes for each score of unfused attention: the causal softmax reads the half that it sees and
# writes zeros to the rest (Megatron-LM's scaled_upper_triang_masked_softmax); dropout reads and
# writes all, and its mask.
SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 3, 4
SCORE_DROPOUT = 5


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

    @property
    def forward(self) -> list[Term]:
        return [*self.products, *self.attention, *self.elementwise]

    def backward(self, remat: str) -> list[Term]:
        """Terms of the backward pass, first of what it computes again."""
        again = {
            "none": [],
            "attention": self.attention,
            "dots": self.elementwise,
            "full": self.forward,
        }[remat]
        return [
            *(term.named(f"{term.name} again") for term in again),
            *self.input_gradients,
            *self.weight_gradients,
            *self.attention_backward,
            *self.elementwise_backward,
            *self.accumulation,
        ]


def layer_terms(setting: Setting) -> LayerTerms:
    """Terms of one layer and micro-batch."""
    return LayerTerms(
        _forward_products(setting),
        _attention_forward(setting),
        _elementwise_forward(setting),
        _input_gradients(setting),
        _weight_gradients(setting),
        _attention_backward(setting),
        _elementwise_backward(setting),
        _accumulation(setting),
    )


# ---- products -----------------------------------------------------------------------------------


def _matrices(setting: Setting) -> dict[str, tuple[int, int]]:
    """Rows and columns of each matrix on a device."""
    shape, tp = setting.shape, setting.spread.tp
    heads = shape.num_heads * shape.head_size // tp
    return {
        "qkv": (shape.hidden_size, shape.qkv_size // tp),
        "attention output": (heads, shape.hidden_size),
        "mlp in": (shape.hidden_size, shape.ffn_inputs // tp),
        "mlp out": (shape.ffn // tp, shape.hidden_size),
    }


def _forward_products(setting: Setting) -> list[Term]:
    """`[T, K] x [K, N]` of each matrix `[K, N]`."""
    a, T = setting.cluster.accelerator, setting.tokens
    matrices = _matrices(setting).items()
    return [kernels.product(a, T, N, K).named(f"{name} forward") for name, (K, N) in matrices]


def _input_gradients(setting: Setting) -> list[Term]:
    """`[T, N] x [N, K]` of each matrix."""
    a, T = setting.cluster.accelerator, setting.tokens
    matrices = _matrices(setting).items()
    return [kernels.product(a, T, K, N).named(f"{name} dx") for name, (K, N) in matrices]


def _weight_gradients(setting: Setting) -> list[Term]:
    """`[K, T] x [T, N]` of each matrix; a fused sum reads and writes float32."""
    a, T = setting.cluster.accelerator, setting.tokens
    written = 2 if setting.program.accumulate else 8
    matrices = _matrices(setting).items()
    return [
        kernels.product(a, K, N, T, written=written).named(f"{name} dw")
        for name, (K, N) in matrices
    ]


def _accumulation(setting: Setting) -> list[Term]:
    """The sum of gradients over micro-batches, unless the products add to it as they write."""
    program = setting.program
    if not program.accumulate:
        return []
    moves = program.accumulate * setting.layer_parameters
    term = kernels.moved(setting.cluster.accelerator, moves, len(_matrices(setting)))
    return [term.named("gradients added up", "accumulation")]


# ---- attention ----------------------------------------------------------------------------------


def _scores(setting: Setting) -> tuple[int, int, int]:
    """Heads times sequences of a device, queries, and keys."""
    shape, spread = setting.shape, setting.spread
    heads = spread.micro_batch * shape.num_heads // spread.tp
    return heads, shape.seq_length // spread.cp, shape.seq_length


def _flash(setting: Setting, *, backward: bool) -> list[Term]:
    heads, T, S = _scores(setting)
    H = setting.shape.head_size
    flops = 4.0 * heads * T * S * H / 2
    term = kernels.flash(setting.cluster.accelerator, flops, H, backward=backward)
    return [term.named("attention backward" if backward else "attention forward")]


def _attention_forward(setting: Setting) -> list[Term]:
    """The kernel; unfused, two products and the softmax between them."""
    if setting.program.attention == "flash":
        return _flash(setting, backward=False)
    heads, T, S = _scores(setting)
    a, H = setting.cluster.accelerator, setting.shape.head_size
    return [
        _named(kernels.product(a, T, S, H, batch=heads), "scores forward"),
        _softmax(setting, SOFTMAX_FORWARD, "softmax forward"),
        _named(kernels.product(a, T, H, S, batch=heads), "context forward"),
    ]


def _attention_backward(setting: Setting) -> list[Term]:
    """The kernel; unfused, four products and the softmax's gradient."""
    if setting.program.attention == "flash":
        return _flash(setting, backward=True)
    heads, T, S = _scores(setting)
    a, H = setting.cluster.accelerator, setting.shape.head_size
    to_scores, to_heads = (T, S, H), (T, H, S)
    return [
        *(_named(kernels.product(a, *to_scores, batch=heads), "scores backward") for _ in "p"),
        *(_named(kernels.product(a, *to_heads, batch=heads), "context backward") for _ in "qkv"),
        _softmax(setting, SOFTMAX_BACKWARD, "softmax backward"),
    ]


def _softmax(setting: Setting, each: int, name: str) -> Term:
    heads, T, S = _scores(setting)
    dropout = setting.program.dropout
    size = (each + SCORE_DROPOUT * dropout) * heads * T * S
    return _named(kernels.moved(setting.cluster.accelerator, size, 1 + dropout), name)


def _named(term: Term, name: str) -> Term:
    return term.named(name, "attention")


# ---- elementwise --------------------------------------------------------------------------------


def _elementwise_forward(setting: Setting) -> list[Term]:
    """Norms and sums of the residual stream; activation, biases and rotation inside a layer."""
    shape, program, tp = setting.shape, setting.program, setting.spread.tp
    heads = shape.num_heads * shape.head_size
    stream = 2 * (4 + 6 + program.dropout) * shape.hidden_size
    inner = 2 * (shape.ffn_inputs + shape.ffn) + 4 * heads + 4 * program.bias * shape.qkv_size
    inner += 4 * program.rotary * (heads + shape.kv_heads * shape.head_size)
    return _passes(setting, stream, inner / tp, "forward")


def _elementwise_backward(setting: Setting) -> list[Term]:
    """The gradients of the same, of their weights, and of biases."""
    shape, program, tp = setting.shape, setting.program, setting.spread.tp
    heads = shape.num_heads * shape.head_size
    stream = 2 * (10 + 6 + 5 * program.dropout + 2 * program.bias) * shape.hidden_size
    inner = 2 * (2 * shape.ffn_inputs + shape.ffn) + 4 * heads + 4 * shape.qkv_size
    inner += 2 * program.bias * (shape.ffn_inputs + shape.qkv_size)
    inner += 4 * program.rotary * (heads + shape.kv_heads * shape.head_size)
    return _passes(setting, stream, inner / tp, "backward")


def _passes(setting: Setting, stream: float, inner: float, name: str) -> list[Term]:
    """Terms of so many bytes for each token of the stream, and for each token inside a layer."""
    a = setting.cluster.accelerator
    outside = kernels.moved(a, setting.stream_tokens * stream, 4)
    inside = kernels.moved(a, setting.tokens * inner, 4)
    return [
        outside.named(f"residual stream {name}"),
        inside.named(f"activation and heads {name}"),
    ]
