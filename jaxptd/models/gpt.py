"""GPT-2 and its descendants: a text model that predicts the next token, or several.

Letters: B batch, T position, D model, V vocabulary, Q terms of routers.
Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxptd.config import ModelConfig
from jaxptd.layers.block import Routed
from jaxptd.layers.dropout import TokenInfo
from jaxptd.layers.loss import soft_cap, vocab_parallel_cross_entropy
from jaxptd.layers.mtp import Ahead, MTPModule
from jaxptd.layers.tensor_parallel import ShardingAxes, block_along
from jaxptd.models.decoder import CROSS_ENTROPY, Z_LOSS, losses_ahead, router_losses
from jaxptd.models.model import TextModel
from jaxptd.remat import with_remat


class GPT(TextModel):
    """A decoder-only language model; takes the arguments of `TextModel` and raises its errors."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **others: Any) -> None:
        super().__init__(config, rngs=rngs, **others)
        self.head = None if config.tie_embeddings else self.table(rngs)
        layers = self.architecture(config).layers_behind
        self.module_names = tuple(layer.name for layer in layers)
        for layer in layers:
            module = MTPModule(layer, config, tensor_parallel=self.tensor_parallel, rngs=rngs)
            setattr(self, layer.name, module)

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
        """x after all blocks -> `sums_over_targets`, of routers' losses and of tokens ahead."""
        stream_BTD, terms_BTQ = _separate(x)
        stream_BTD = self.last_norm(stream_BTD)
        sums = self._of_next(stream_BTD, batch)
        for name, module_sum, module_terms_BTQ in self._ahead(stream_BTD, batch, token_info):
            sums[name] = module_sum
            terms_BTQ = None if terms_BTQ is None else terms_BTQ + module_terms_BTQ
        return sums | self._of_routers(terms_BTQ, batch)

    @jax.named_scope("loss")
    def evaluated(
        self, x: Array | Routed, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> dict[str, Array]:
        """The sums of `losses` without those of tokens ahead; there are no scores."""
        stream_BTD, terms_BTQ = _separate(x)
        sums = self._of_next(self.last_norm(stream_BTD), batch)
        return sums | self._of_routers(terms_BTQ, batch)

    def _of_next(self, x_BTD: Array, batch: Mapping[str, Array]) -> dict[str, Array]:
        """`sums_over_targets` of the next tokens; x: normalised."""
        axes = self.tensor_parallel.axes
        return sums_over_targets(self.logits(x_BTD), batch["targets"], self.config, axes)

    def _of_routers(
        self, terms_BTQ: Array | None, batch: Mapping[str, Array]
    ) -> dict[str, Array]:
        """The sum of each of the routers' losses over the tokens with targets."""
        if terms_BTQ is None:
            return {}
        axes = self.tensor_parallel.axes
        own_BT = block_along(batch["targets"], axes.tokens, 1)
        sum_Q = jnp.where(own_BT[..., None] >= 0, terms_BTQ, 0).sum((0, 1))
        names = router_losses(self.config)
        return dict(zip(names, axes.sum_over_tokens(sum_Q), strict=True))

    # ---- tokens further ahead -------------------------------------------------------------------

    def _ahead(
        self, stream_BTD: Array, batch: Mapping[str, Array], token_info: TokenInfo
    ) -> Iterator[tuple[str, Array, Array | None]]:
        """Yields for each MTP module its loss's name, the sum of it, and its router's terms.

        stream_BTD: x after all blocks, normalised.
        """
        axes, first = self.tensor_parallel.axes, self.config.num_layers
        for k, (name, module) in enumerate(
            zip(losses_ahead(self.config), self.modules_ahead, strict=True), 1
        ):
            number = jnp.int32(first + k - 1)
            token_BTD = self.looked_up(batch[f"tokens_{k}"], token_info, layer=first + k - 1)
            terms_BTQ = self.no_terms(stream_BTD) if self.terms_of_loss else None
            x = _run(module, (token_info, number), Ahead(stream_BTD, token_BTD, terms_BTQ))
            stream_BTD, terms_BTQ = _separate(x)
            logits_BTV = self.logits(module.norm(stream_BTD))
            targets_BT = batch[f"targets_{k}"]
            sums = sums_over_targets(logits_BTV, targets_BT, self.config, axes)
            yield name, sums[CROSS_ENTROPY], terms_BTQ


def _run(module: MTPModule, inputs: tuple[TokenInfo, Array], x: Ahead) -> Array | Routed:
    """x after a module, which saves for backward what its policy says."""

    def plain(module: MTPModule, inputs: tuple[TokenInfo, Array], x: Ahead) -> Array | Routed:
        return module.ahead(x, *inputs, None)[0]

    if module.remat == "none":
        return plain(module, inputs, x)
    run: Any = with_remat(plain, module.remat, scanned=False)
    after: Array | Routed = run(module, inputs, x)
    return after


def _separate(x: Array | Routed) -> tuple[Array, Array | None]:
    """(the residual stream, routers' terms if there are any)."""
    return (x.x_BTD, x.terms_BTQ) if isinstance(x, Routed) else (x, None)


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
