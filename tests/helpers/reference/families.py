"""The models: batch and parameters -> the training loss, and the loads of any experts.

A family is a function of a few lines; `docs/models.md` lists the presets in `PRESETS`.
Letters: B batch, T position, D model, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from reference import layers
from reference.draws import DropoutSite, Masks
from reference.layers import ACTIVATIONS, Attending, Options, Params, Part
from reference.moe import Counts, Routers, stacks
from reference.rope import Rope
from reference.tape import Value, einsum, tanh

Batch = Mapping[str, np.ndarray]
Loss = tuple[Value, Counts]


def decoder(params: Params, batch: Batch, options: Options, masks: Masks) -> Loss:
    """GPT-2 and its descendants: Radford et al., 2019; Touvron et al., arXiv 2302.13971."""
    root = Part(params, "")
    x = root("tokens.table")[batch["tokens"]]
    T = x.shape[1]
    if root.has("positions.table"):
        x = x + root("positions.table")[:T]
    x = x * options.embedding_scale
    x = layers.norm(x, root.part("norm"), options) if options.post else x
    x = x * masks.residual(0, DropoutSite.EMBEDDING, x.shape)
    routers = Routers(options)
    for number, (prefix, place) in enumerate(stacks(options)):
        own, of_layer = Part(params, prefix, place), options.of_layer(number)
        seen = layers.before(T, of_layer.window)
        if "segments" in batch:
            seen = seen & layers.same_document(batch["segments"], batch["segments"])
        x = layers.block(x, own, Attending(seen), masks, of_layer, number, feed=routers)
    x = x if options.post else layers.norm(x, root.part("norm"), options)
    loss = _predicted(x, batch["targets"], params, options)
    for k in range(1, options.modules + 1):
        x, further = _ahead(x, k, params, batch, options, masks, routers)
        loss = loss + further * (options.ahead_weight / options.modules)
    return loss + routers.loss(batch["targets"]), routers.counts


def _ahead(
    x: Value,
    k: int,
    params: Params,
    batch: Batch,
    options: Options,
    masks: Masks,
    routers: Routers,
) -> tuple[Value, Value]:
    """MTP module k: the stream that it hands on, and its loss: DeepSeek-V3, 2412.19437, 2.2.

    x: the stream before it, the model's normalised one for k = 1.
    """
    root, own, T = Part(params, ""), Part(params, f"mtp_{k}."), x.shape[1]
    number, last = options.layers + k - 1, options.of_layer(options.layers - 1)
    token, target = np.zeros_like(batch["tokens"]), np.full_like(batch["targets"], -1)
    token[:, : T - k], target[:, : T - k] = batch["tokens"][:, k:], batch["targets"][:, k:]
    seen = layers.before(T, last.window)
    if "segments" in batch:
        document = batch["segments"]
        seen = seen & layers.same_document(document, document)
        target[:, : T - k][document[:, k:] != document[:, : T - k]] = -1
    e = root("tokens.table")[token] * options.embedding_scale
    e = e * masks.residual(number, DropoutSite.EMBEDDING, e.shape)
    e = layers.norm(e, own.part("embedding_norm"), options)
    h = layers.norm(x, own.part("stream_norm"), options)
    both = own("join.w")
    joined = einsum("BTD,DE->BTE", e, both[0]) + einsum("BTD,DE->BTE", h, both[1])
    x = layers.block(joined, own, Attending(seen), masks, last, number, feed=routers)
    plain = dataclasses.replace(options, z_loss=0.0)
    return x, _predicted(layers.norm(x, own.part("norm"), options), target, params, plain)


def _predicted(x: Value, targets: np.ndarray, params: Params, options: Options) -> Value:
    table = params["tokens.table" if options.tied else "head.table"]
    logits = einsum("BTD,VD->BTV", x, table)
    if options.cap is not None:
        logits = tanh(logits * (1 / options.cap)) * options.cap
    return layers.cross_entropy(logits, targets, options.z_loss)


def bert(params: Params, batch: Batch, options: Options, masks: Masks) -> Loss:
    """BERT with both losses: Devlin et al., arXiv 1810.04805."""
    root = Part(params, "")
    x = root("tokens.table")[batch["tokens"]] + root("types.w")[batch["token_types"]]
    x = layers.norm(x + root("positions.table")[: x.shape[1]], root.part("norm"), options)
    x = x * masks.residual(0, DropoutSite.EMBEDDING, x.shape)
    text = batch["mask"] - 1
    seen = layers.same_document(text, text)
    for number in range(options.layers):
        own = Part(params, "blocks.", number)
        x = layers.block(x, own, Attending(seen), masks, options, number)
    h = ACTIVATIONS[options.activation](layers.linear(x, root.part("transform"), "BTD,DE->BTE"))
    h = layers.norm(h, root.part("transform_norm"), options)
    words = einsum("BTD,VD->BTV", h, root("tokens.table")) + root("bias.b")
    pooled = tanh(layers.linear(x, root.part("pooler"), "BTD,DE->BTE"))[:, 0]
    pairs = einsum("BD,CD->BC", pooled, root("pairs.table")) + root("pairs_bias.b")
    masked = layers.cross_entropy(words, batch["targets"])
    return masked + layers.cross_entropy(pairs, batch["next_sentence"]), {}


def t5(params: Params, batch: Batch, options: Options, masks: Masks) -> Loss:
    """An encoder-decoder: Raffel et al., arXiv 1910.10683."""
    root, first = Part(params, ""), options.layers  # the number of the decoder's first layer
    text, targets = batch["source_mask"] - 1, batch["targets"]
    S, T = text.shape[1], targets.shape[1]
    source = _embedded(root, batch["source"], masks, layer=0)
    bias = layers.by_distance(root("common.encoder_bias.table"), (S, S), options, True)
    to = Attending(layers.same_document(text, text), bias)
    for number in range(first):
        source = layers.block(source, Part(params, "encoder.", number), to, masks, options, number)
    source = layers.norm(source, root.part("common.source_norm"), options)

    last = np.concatenate([np.full((len(targets), 1), options.start), targets[:, :-1]], 1)
    x = _embedded(root, np.where(last < 0, options.start, last), masks, layer=first)
    bias = layers.by_distance(root("common.decoder_bias.table"), (T, T), options, False)
    for number in range(first, first + options.decoder_layers):
        own = Part(params, "decoder.", number - first)
        cross = _crossed(source, text, own, masks, options, number)
        to = Attending(layers.before(T), bias)
        x = layers.block(x, own, to, masks, options, number, cross)
    x = layers.norm(x, root.part("norm"), options) * options.output_scale
    return _predicted(x, targets, params, options), {}


def _embedded(root: Part, ids: np.ndarray, masks: Masks, layer: int) -> Value:
    x = root("tokens.table")[ids]
    return x * masks.residual(layer, DropoutSite.EMBEDDING, x.shape)


def _crossed(
    source: Value, text: np.ndarray, own: Part, masks: Masks, options: Options, number: int
) -> Callable[[Value], Value]:
    """A decoder layer's attention to the source, except its padding."""
    to = Attending((text >= 0)[:, None, None])

    def drop(shape: tuple) -> np.ndarray:
        return masks.scores(number, DropoutSite.CROSS_PROBABILITIES, shape)

    def cross(x: Value) -> Value:
        return layers.cross_attention(x, source, own.part("cross"), to, drop, options)

    def keep(shape: tuple) -> np.ndarray:
        return masks.residual(number, DropoutSite.CROSS, shape)

    return lambda x: layers.added(x, "cross_norm", cross, own, options, keep)


_LLAMA: Mapping[str, Any] = {
    "norm": "rmsnorm",
    "eps": 1e-5,
    "activation": "silu",
    "gated": True,
    "rope": Rope(1e4),
}
_QWEN2: Mapping[str, Any] = {**_LLAMA, "eps": 1e-6, "rope": Rope(1e6)}
_GEMMA: Mapping[str, Any] = {**_LLAMA, "eps": 1e-6, "activation": "gelu-tanh", "both": True}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"norm": "layernorm", "eps": 1e-5, "activation": "gelu-tanh"},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, "rope": Rope(1e6)},
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen3": {**_QWEN2, "qk_norm": True},
    "gpt_oss": {**_LLAMA, "activation": "clamped-swiglu", "rope": Rope(1.5e5)},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "qk_norm": True, "rope": Rope(1e6)},
    "qwen3_moe": {**_QWEN2, "qk_norm": True},
    "deepseek_v2": {**_LLAMA, "eps": 1e-6},
    "deepseek_v3": {**_LLAMA, "eps": 1e-6},
    "bert": {"norm": "layernorm", "eps": 1e-12, "activation": "gelu", "post": True},
    "t5": {"norm": "rmsnorm", "eps": 1e-6, "activation": "relu", "scale": 1.0},
}
MODELS: Mapping[str, Callable[[Params, Batch, Options, Masks], Loss]] = {
    **dict.fromkeys(PRESETS, decoder),
    "bert": bert,
    "t5": t5,
}
