"""A pair of blocks with attention in windows, which the second one shifts.

Letters: B images, R rows, Q columns, C hidden units.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxptd.config import ModelConfig
from jaxptd.layers.dropout import DropoutSite, TokenInfo, drop_path, dropout
from jaxptd.layers.linear import INIT
from jaxptd.layers.norm import Norm
from jaxptd.layers.tensor_parallel import TensorParallel
from jaxptd.params import stacked
from jaxptd.parts.mlp import MLPShape
from jaxptd.remat import SAVED_MATMUL_OUT
from jaxptd.vision.architecture import WindowShape
from jaxptd.vision.windows import Strips


@dataclasses.dataclass(frozen=True)
class Level:
    """A level's blocks on the way down, or on the way up.

    Args:
        config: its width and heads.
        attention: that of its shifted blocks.
        mlp: its blocks' MLP.
        unit: pixels in a row of a patch.
        paths: the share of samples that skip each block.
    """

    config: ModelConfig
    attention: WindowShape
    mlp: MLPShape
    unit: int
    paths: tuple[float, ...]


class Skipping(NamedTuple):
    """x, and what later levels read of it.

    Args:
        stream: the residual stream, `[B, R, Q, C]`.
        skips: outputs of earlier levels, finest first, for those on the way up.
    """

    stream: Array
    skips: tuple[Array, ...] = ()


class WindowBlock(nnx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`; some samples skip either.

    Args:
        level: the block's level.
        tensor_parallel: how matrices are sharded.
        rngs: random keys for the initial parameters.
    """

    def __init__(self, level: Level, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs) -> None:
        config, options = level.config, level.config.block
        size = config.hidden_size
        self.attention_norm = Norm(
            size, options=options, tensor_parallel=tensor_parallel, rngs=rngs
        )
        own: Any = {"tensor_parallel": tensor_parallel, "rngs": rngs, "init_out": INIT}
        self.attention = level.attention.make_layer(config, **own)
        self.mlp_norm = Norm(size, options=options, tensor_parallel=tensor_parallel, rngs=rngs)
        self.mlp = level.mlp.make_layer(config, **own)
        self.rate, self.tensor_parallel = config.dropout, tensor_parallel

    def __call__(
        self, x: Array, token_info: TokenInfo, number: Array, *, shift: int, path: Array
    ) -> Array:
        """x[B, R, Q, C] -> x[B, R, Q, C].

        Args:
            x: the residual stream.
            token_info: samples of all images of the micro-batch, and this device's rows of patches.
            number: the block's number among all of them.
            shift: its windows' shift.
            path: the share of samples that skip it.
        """
        x, n = self.attention_norm.beside(x)
        a = self.attention(n, token_info.at(number, DropoutSite.ATTENTION), shift=shift)
        a = drop_patches(
            a, token_info.at(number, DropoutSite.ATTENTION_OUTPUT), self.tensor_parallel, self.rate
        )
        x = self._add(x, a, token_info.at(number, DropoutSite.ATTENTION_PATH), path)
        x, n = self.mlp_norm.beside(x)
        h = self.mlp(n.reshape(1, -1, x.shape[-1])).reshape(x.shape)
        h = drop_patches(
            h, token_info.at(number, DropoutSite.MLP_OUTPUT), self.tensor_parallel, self.rate
        )
        return self._add(x, h, token_info.at(number, DropoutSite.MLP_PATH), path)

    def _add(self, x: Array, y: Array, token_info: TokenInfo, path: Array) -> Array:
        """Adds y, a pair's output that some samples skip, to x; only the sum is saved."""
        local = token_info._replace(
            sample_B=self.tensor_parallel.axes.local_images(token_info.sample_B)
        )
        return checkpoint_name(x + drop_path(y, local, path), SAVED_MATMUL_OUT)


def drop_patches(
    x_BRQC: Array, token_info: TokenInfo, tensor_parallel: TensorParallel, rate: float
) -> Array:
    """Applies dropout to this device's images of the residual stream, by patch index."""
    rows, cols = x_BRQC.shape[1:3]
    number_RQ = token_info.position_T[:rows, None] * cols + jnp.arange(cols, dtype=jnp.int32)
    local = token_info._replace(
        sample_B=tensor_parallel.axes.local_images(token_info.sample_B),
        position_T=number_RQ.reshape(-1),
    )
    flat = x_BRQC.reshape(x_BRQC.shape[0], rows * cols, -1)
    return dropout(flat, local, tensor_parallel.axes.local_hidden(flat.shape[-1]), rate).reshape(
        x_BRQC.shape
    )


class WindowPair(nnx.Module):
    """A block with plain windows, then one with shifted ones: a layer of a level's stack."""

    def __init__(
        self, level: Level, first: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        self.first = WindowBlock(level, tensor_parallel=tensor_parallel, rngs=rngs)
        self.second = WindowBlock(level, tensor_parallel=tensor_parallel, rngs=rngs)
        self.level, self.start, self.strips = level, first, Strips.of(tensor_parallel)

    def __call__(
        self, x: Skipping, token_info: TokenInfo, layer: Array, cache: None, common: None
    ) -> tuple[Skipping, None]:
        """x -> x, with unchanged skips; layer: the pair's number in the model."""
        level, stream = self.level, x.stream
        token_info = self.strips.token_info(stream, token_info).at_rows(level.unit)
        paths = jnp.asarray(level.paths, jnp.float32).reshape(-1, 2)[layer - self.start]
        shifts = (0, level.attention.shift)
        for index, block in enumerate((self.first, self.second)):
            number = 2 * layer + index
            stream = block(stream, token_info, number, shift=shifts[index], path=paths[index])
        return x._replace(stream=stream), cache


def make_pairs(level: Level, first: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs) -> Any:
    """One pair with the parameters of all pairs of a level, stacked.

    first: the first one's number in the model.
    """
    keys = jax.random.split(rngs(), len(level.paths) // 2)
    pairs: Any = stacked(
        lambda key: WindowPair(level, first, tensor_parallel=tensor_parallel, rngs=nnx.Rngs(key)),
        keys,
    )
    pairs.remats = level.config.remats(len(keys))
    return pairs
