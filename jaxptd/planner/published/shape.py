"""The sizes of a published model."""

import dataclasses
from functools import cached_property

from jaxptd.models.inventory import MLP, Attention, Head, Inventory, Stack, Table


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Args:
        num_layers, hidden_size, num_heads, vocab_size, seq_length: of the model.
        num_kv_heads: heads of keys and values; 0: as many as heads.
        ffn_hidden_size: hidden units of the MLP; 0: four times the hidden size.
        gated: the MLP has a gate, and so a third matrix.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    seq_length: int
    num_kv_heads: int = 0
    ffn_hidden_size: int = 0
    gated: bool = False

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @cached_property
    def inventory(self) -> Inventory:
        """The parts of the model."""
        D, T, V = self.hidden_size, self.seq_length, self.vocab_size
        head_size = D // self.num_heads
        attention = Attention(D, self.num_heads, self.kv_heads, head_size, 1, T, T, has_norm=False)
        mlp = MLP(D, self.ffn, self.gated)
        return Inventory(
            D,
            tokens=Table(V, D),
            embedded=(T,),
            positions=None,
            stacks=(Stack("blocks", self.num_layers, (attention, mlp), 2, norms_sums=False),),
            heads=(Head(D, V, norm=2),),
            first_norm=0,
        )
