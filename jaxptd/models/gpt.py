"""GPT-2 and its descendants: a text model that predicts the next token, or several.

Letters: B batch, T position, D model, V vocabulary, Q terms of routers.
Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.layers.attention import Cache
from jaxptd.layers.block import Routed, Seen
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.loss import soft_cap, vocab_parallel_cross_entropy
from jaxptd.layers.mtp import Ahead, MTPModule
from jaxptd.layers.preference import Documents, document_sums, preference_sums
from jaxptd.layers.tensor_parallel import ShardingAxes, block_along
from jaxptd.models.decoder import (
    CROSS_ENTROPY,
    REFERENCE,
    SEGMENTS,
    Z_LOSS,
    losses_ahead,
    router_losses,
)
from jaxptd.models.model import TextModel, empty_layer_cache
from jaxptd.remat import with_remat


class GPT(TextModel):
    """A decoder-only language model; takes the arguments of `TextModel` and raises its errors."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **others: Any) -> None:
        super().__init__(config, rngs=rngs, **others)
        self.head = None if config.tie_embeddings else self.table(rngs)
        self.losses_ahead = tuple(losses_ahead(config).items())
        self.module_names = tuple(x.name for x in self.architecture(config).layers_behind)
        for number, layer in enumerate(self.architecture(config).layers_behind, 1):
            own: Any = {"number": number, "tensor_parallel": self.tensor_parallel, "rngs": rngs}
            like_last = config.with_heads_of(config.head_size_of(config.num_layers - 1))
            setattr(self, layer.name, MTPModule(layer, like_last, **own))

    @property
    def modules_ahead(self) -> list[MTPModule]:
        """The MTP modules, in order."""
        return [getattr(self, name) for name in self.module_names]

    def output(self, x_BTD: Array) -> Array:
        """x after all blocks -> logits[B, T, V], V sharded."""
        return self.logits(self.last_norm(x_BTD))

    def logits(self, x_BTD: Array) -> Array:
        """x, normalised -> logits[B, T, V], V sharded."""
        divisor = self.options.logit_divisor
        logits_BTV = (self.head or self.tokens).logits(x_BTD if divisor == 1 else x_BTD / divisor)
        limit = self.config.logit_softcap
        return logits_BTV if limit is None else soft_cap(logits_BTV, limit)

    @jax.named_scope("loss")
    def losses(
        self, x: Array | Routed, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """x after all blocks -> `sums_over_targets`, of routers' losses and of tokens ahead.

        Of the last only if the batch has them. With `model.preference` of pairs, not of targets.
        """
        axes, targets_BT = self.tensor_parallel.axes, batch["targets"]
        x_BTD = x.x_BTD if isinstance(x, Routed) else x
        ahead = self.losses_ahead and "tokens_1" in batch
        if ahead:
            logits_BTV, x_BTD = self.output_and_stream(x_BTD)
        else:
            logits_BTV = self.output(x_BTD)
        if self.config.preference:
            own = self._of_documents(logits_BTV, batch)
            sums = preference_sums(own, self.config.preference, axes)
        else:
            sums = sums_over_targets(logits_BTV, targets_BT, self.config, axes)
        if ahead:
            x, more = self._of_modules(_with_stream(x, x_BTD), batch, token_info)
            sums |= more
        return sums | self._of_routers(x, batch) if isinstance(x, Routed) else sums

    def evaluated(
        self, x: Array | Routed, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """The sums of `losses` without those of tokens ahead."""
        read = {name: batch[name] for name in ("targets", SEGMENTS, REFERENCE) if name in batch}
        return self.losses(x, read, token_info)

    def log_probabilities(self, x: Array | Routed, batch: Mapping[str, Array]) -> Array:
        """x after all blocks -> sums over this device's targets of each document, `[B, K]`."""
        none_BT = {REFERENCE: jnp.zeros_like(batch[REFERENCE])}
        return self._of_documents(self.output(_stream(x)), {**batch, **none_BT}).gain_BK

    def _of_documents(self, logits_BTV: Array, batch: Mapping[str, Array]) -> Documents:
        """Sums over this device's tokens of each document."""
        axes, config = self.tensor_parallel.axes, self.config
        targets_BT, segment_BT, reference_BT = (
            block_along(batch[name], axes.logit_tokens, 1)
            for name in ("targets", SEGMENTS, REFERENCE)
        )
        loss_BT, _ = vocab_parallel_cross_entropy(
            logits_BTV, targets_BT, axes, config.vocab_size or 0, config.kernels
        )
        counted_BT = targets_BT >= 0
        gain_BT = jnp.where(counted_BT, -loss_BT, 0) - reference_BT.astype(loss_BT.dtype)
        gains_BK, sizes_BK = (
            document_sums(x_BT, segment_BT, config.seq_length)
            for x_BT in (gain_BT, counted_BT.astype(loss_BT.dtype))
        )
        return Documents(gains_BK, sizes_BK)

    def _of_routers(self, x: Routed, batch: Mapping[str, Array]) -> dict[str, Array]:
        """The sum of each of the routers' losses over the tokens with targets."""
        axes = self.tensor_parallel.axes
        own_BT = block_along(batch["targets"], axes.tokens, 1)
        sum_Q = jnp.where(own_BT[..., None] >= 0, x.terms_BTQ, 0).sum((0, 1))
        names = router_losses(self.config)
        return dict(zip(names, axes.sum_over_tokens(sum_Q), strict=True))

    # ---- tokens further ahead -------------------------------------------------------------------

    def _of_modules(
        self, x: Array | Routed, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> tuple[Array | Routed, dict[str, Array]]:
        """x, normalised -> (x after all MTP modules, the sum of each one's cross-entropy)."""
        sums, axes = {}, self.tensor_parallel.axes
        for (name, loss), module in zip(self.losses_ahead, self.modules_ahead, strict=True):
            x = self._after(module, x, batch, token_info)
            logits_BTV, targets_BT = self.logits(module.norm(_stream(x))), batch[loss.targets]
            own = sums_over_targets(logits_BTV, targets_BT, self.config, axes)
            sums[name] = own[CROSS_ENTROPY]
        return x, sums

    def seen(self, x: Routed, batch: Mapping[str, Array], token_info: TokenInfo) -> Seen | None:
        """x after all blocks -> what all routers chose, with those of MTP modules."""
        normed = _with_stream(x, self.last_norm(_stream(x)))
        for module in self.modules_ahead:
            normed = self._after(module, normed, batch, token_info)
        found: Seen | None = normed.seen
        return found

    def output_and_stream(self, x: Array) -> tuple[Array, Array]:
        """x after all blocks -> `output`, and what the first MTP module takes."""
        x_BTD = self.last_norm(x)
        return self.logits(x_BTD), x_BTD

    def draft(
        self, number: int, x_BTD: Array, tokens_BT: Array, token_info: TokenInfo, cache: Cache
    ) -> tuple[Array, Array, Cache]:
        """x before an MTP module -> (its logits, x after it, its cache), in generation.

        number: the module's. tokens_BT: those this many places ahead.
        """
        module, layer = self.modules_ahead[number - 1], self.config.num_layers + number - 1
        ahead = Ahead(x_BTD, self.looked_up(tokens_BT, token_info, layer=layer))
        x, new = module.ahead(ahead, token_info, jnp.int32(layer), cache)
        assert new is not None
        return self.logits(module.norm(_stream(x))), _stream(x), new

    def empty_drafts(self, batch: int) -> list[Cache]:
        """The empty cache of each MTP module."""
        modules = self.modules_ahead
        return [empty_layer_cache(each.attention, self.config, batch) for each in modules]

    def _after(
        self, module: MTPModule, x: Any, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> Any:
        """x after an MTP module, which saves for backward what its policy says."""
        layer = self.config.num_layers + module.number - 1
        tokens_BT = batch[f"tokens_{module.number}"]
        ahead = Ahead(x, self.looked_up(tokens_BT, token_info, layer=layer))

        def run(module: MTPModule, inputs: tuple[TokenInfo, Array], ahead: Ahead) -> Any:
            return module.ahead(ahead, *inputs, None)[0]

        if module.remat != "none":
            run = with_remat(run, module.remat, scanned=False)
        return run(module, (token_info, jnp.int32(layer)), ahead)


def _stream(x: Array | Routed) -> Array:
    """The residual stream."""
    return x.x_BTD if isinstance(x, Routed) else x


def _with_stream(x: Array | Routed, x_BTD: Array) -> Any:
    return x._replace(x_BTD=x_BTD) if isinstance(x, Routed) else x_BTD


def sums_over_targets(
    logits_BTV: Array, targets_BT: Array, config: ModelConfig, axes: ShardingAxes
) -> dict[str, Array]:
    """Sums the targets' -log probabilities, in nats.

    With `z_loss` also sums the squares of log sum exp(logits). Float32 or wider, over this device's
    tokens, which are those of the logits. Ignores targets below 0.

    Args:
        logits_BTV: this device's shard of V.
        targets_BT: targets of its cp block.
        config: the model's.
        axes: how the logits are sharded.
    """
    targets_BT = block_along(targets_BT, axes.logit_tokens, 1)
    loss_BT, logsumexp_BT = vocab_parallel_cross_entropy(
        logits_BTV, targets_BT, axes, config.vocab_size or 0, config.kernels
    )
    terms = {CROSS_ENTROPY: loss_BT}
    if config.z_loss:
        terms[Z_LOSS] = jnp.square(logsumexp_BT)
    return {name: jnp.sum(jnp.where(targets_BT >= 0, x, 0)) for name, x in terms.items()}
