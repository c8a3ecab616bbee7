"""Token and position embeddings. Letters: B batch, T position, D model, V vocabulary."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxptd.collectives import alike
from jaxptd.layers.linear import INIT, declare
from jaxptd.layers.tensor_parallel import TensorParallel, add_bias, both_gradients
from jaxptd.params import Initialiser
from jaxptd.parts.parameters import positions, token_types, vocabulary, vocabulary_bias


class VocabParallelEmbedding(nnx.Module):
    """A table `[V, D]` sharded over the vocabulary, on a grid over D too; also the output layer.

    A vocabulary that does not split evenly is padded with zero rows. They are never looked up, and
    the loss gives them no probability, so they get no gradient and stay zero.

    Args:
        vocab_size: V.
        size: D.
        tensor_parallel: how matrices are sharded.
        rngs: random keys of the initial table.
        rows: V with its padding; None: as `tensor_parallel` pads it.
        init: initialiser of the table.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    table: nnx.Param

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        tensor_parallel: TensorParallel,
        rngs: nnx.Rngs,
        rows: int | None = None,
        init: Initialiser = INIT,
    ) -> None:
        self.rows = rows or tensor_parallel.padded(vocab_size)
        shape = vocabulary(tensor_parallel, vocab_size, size, self.rows)
        declare(self, shape, rngs, table=init)
        self.vocab_size, self.tensor_parallel = vocab_size, tensor_parallel

    def __call__(self, tokens_BT: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T] with ids in [0, V) -> x as the residual stream has it, in `dtype`."""
        return self.tensor_parallel.lookup(tokens_BT, self.table[...], dtype)

    def logits(self, x_BTD: Array) -> Array:
        """x -> logits[B, T, V], sharded over V, with those of the padding."""
        return self.tensor_parallel.logits(x_BTD, self.table[...].T)


class PositionEmbedding(nnx.Module):
    """A learned vector for each position, table `[S, D]`: replicated, or in blocks on a grid.

    Positions from S on, those of padding, have any finite vector.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).
    """

    table: nnx.Param

    def __init__(
        self, rows: int, size: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        declare(self, positions(tensor_parallel, rows, size), rngs, table=INIT)
        self.tensor_parallel = tensor_parallel

    def __call__(self, position_T: Array, dtype: DTypeLike) -> Array:
        """positions[T] of a cp block -> [T, D] for the tokens of the residual stream."""
        return self.tensor_parallel.positions(position_T, self.table[...], dtype)


class TypeEmbedding(nnx.Module):
    """A learned vector for each type of token, `w[K, D]` of K types; in 1D every device has all.

    There are few types, so that x w of one-hot rows costs less than a look-up, and no collective.

    Source: Devlin et al., arXiv 1810.04805, section 3.2.
    """

    w: nnx.Param

    def __init__(
        self, types: int, size: int, *, tensor_parallel: TensorParallel, rngs: nnx.Rngs
    ) -> None:
        declare(self, token_types(tensor_parallel, types, size), rngs, w=INIT)
        self.tensor_parallel = tensor_parallel

    def __call__(self, type_BT: Array, dtype: DTypeLike) -> Array:
        """types[B, T] of a cp block -> x as the residual stream has it."""
        local_BT = self.tensor_parallel.axes.local_residual_tokens(type_BT)
        one_hot_BTK = jax.nn.one_hot(local_BT, self.w.shape[0], dtype=dtype)
        one_hot_BTK, w_KD = alike(one_hot_BTK, self.w[...])
        return jnp.einsum("BTK,KD->BTD", one_hot_BTK, w_KD.astype(dtype))


class VocabularyBias(nnx.Module):
    """`b[V]`, added to logits, and sharded and padded as they are.

    Args:
        vocab_size: V.
        tensor_parallel: how matrices are sharded.
        rows: V with its padding.
    """

    b: nnx.Param

    def __init__(self, vocab_size: int, *, tensor_parallel: TensorParallel, rows: int) -> None:
        shape = vocabulary_bias(tensor_parallel, vocab_size, rows)
        declare(self, shape, nnx.Rngs(0))  # zeros need no key

    def __call__(self, logits_BTV: Array) -> Array:
        """Logits[B, T, V] -> the same with the bias."""
        return add_bias(*both_gradients(logits_BTV, self.b[...]))
