"""Token and position embeddings. Letters: B batch, T position, D model, V vocabulary."""

from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from jaxptd.layers.form import TensorParallel
from jaxptd.params import normal, param


class VocabParallelEmbedding(nnx.Module):
    """A table `[V, D]` sharded over the vocabulary, on a grid over D too; also the output layer.

    A vocabulary that does not split evenly is padded with zero rows. They are never looked up, and
    the loss gives them no probability, so they get no gradient and stay zero.

    Args:
        vocab_size: V.
        size: D.
        form: how matrices are sharded.
        rngs: random keys of the initial table.
        rows: V with its padding; None: as `form` pads it.

    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """

    def __init__(
        self,
        vocab_size: int,
        size: int,
        *,
        form: TensorParallel,
        rngs: nnx.Rngs,
        rows: int | None = None,
    ) -> None:
        padded = (rows or form.padded(vocab_size), form.padded_hidden(size))
        self.table = param(
            rngs(),
            (vocab_size, size),
            normal(0.02),
            spec=form.axes.table_spec(),
            padded=padded,
            matrix="rc",
        )
        self.vocab_size, self.form = vocab_size, form

    def __call__(self, tokens_BT: Array, dtype: DTypeLike) -> Array:
        """tokens[B, T] with ids in [0, V) -> x as the residual stream has it, in `dtype`."""
        return self.form.lookup(tokens_BT, self.table[...], dtype)

    def logits(self, x_BTD: Array) -> Array:
        """x -> logits[B, T, V], sharded over V, with those of the padding."""
        return self.form.logits(x_BTD, self.table[...].T)


class PositionEmbedding(nnx.Module):
    """A learned vector for each position, table `[T, D]`: replicated, or in blocks on a grid.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).
    """

    def __init__(self, seq_length: int, size: int, *, form: TensorParallel, rngs: nnx.Rngs) -> None:
        padded = (seq_length, form.padded_hidden(size))
        self.table = param(
            rngs(),
            (seq_length, size),
            normal(0.02),
            spec=form.axes.position_spec(),
            padded=padded,
            matrix="rc",
        )
        self.form = form

    def __call__(self, position_T: Array, dtype: DTypeLike) -> Array:
        """positions[T] of a cp block -> [T, D] for the tokens of the residual stream."""
        return self.form.positions(position_T, self.table[...], dtype)
