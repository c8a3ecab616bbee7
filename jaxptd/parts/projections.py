"""The matmuls around attention: those of queries, keys and values, and the output projection.

Letters: D model, N heads, K heads of keys and values, H head size.
"""

import dataclasses
from typing import Protocol, TypeVar

from jaxptd.config.lora import LoRA
from jaxptd.matmul.padding import HeadCounts
from jaxptd.parts.adapters import Adapter
from jaxptd.parts.parameters import (
    Column,
    HeadShape,
    Named,
    Row,
    Sharding,
    head_counts,
    head_norm,
    inside,
)
from jaxptd.shapes import ParamShape

Matrix = TypeVar("Matrix", Column, Row)


@dataclasses.dataclass(frozen=True)
class Projections:
    """Attention's projections, and the norms of its queries and keys.

    Args:
        hidden: D.
        heads: N.
        kv_heads: K.
        head_size: H.
        joined: whether one parameter holds the matrices of queries, keys and values.
        unit: elements of a head that stay together where heads are cut.
        bias: whether the projections of q, k and v have a bias.
        out_bias: whether the output projection has a bias.
        has_norm: whether queries and keys are normalised.
        whole_norm: whether all heads together are.
        sinks: whether each head of queries has a logit beside its scores.
        lora: adapters, of the projections that it names.
        name: of attention in a layer.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    joined: bool
    unit: int = 1
    bias: bool = False
    out_bias: bool = False
    has_norm: bool = False
    whole_norm: bool = False
    sinks: bool = False
    lora: LoRA | None = None
    name: str = "attention"

    def first(self, sharding: Sharding) -> dict[str, Column]:
        """The projections of queries, keys and values: `qkv`, or `q` and `kv`."""
        dim = sharding.axes.head_dim
        if self.joined:
            return {"qkv": self.adapted("qkv", self._keys_of(sharding, 3, self.heads))}
        shape, queries = (self.heads, self.head_size), self._padded(sharding)[0]
        q = Column(self.hidden, shape, dim=dim, bias=self.bias, padded=queries)
        kv = self._keys_of(sharding, 2, self.kv_heads)
        return {"q": self.adapted("q", q), "kv": self.adapted("kv", kv)}

    def out(self, sharding: Sharding) -> Row:
        """The output projection."""
        shape, dim = (self.heads, self.head_size), sharding.axes.head_dim
        queries = self._padded(sharding)[0]
        out = Row(shape, self.hidden, dim=dim, bias=self.out_bias, padded=queries)
        return self.adapted("out", out)

    def adapted(self, name: str, matrix: Matrix) -> Matrix:
        """The projection of that name, with its adapter if it has one."""
        adapter = Adapter.of(self.lora, f"{self.name}.{name}")
        return dataclasses.replace(matrix, adapter=adapter)

    def parameters(self, sharding: Sharding) -> Named:
        """Parameters of the projections, and of the norms of queries and keys."""
        for name, column in self.first(sharding).items():
            yield from inside(name, column.parameters(sharding))
        whole = self.whole_norms(sharding)
        for name in ("q_norm", "k_norm") if self.has_norm else ():
            of_heads = head_norm(sharding, self.head_size, self.unit)
            yield from inside(name, iter([("w", whole[name])]) if whole else of_heads)
        yield from self.sink_parameters(sharding)
        yield from inside("out", self.out(sharding).parameters(sharding))

    def sink_parameters(self, sharding: Sharding) -> Named:
        """The logits of sinks `[N]`, sharded as heads are, if there are any."""
        if self.sinks:
            heads = Column(self.hidden, (self.heads,), padded=self._padded(sharding)[0])
            yield "sinks", heads.vector(sharding)

    def whole_norms(self, sharding: Sharding) -> dict[str, ParamShape]:
        """The factors of the norms of all heads together, if there are any.

        `q_norm[N, H]` and `k_norm[K, H]`, sharded as the queries and keys that matmuls make.
        """
        if not self.whole_norm:
            return {}
        heads, (queries, _) = (self.heads, self.head_size), self._padded(sharding)
        keys = self._keys_of(sharding, 1, self.kv_heads)
        of_keys = dataclasses.replace(keys, out=keys.out[1:], dim=keys.dim - 1)
        of_queries = Column(self.hidden, heads, dim=sharding.axes.head_dim, padded=queries)
        return {"q_norm": of_queries.vector(sharding), "k_norm": of_keys.vector(sharding)}

    def gathers_kv(self, sharding: Sharding) -> bool:
        """True if kv heads do not split: each device computes a slice of all, and gathers them."""
        return self._counts(sharding).gathered

    def _keys_of(self, sharding: Sharding, parts: int, heads: int) -> Column:
        """A projection that yields keys among other parts."""
        dim: int = 1 + sharding.axes.head_dim
        keys: int | None = self._padded(sharding)[1]
        if self.gathers_kv(sharding):
            dim, keys = 2, None
        shape = (parts, heads, self.head_size)
        return Column(self.hidden, shape, dim=dim, bias=self.bias, padded=keys, parts=1)

    def _padded(self, sharding: Sharding) -> tuple[int, int]:
        """Padded sizes of the sharded dim of queries and of keys: numbers of heads, or H."""
        if sharding.axes.head_dim:
            size = sharding.padded_head(self.head_size, self.unit)
            return size, size
        counts = self._counts(sharding)
        return counts.queries, counts.keys

    def _counts(self, sharding: Sharding) -> HeadCounts:
        return head_counts(sharding, HeadShape(self.heads, self.kv_heads, self.head_size))


class HasProjections(Protocol):
    """A description of attention."""

    @property
    def projections(self) -> Projections:
        """Its projections."""
