"""The layers of transformers, each written as the formula of its paper.

Letters: B batch, T query position, S key position, D model, F hidden, N heads, K heads of keys and
values, H head size, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from reference.draws import DropoutSite, Masks
from reference.rope import Rope, rotated
from reference.tape import (
    Value,
    below,
    einsum,
    logsumexp,
    power,
    relu,
    sigmoid,
    softmax,
    tanh,
    with_column,
)

ACTIVATIONS: Mapping[str, Callable[[Value], Value]] = {
    "gelu": lambda x: x * below(x),
    "gelu-tanh": lambda x: (
        x * 0.5 * (tanh((x + power(x, 3) * 0.044715) * math.sqrt(2 / math.pi)) + 1)
    ),
    "relu": relu,
    "silu": lambda x: x * sigmoid(x),
}


@dataclasses.dataclass(frozen=True)
class MoE:
    """The options of a model's experts, as in a config.

    Args:
        chosen: experts per token.
        score: softmax or sigmoid.
        normalize: whether a token's weights are divided by their sum.
        scale: factor for the weights.
        groups: number of groups of neighbouring experts.
        top_groups: number of groups that a token may choose from.
        group_score: best_two or best.
        rate: amount by which an expert's bias moves in each step.
        balance_loss: weight of the load-balancing loss.
        z_loss: weight of the squared logsumexp of the router's logits.
        first_dense: number of first layers without experts.
        every: only every n-th layer has experts.
        dense_layers: other layers without experts.
    """

    chosen: int = 2
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "best_two"
    rate: float = 0.0
    balance_loss: float = 0.0
    z_loss: float = 0.0
    first_dense: int = 0
    every: int = 1
    dense_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Options:
    """The sizes and options of a model, as in a config.

    Args:
        layers: number of blocks; for T5 those of the encoder.
        decoder_layers: number of blocks of T5's decoder.
        head_size: H.
        norm: layernorm or rmsnorm.
        eps: added to the variance.
        post: whether norms come after the residual sums.
        output: whether norms are of what attention and the MLP return, before it is added.
        both: whether there are norms of these outputs as well as of inputs.
        embedding_scale: factor for x after the embedding.
        activation: activation of the MLP.
        gated: whether the MLP has a gate.
        qk_norm: whether queries and keys are normalised.
        rope: rotary positions; None without.
        window: number of keys that a query sees, ending with itself; None: all before it.
        by_layer: window and rope of each layer, if they differ.
        scale: factor for the scores; None: H ** -0.5.
        buckets: number of T5's buckets of distances.
        distance: distance from which on keys share a bucket.
        output_scale: factor for x before the output layer.
        tied: whether the output layer is the embedding.
        cap: limit of the logits.
        score_cap: limit of scaled scores.
        uncapped: the layers without this limit.
        head_sizes: head_size of each layer of a period, if they differ.
        z_loss: weight of the squared logsumexp of the logits.
        start: id that T5's decoder reads first.
        dropout: dropout rate.
        moe: experts; None without.
        modules: number of MTP modules.
        ahead_weight: weight of the mean of their losses.
    """

    layers: int
    decoder_layers: int
    head_size: int
    norm: str
    eps: float
    activation: str
    post: bool = False
    output: bool = False
    both: bool = False
    embedding_scale: float = 1.0
    gated: bool = False
    qk_norm: bool = False
    rope: Rope | None = None
    window: int | None = None
    by_layer: tuple[tuple[int | None, Rope | None], ...] = ()
    scale: float | None = None
    buckets: int = 0
    distance: int = 0
    output_scale: float = 1.0
    tied: bool = True
    cap: float | None = None
    score_cap: float | None = None
    uncapped: tuple[int, ...] = ()
    head_sizes: tuple[int, ...] = ()
    z_loss: float = 0.0
    start: int = 0
    dropout: float = 0.0
    moe: MoE | None = None
    modules: int = 0
    ahead_weight: float = 0.3

    def of_layer(self, number: int) -> "Options":
        """The options of one layer."""
        own = dataclasses.replace(self, score_cap=None) if number in self.uncapped else self
        if sizes := self.head_sizes:
            own = dataclasses.replace(own, head_size=sizes[number % len(sizes)])
        if not self.by_layer:
            return own
        window, rope = self.by_layer[number]
        return dataclasses.replace(own, window=window, rope=rope)


Params = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class Part:
    """The parameters with this prefix, sliced to one layer if they are stacked.

    layer: index of the layer, or of an expert, or of the layer and an expert.
    """

    params: Params
    prefix: str
    layer: int | tuple[int, ...] | None = None

    def __call__(self, name: str) -> Value:
        found = self.params[f"{self.prefix}{name}"]
        return found if self.layer is None else found[self.layer]

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self.params

    def part(self, name: str) -> "Part":
        return Part(self.params, f"{self.prefix}{name}.", self.layer)


def norm(x: Value, own: Part, options: Options) -> Value:
    """LayerNorm, or RMSNorm, over the last dim."""
    if options.norm == "layernorm":
        x = x - x.mean()
    y = x * power(power(x, 2).mean() + options.eps, -0.5) * own("w")
    return y + own("b") if own.has("b") else y


def linear(x: Value, own: Part, rule: str) -> Value:
    y = einsum(rule, x, own("w"))
    return y + own("b") if own.has("b") else y


@dataclasses.dataclass(frozen=True)
class Attending:
    """Inputs shared by all layers of a stack.

    seen: keys that each query sees; broadcasts to `[B, N, T, S]`. bias: added to scores, or None.
    """

    seen: np.ndarray
    bias: Value | None = None


def attend(
    q: Value,
    kv: tuple[Value, Value],
    to: Attending,
    drop: Callable,
    options: Options,
    sink: Value | None = None,
) -> Value:
    """q[B, T, N, H], k and v[B, S, K, H] -> [B, T, N, H]; groups of N / K heads share k and v.

    sink: the score `[N]` of one more key, which every query sees and whose value is zero.
    """
    heads = np.arange(q.shape[2]) // (q.shape[2] // kv[0].shape[2])
    k, v = (each.moved(2, 0)[heads] for each in kv)
    scores = einsum("BTNH,NBSH->BNTS", q, k) * (options.scale or options.head_size**-0.5)
    if options.score_cap is not None:
        scores = tanh(scores * (1 / options.score_cap)) * options.score_cap
    scores = scores if to.bias is None else scores + to.bias
    seen = np.broadcast_to(to.seen, scores.shape)
    if sink is not None:
        seen = np.concatenate([seen, np.ones_like(seen[..., :1])], -1)
        p = softmax(with_column(scores, sink), seen)[..., :-1]
    else:
        p = softmax(scores, seen)
    return einsum("BNTS,NBSH->BTNH", p * drop(p.shape), v)


def self_attention(x: Value, own: Part, to: Attending, drop: Callable, options: Options) -> Value:
    if own.has("qkv.w"):
        qkv = linear(x, own.part("qkv"), "BTD,DCNH->BTCNH")
        q, k, v = (qkv[:, :, i] for i in range(3))
    else:
        q = linear(x, own.part("q"), "BTD,DNH->BTNH")
        kv = linear(x, own.part("kv"), "BTD,DCKH->BTCKH")
        k, v = kv[:, :, 0], kv[:, :, 1]
    if options.qk_norm:
        q, k = norm(q, own.part("q_norm"), options), norm(k, own.part("k_norm"), options)
    q, k = rotated(q, options.rope), rotated(k, options.rope)
    sink = own("sinks") if own.has("sinks") else None
    o = attend(q, (k, v), to, drop, options, sink)
    return linear(o, own.part("out"), "BTNH,NHD->BTD")


def latent_attention(x: Value, own: Part, to: Attending, drop: Callable, options: Options) -> Value:
    """Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    Its norms are RMSNorm with a constant of their own. Scores add what a key of each head and a
    rotated key of all heads say; values have a width of their own.
    """
    inner = dataclasses.replace(options, norm="rmsnorm", eps=1e-6)

    def latent(name: str) -> tuple[Value, Value]:
        vector, rank = own.part(name), own(f"{name}.norm.w").shape[0]
        both = einsum("BTD,DR->BTR", x, vector("w"))
        return norm(both[..., :rank], vector.part("norm"), inner), both[..., rank:]

    c, rope = latent("kv_latent")
    if own.has("q_latent.w"):
        q = einsum("BTR,RNH->BTNH", latent("q_latent")[0], own("q_up.w"))
    else:
        q = einsum("BTD,DNH->BTNH", x, own("q.w"))
    nope = q.shape[-1] - rope.shape[-1]
    kv = einsum("BSR,RNH->BSNH", c, own("kv_up.w"))
    shared = rotated(rope[:, :, None], options.rope)[:, :, 0]
    scores = einsum("BTNH,BSNH->BNTS", q[..., :nope], kv[..., :nope])
    turned = rotated(q[..., nope:], options.rope)
    scores = scores + einsum("BTNH,BSH->BNTS", turned, shared)
    p = softmax(
        scores * (options.scale or q.shape[-1] ** -0.5), np.broadcast_to(to.seen, scores.shape)
    )
    o = einsum("BNTS,BSNV->BTNV", p * drop(p.shape), kv[..., nope:])
    return einsum("BTNV,NVD->BTD", o, own("out.w"))


def cross_attention(
    x: Value, source: Value, own: Part, to: Attending, drop: Callable, options: Options
) -> Value:
    q = linear(x, own.part("q"), "BTD,DNH->BTNH")
    kv = linear(source, own.part("kv"), "BTD,DCKH->BTCKH")
    k, v = kv[:, :, 0], kv[:, :, 1]
    if options.qk_norm:
        q, k = norm(q, own.part("q_norm"), options), norm(k, own.part("k_norm"), options)
    return linear(attend(q, (k, v), to, drop, options), own.part("out"), "BTNH,NHD->BTD")


def clamped(gate: Value, up: Value) -> Value:
    """The gate of gpt-oss: of numbers up to 7, and between -7 and 7."""
    gate = (relu(gate * -1 + 7) - 7) * -1
    up = relu(up + 7) - relu(up - 7) - 7
    return gate * sigmoid(gate * 1.702) * (up + 1)


def mlp(x: Value, own: Part, options: Options) -> Value:
    act = ACTIVATIONS.get(options.activation)
    if options.gated:
        h = linear(x, own.part("up"), "BTD,DCF->BTCF")
        gate, up = h[:, :, 0], h[:, :, 1]
        h = clamped(gate, up) if options.activation == "clamped-swiglu" else act(gate) * up
    else:
        h = act(linear(x, own.part("up"), "BTD,DF->BTF"))
    return linear(h, own.part("down"), "BTF,FD->BTD")


def added(x: Value, name: str, f: Callable, own: Part, options: Options, keep: Callable) -> Value:
    """Residual connection: adds f(x) after dropout, with the norm before f or after the sum.

    Args:
        x: the residual stream.
        name: name of the norm.
        f: attention or MLP.
        own: parameters of the layer.
        options: options of the model.
        keep: factors of dropout.
    """
    if options.post:
        y = f(x)
        return norm(x + y * keep(y.shape), own.part(name), options)
    if options.output:
        y = norm(f(x), own.part(name), options)
        return x + y * keep(y.shape)
    y = f(norm(x, own.part(name), options))
    if options.both:
        y = norm(y, own.part(name.replace("_norm", "_output_norm")), options)
    return x + y * keep(y.shape)


def block(
    x: Value,
    own: Part,
    to: Attending,
    masks: Masks,
    options: Options,
    number: int,
    between: Callable[[Value], Value] = lambda x: x,
    feed: Callable[[Value, Part], Value] | None = None,
) -> Value:
    """A layer; between: what follows attention; feed: its MLP or experts, by default an MLP."""

    def drop(shape: tuple) -> np.ndarray:
        return masks.scores(number, DropoutSite.PROBABILITIES, shape)

    def attention(x: Value) -> Value:
        inner = own.part("attention")
        attend = latent_attention if inner.has("kv_latent.w") else self_attention
        return attend(x, inner, to, drop, options)

    def of(site: DropoutSite) -> Callable:
        return lambda shape: masks.residual(number, site, shape)

    x = added(x, "attention_norm", attention, own, options, of(DropoutSite.ATTENTION))
    x = between(x)

    def feed_forward(x: Value) -> Value:
        inner = own.part("mlp")
        return feed(x, inner) if feed else mlp(x, inner, options)

    return added(x, "mlp_norm", feed_forward, own, options, of(DropoutSite.MLP))


def cross_entropy(logits: Value, targets: np.ndarray, z_loss: float = 0.0) -> Value:
    """Mean -log probability over the targets of 0 or more, plus z times the mean of log Z squared.

    logits: `[.., V]`. targets: `[..]`.
    """
    size, counted = logits.shape[-1], targets >= 0
    one_hot = np.eye(size)[np.where(counted, targets, 0)] * counted[..., None]
    log_z = logsumexp(logits)
    loss = mean_over_targets(log_z, targets) - (logits * (one_hot / counted.sum())).sum()
    return loss + mean_over_targets(power(log_z, 2), targets) * z_loss if z_loss else loss


def mean_over_targets(x: Value, targets: np.ndarray) -> Value:
    """Mean of x over the tokens with a target of 0 or more."""
    counted = targets >= 0
    return (x * (counted / counted.sum())).sum()


def same_document(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """True for keys in the query's document, `[B, 1, T, S]`; negative numbers mark no document."""
    return ((query[:, :, None] == key[:, None, :]) & (key >= 0)[:, None, :])[:, None]


def before(T: int, window: int | None = None) -> np.ndarray:
    """True for keys at or before a query, `[T, T]`, limited to the last `window` of them."""
    distance = np.arange(T)[:, None] - np.arange(T)
    return (distance >= 0) & (distance < (window or T))


def bucket(distance: int, options: Options, *, both_ways: bool) -> int:
    """The bucket of key - query, as in section 2.1 and the code of T5.

    Half of the buckets cover one distance each, the rest wider ranges on a logarithmic scale.
    """
    count, first = options.buckets, 0
    if both_ways:
        count //= 2
        first = count if distance > 0 else 0
        distance = -abs(distance)
    far, single = max(-distance, 0), count // 2
    if far < single:
        return first + far
    share = math.log(far / single) / math.log(options.distance / single)
    return first + min(single + int(share * (count - single)), count - 1)


def by_distance(table: Value, sizes: tuple[int, int], options: Options, both_ways: bool) -> Value:
    """The bias of each score, `[N, T, S]`, from a table `[buckets, N]`."""
    number = [
        [bucket(s - t, options, both_ways=both_ways) for s in range(sizes[1])]
        for t in range(sizes[0])
    ]
    return table[np.array(number)].moved(2, 0)
