"""The transformer block, and the parameters of a stack of blocks.

Letters: B batch, T position, D model, L layers.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.config import ModelConfig
from jaxptd.config.block import NormOrder
from jaxptd.layers.attention import Cache
from jaxptd.layers.dropout import DropoutSite, TokenInfo, dropout, noise
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel, block_along
from jaxptd.params import normal, stacked
from jaxptd.parts.architecture import Stack
from jaxptd.pipeline.pools import LayerInputs
from jaxptd.remat import SAVED_MATMUL_IN, SAVED_MATMUL_OUT


class Routed(NamedTuple):
    """The residual stream with what the routers so far say.

    x_BTD: the residual stream. terms_BTQ: what they add to the loss, a column for each term.
    seen: what they chose, if it is recorded.
    """

    x_BTD: Array
    terms_BTQ: Array
    seen: "Seen | None" = None

    def after(self, x_BTD: Array, said: "RouterOutput | None", layer: Array) -> "Routed":
        """x after a layer, with what its router says, if it has one."""
        if said is None:
            return self._replace(x_BTD=x_BTD)
        seen = self.seen and self.seen.with_layer(said, layer)
        return Routed(x_BTD, self.terms_BTQ + said.terms_BTQ, seen)


class Seen(NamedTuple):
    """The choices of all routers.

    expert_BTLK: the experts of each token. margin_BTL: how much better the last of them is than the
    best expert that was not chosen.
    """

    expert_BTLK: Array
    margin_BTL: Array

    def with_layer(self, said: "RouterOutput", layer: Array) -> "Seen":
        """With those of a layer."""
        return Seen(
            lax.dynamic_update_index_in_dim(self.expert_BTLK, said.expert_BTK, layer, 2),
            lax.dynamic_update_index_in_dim(self.margin_BTL, said.margin_BT, layer, 2),
        )


class RouterOutput(NamedTuple):
    """A router's words on its tokens, for the loss and for whoever records choices.

    terms_BTQ: what they add to the loss. expert_BTK: their experts. margin_BT: as in `Seen`.
    """

    terms_BTQ: Array
    expert_BTK: Array
    margin_BT: Array


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; or `norm(x + attention(x))`, and so on;
    or `x + norm(attention(x))`; or both, `x + output_norm(attention(norm(x)))`.

    The matmuls that add to the residual stream start smaller, by 1 / sqrt(the number of such
    additions in all layers), for example 2 L.
    Source: Radford et al., 2019 (GPT-2), section 2.3; Vaswani et al., 2017 (norm after addition).
    """

    scale: float = 1.0  # of what is added, unless a block of another kind sets it
    norm_order: NormOrder = "pre"
    attention_output_norm: Norm | None = None  # a second one, with norms of inputs and outputs
    mlp_output_norm: Norm | None = None

    def __init__(
        self,
        stack: Stack,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
    ) -> None:
        init_out = normal(0.02 / (len(stack.parts) * stack.layers) ** 0.5)
        options, (attention, *_, mlp) = config.block, stack.parts
        norm = partial(
            Norm, stack.hidden, options=options, tensor_parallel=tensor_parallel, rngs=rngs
        )
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs, "init_out": init_out}
        self.attention_norm = norm()
        self.attention = attention.make_layer(config, **own)
        self.mlp_norm = norm()
        self.mlp = mlp.make_layer(config, **own)
        if options.norm_order == "both":
            self.attention_output_norm, self.mlp_output_norm = norm(), norm()
        self.rate, self.tensor_parallel = config.dropout, tensor_parallel
        self.scale = options.residual_scale
        self.init_out, self.norm_order = init_out, options.norm_order
        self.routes = mlp.routes

    def __call__(
        self,
        x: Array | Routed,
        token_info: TokenInfo,
        layer: Array,
        cache: Cache | None,
        common: None = None,
        *,
        bias_NR: Array | None = None,
        between: Callable[[Array], Array] | None = None,
    ) -> tuple[Any, Cache | None]:
        """Maps the residual stream through the block, and appends x's keys and values to the cache.

        Args:
            x: the residual stream, with or without routers' losses.
            token_info: describes its tokens.
            layer: the layer's number.
            cache: keys and values of earlier tokens, in generation.
            common: parameters that all layers of a model share; this block reads none.
            bias_NR: added to the scores, by distance.
            between: applied to x between attention and MLP.
        """
        routed = x if isinstance(x, Routed) else None
        x_BTD: Array = x.x_BTD if isinstance(x, Routed) else x
        order = self.norm_order
        first, outputs, last = order in ("pre", "both"), order == "output", order == "post"
        x_BTD, n_BTD = self.attention_norm.beside(x_BTD) if first else (x_BTD, x_BTD)
        own = token_info._replace(layer=layer, seed=None)
        own = token_info.at(layer, DropoutSite.ATTENTION) if self.rate else own
        a_BTD, cache = self.attention(n_BTD, own, cache, bias_NR=bias_NR)
        after = self.attention_norm if outputs else self.attention_output_norm
        a_BTD = a_BTD if after is None else self.normed(after, a_BTD)
        x_BTD = self.add(x_BTD, a_BTD, token_info, layer=layer, site=DropoutSite.ATTENTION_OUTPUT)
        x_BTD = self.attention_norm(x_BTD) if last else x_BTD
        x_BTD = x_BTD if between is None else between(x_BTD)
        x_BTD = checkpoint_name(x_BTD, SAVED_MATMUL_IN) if outputs else x_BTD
        x_BTD, n_BTD = self.mlp_norm.beside(x_BTD) if first else (x_BTD, x_BTD)
        said = None
        if self.routes:
            h_BTD, said = self.mlp(n_BTD, token_info, layer)
        else:
            h_BTD = self.mlp(n_BTD)
        after = self.mlp_norm if outputs else self.mlp_output_norm
        h_BTD = h_BTD if after is None else self.normed(after, h_BTD)
        x_BTD = self.add(x_BTD, h_BTD, token_info, layer=layer, site=DropoutSite.MLP_OUTPUT)
        x_BTD = self.mlp_norm(x_BTD) if last else x_BTD
        return routed.after(x_BTD, said, layer) if routed else x_BTD, cache

    def normed(self, norm: Norm, y_BTD: Array) -> Array:
        """The norm of a pair's output, which is saved; otherwise backward would multiply again."""
        return norm(checkpoint_name(y_BTD, SAVED_MATMUL_OUT))

    def add(
        self,
        x_BTD: Array,
        y_BTD: Array,
        token_info: TokenInfo,
        *,
        layer: Array,
        site: DropoutSite,
    ) -> Array:
        """Adds y, a pair's output, to x, scaled and after dropout; only the sum is saved."""
        y_BTD = y_BTD if self.scale == 1 else y_BTD * self.scale
        if self.rate:
            y_BTD = drop_residual(
                y_BTD,
                token_info.at(layer, site),
                tensor_parallel=self.tensor_parallel,
                rate=self.rate,
            )
        sum_BTD = x_BTD + y_BTD
        # Behind a norm, the terms of the sum are saved, or cheap to compute again.
        saved = self.norm_order not in ("output", "both")
        return checkpoint_name(sum_BTD, SAVED_MATMUL_OUT) if saved else sum_BTD


def drop_residual(
    x_BTD: Array, token_info: TokenInfo, *, tensor_parallel: TensorParallel, rate: float
) -> Array:
    """Applies dropout to this device's block of the residual stream."""
    axes = tensor_parallel.axes
    local = token_info._replace(position_T=block_along(token_info.position_T, axes.tokens, -1))
    return dropout(x_BTD, local, axes.local_hidden(x_BTD.shape[-1]), rate)


def noise_residual(
    x_BTD: Array, token_info: TokenInfo, *, tensor_parallel: TensorParallel, most: float
) -> Array:
    """Adds noise between -most and most to this device's block of the residual stream."""
    axes = tensor_parallel.axes
    local = token_info._replace(position_T=block_along(token_info.position_T, axes.tokens, -1))
    return x_BTD + noise(local, axes.local_hidden(x_BTD.shape[-1]), most).astype(x_BTD.dtype)


class Period(nnx.Module):
    """Blocks of different shapes, one after another: a layer of a stack whose loop runs periods.

    Args:
        stack: of periods.
        config: of the model.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial parameters.
        kind: the blocks' class.
    """

    recomputes_inside = True

    def __init__(
        self,
        stack: Stack,
        config: ModelConfig,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        kind: type[Block] = Block,
    ) -> None:
        self.names = tuple(name.removesuffix(".") for name in stack.names)
        for place, (name, each) in enumerate(zip(self.names, stack.in_turn, strict=True)):
            every = dataclasses.replace(each, layers=stack.layers * stack.period)
            own = config.of_layers(slice(place, None, stack.period))
            setattr(self, name, kind(every, own, tensor_parallel=tensor_parallel, rngs=rngs))

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks by their names, in turn."""
        return {name: getattr(self, name) for name in self.names}

    def __call__(
        self,
        x: Array | Routed,
        token_info: TokenInfo,
        period: Array,
        caches: dict[str, Cache] | None,
        common: Any = None,
        *,
        wrap: Callable[[Any], Any] | None = None,
    ) -> tuple[Any, dict[str, Cache | None] | None]:
        """Maps the residual stream through the blocks.

        Args:
            x: the residual stream, with or without routers' losses.
            token_info: describes its tokens.
            period: the number of the period.
            caches: each block's, in generation.
            common: as of `Block`.
            wrap: makes the pass of a block save what its policy says. Each block recomputes by
                itself, so that backward never holds the values of a whole period.
        """

        def run(params: tuple[Any, Any], inputs: LayerInputs, x: Any) -> tuple[Any, Any]:
            result: tuple[Any, Any] = params[0](x, *inputs, params[1])
            return result

        new, each = {}, run if wrap is None else wrap(run)
        for place, (name, block) in enumerate(self.blocks.items()):
            layer = period * len(self.names) + place
            inputs = LayerInputs(token_info, layer, caches and caches[name])
            x, new[name] = each((block, common), inputs, x)
        return x, None if caches is None else new


def make_blocks(
    stack: Stack,
    config: ModelConfig,
    *,
    tensor_parallel: TensorParallel,
    rngs: nnx.Rngs,
    kind: type[Block] = Block,
) -> Any:
    """Makes one block, or period, with the parameters of L of them, stacked `[L, ...]`.

    kind: the blocks' class.
    """
    keys = jax.random.split(rngs(), stack.layers)
    make: Any = partial(Period, kind=kind) if stack.period > 1 else kind
    blocks = stacked(
        lambda key: make(stack, config, tensor_parallel=tensor_parallel, rngs=nnx.Rngs(key)), keys
    )
    blocks.remats = config.remats(stack.layers)
    return blocks
