"""The transformer block, and the loop over a stack of them.

Letters: B batch, T position, D model, L layers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxptd.config import ModelConfig
from jaxptd.layers.attention import Cache
from jaxptd.layers.dropout import DropoutSite, TokenInfo, dropout
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel, block_along
from jaxptd.params import normal, stacked
from jaxptd.parts.architecture import Stack
from jaxptd.pipeline.pools import LayerInputs, X
from jaxptd.remat import SAVED_MATMUL_OUT, with_remat
from jaxptd.zero.gathering import with_gathering
from jaxptd.zero.plan import WHOLE, ParamPlan
from jaxptd.zero.prefetching import accumulating_scan, prefetching
from jaxptd.zero.zero import with_narrow_gradients

LAYERS = "layers"  # named scope of the loop over layers


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; or `norm(x + attention(x))`, and so on.

    The products that end in the residual stream start smaller, by 1 / sqrt(the number of their
    sums in all layers), as 2 L.
    Source: Radford et al., 2019 (GPT-2), section 2.3; Vaswani et al., 2017 (norms of sums).
    """

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
        self.rate, self.tensor_parallel = config.dropout, tensor_parallel
        self.init_out, self.norms_first = init_out, options.norm_order == "pre"

    def __call__(
        self,
        x_BTD: Array,
        token_info: TokenInfo,
        layer: Array,
        cache: Cache | None,
        common: None = None,
        *,
        bias_NR: Array | None = None,
        between: Callable[[Array], Array] | None = None,
    ) -> tuple[Array, Cache | None]:
        """x as the residual stream has it -> the same, and the cache with x's keys and values.

        Args:
            x_BTD: as the residual stream has it.
            token_info: of its tokens.
            layer: its number.
            cache: keys and values of the tokens before, in generation.
            common: a model's parameters for all layers, of which this block reads none.
            bias_NR: of the scores, by distance.
            between: what the layer does to x between attention and MLP.
        """
        x_BTD, n_BTD = self.attention_norm.beside(x_BTD) if self.norms_first else (x_BTD, x_BTD)
        seeded = token_info.at(layer, DropoutSite.ATTENTION) if self.rate else token_info
        a_BTD, cache = self.attention(n_BTD, seeded, cache, bias_NR=bias_NR)
        x_BTD = self.add(x_BTD, a_BTD, token_info, layer=layer, site=DropoutSite.ATTENTION_OUTPUT)
        x_BTD = x_BTD if self.norms_first else self.attention_norm(x_BTD)
        x_BTD = x_BTD if between is None else between(x_BTD)
        x_BTD, n_BTD = self.mlp_norm.beside(x_BTD) if self.norms_first else (x_BTD, x_BTD)
        h_BTD = self.mlp(n_BTD)
        x_BTD = self.add(x_BTD, h_BTD, token_info, layer=layer, site=DropoutSite.MLP_OUTPUT)
        return x_BTD if self.norms_first else self.mlp_norm(x_BTD), cache

    def add(
        self,
        x_BTD: Array,
        y_BTD: Array,
        token_info: TokenInfo,
        *,
        layer: Array,
        site: DropoutSite,
    ) -> Array:
        """x + y, a pair's output, after dropout of y; backward keeps the sum, and not y."""
        if self.rate:
            y_BTD = drop_residual(
                y_BTD,
                token_info.at(layer, site),
                tensor_parallel=self.tensor_parallel,
                rate=self.rate,
            )
        return checkpoint_name(x_BTD + y_BTD, SAVED_MATMUL_OUT)


def drop_residual(
    x_BTD: Array, token_info: TokenInfo, *, tensor_parallel: TensorParallel, rate: float
) -> Array:
    """Dropout of this device's block of the residual stream."""
    axes = tensor_parallel.axes
    local = token_info._replace(position_T=block_along(token_info.position_T, axes.tokens, 0))
    return dropout(x_BTD, local, axes.local_hidden(x_BTD.shape[-1]), rate)


def make_blocks(
    stack: Stack,
    config: ModelConfig,
    *,
    tensor_parallel: TensorParallel,
    rngs: nnx.Rngs,
    kind: type[Block] = Block,
) -> Any:
    """One block with the parameters of L blocks, stacked `[L, ...]`; kind: its class."""
    keys = jax.random.split(rngs(), stack.layers)
    return stacked(
        lambda key: kind(stack, config, tensor_parallel=tensor_parallel, rngs=nnx.Rngs(key)), keys
    )


def number_of_layers(stack: Any) -> int:
    """L of a stack with parameters `[L, ...]`."""
    count: int = jax.tree.leaves(stack)[0].shape[0]
    return count


def run_blocks(
    blocks: Any,
    x: X,
    token_info: TokenInfo,
    *,
    cache: Any,
    config: ModelConfig,
    offload: bool = False,
    common: Any = None,
    first: int = 0,
    plan: ParamPlan = WHOLE,
) -> tuple[X, Any]:
    """x -> x after all layers of a stack, scanned or unrolled.

    Args:
        blocks: the stack.
        x: before its first layer.
        token_info: of the tokens.
        cache: the layers' state, arrays with a leading dim L; None without any.
        config: of the model.
        offload: whether `remat: dots` saves to host memory.
        common: parameters that all layers read.
        first: the number of the first layer in the model.
        plan: what the micro-batch does with the layers' parameters; they are there, and whole, by
            default.
    """
    count = number_of_layers(blocks)
    layer_L = jnp.arange(first, first + count, dtype=jnp.int32)
    remats = config.remats(count)
    stacks = _split((blocks, layer_L, cache), [count for _, count in remats])
    caches = []

    for (remat, layers), (stack, number_L, layer_inputs) in zip(remats, stacks, strict=True):
        run = with_remat(
            lambda params, inputs, x: params[0](x, *inputs, params[1]),
            remat,
            scanned=config.scan_layers and layers > 1,  # XLA runs one trip without a loop
            offload=offload,
        )
        loop = _loop(run, plan, scanned=config.scan_layers)
        with jax.named_scope(LAYERS):
            x, new = loop(stack, common, LayerInputs(token_info, number_L, layer_inputs), x)
        caches.append(new)
    return x, jax.tree.map(lambda *each: jnp.concatenate(each), *caches)


def _loop(run: Any, plan: ParamPlan, *, scanned: bool) -> Any:
    """(stack, common, inputs of all layers, x) -> (x, caches): `run` for one layer after another.

    XLA moves collectives between layers that are unrolled. Between trips of a loop it does not: a
    loop whose layers are gathered, or their gradients reduce-scattered, does so itself. So does one
    that adds gradients to those of the micro-batches before.
    """
    match scanned, plan.moves, plan.accumulate:
        case True, True, _:
            return prefetching(run)
        case True, False, "in_loop":
            return accumulating_scan(run)
        case _, moves, _:
            over: Any = lax.scan if scanned else _unrolled
            each = with_gathering(run) if moves else with_narrow_gradients(run)

    return lambda stack, common, inputs, x: over(
        lambda x, layer: each((layer[0], common), LayerInputs(inputs.token_info, *layer[1:]), x),
        x,
        (stack, inputs.number, inputs.cache),
    )


def _unrolled(run: Any, x: X, xs: Any) -> tuple[X, Any]:
    """Runs `run` over the leading dim of xs as `lax.scan` does, without a loop.

    x is written before the first layer, as before a loop: a product adds a layer's input to its
    result as it writes, but XLA lets it do so only where that input is in memory.
    """
    results, x = [], lax.optimization_barrier(x)
    for block in _split(xs, [1] * len(jax.tree.leaves(xs)[0])):
        x, result = run(x, jax.tree.map(lambda a: a[0], block))
        results.append(result)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *results)


def _split(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Splits arrays `[L, ...]` along L; the transpose is one concatenation, not padded sums."""
    if len(sizes) == 1:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    pieces = zip(*(lax.split(x, sizes) for x in leaves), strict=True)
    return [jax.tree.unflatten(treedef, piece) for piece in pieces]
