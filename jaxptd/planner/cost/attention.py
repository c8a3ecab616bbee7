"""Terms of attention between its products: a fused kernel, or scores that go through memory."""

from jaxptd.models.inventory import Attention
from jaxptd.planner.cost import kernels
from jaxptd.planner.cost.setting import Setting
from jaxptd.planner.cost.terms import Term

# Bytes for each score of unfused attention: the causal softmax reads the half that it sees and
# writes zeros to the rest (Megatron-LM's scaled_upper_triang_masked_softmax); dropout reads and
# writes all, and its mask.
SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 3, 4
SCORE_DROPOUT = 5


def is_fused(setting: Setting, attention: Attention) -> bool:
    """True if a kernel computes it; fused kernels have no bias by distance."""
    return setting.program.attention == "flash" and not attention.has_bias


def forward(setting: Setting, attention: Attention) -> list[Term]:
    """The kernel; unfused, two products and the softmax between them."""
    if is_fused(setting, attention):
        return _flash(setting, attention, backward=False)
    heads, T, S = _scores(setting, attention)
    a, H = setting.cluster.accelerator, attention.head_size
    return [
        _named(kernels.product(a, T, S, H, batch=heads), "scores forward"),
        _softmax(setting, attention, SOFTMAX_FORWARD, "softmax forward"),
        _named(kernels.product(a, T, H, S, batch=heads), "context forward"),
    ]


def backward(setting: Setting, attention: Attention) -> list[Term]:
    """The kernel; unfused, four products and the softmax's gradient."""
    if is_fused(setting, attention):
        return _flash(setting, attention, backward=True)
    heads, T, S = _scores(setting, attention)
    a, H = setting.cluster.accelerator, attention.head_size
    to_scores, to_heads = (T, S, H), (T, H, S)
    return [
        *(_named(kernels.product(a, *to_scores, batch=heads), "scores backward") for _ in "p"),
        *(_named(kernels.product(a, *to_heads, batch=heads), "context backward") for _ in "qkv"),
        _softmax(setting, attention, SOFTMAX_BACKWARD, "softmax backward"),
    ]


def visible(setting: Setting, attention: Attention) -> float:
    """Share of the scores of the busiest device that masks leave.

    A token sees itself and those before it, at most `reach`; in a ring of contiguous parts the last
    device sees nearly all.
    """
    keys, reach = attention.key_tokens, attention.reach
    if not attention.causal:
        return min(1.0, reach / keys)
    ring = setting.spread.cp * setting.spread.row
    if not setting.program.balanced and ring > 1 and reach == keys:
        return 1 - 1 / (2 * ring)
    return reach / keys * (1 - reach / (2 * keys))


def _scores(setting: Setting, attention: Attention) -> tuple[int, int, int]:
    """Heads times sequences of a device, queries, and keys."""
    spread = setting.spread
    heads = spread.micro_batch * attention.heads // spread.inner
    return max(1, heads), attention.tokens // (spread.cp * spread.row), attention.key_tokens


def _flash(setting: Setting, attention: Attention, *, backward: bool) -> list[Term]:
    heads, T, S = _scores(setting, attention)
    H = attention.head_size
    flops = 4.0 * heads * T * S * H * visible(setting, attention)
    term = kernels.flash(setting.cluster.accelerator, flops, H, backward=backward)
    return [term.named("attention backward" if backward else "attention forward")]


def _softmax(setting: Setting, attention: Attention, each: int, name: str) -> Term:
    heads, T, S = _scores(setting, attention)
    dropout = setting.program.dropout
    size = (each + SCORE_DROPOUT * dropout) * heads * T * S
    return _named(kernels.moved(setting.cluster.accelerator, size, 1 + dropout), name)


def _named(term: Term, name: str) -> Term:
    return term.named(name, "attention")
