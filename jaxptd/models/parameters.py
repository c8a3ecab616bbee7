"""The parameters of a model on a layout, from its architecture: no model is built, and no array.

Each function has the shapes and axes of a layer in `jaxptd/layers/`, for the axes of `specs.py`.
Letters: D model, F hidden, N heads, K heads of keys and values, H head size, T position, V
vocabulary, L layers.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial

from jaxptd.config import Config, ModelConfig
from jaxptd.layers.specs import Specs
from jaxptd.layout import Layout
from jaxptd.matmul.padding import HeadCounts, heads_for, padded_for
from jaxptd.models.architecture import MLP, Architecture, Attention, Head, Stack
from jaxptd.models.families import architecture_of
from jaxptd.models.stages import StagePlacement, outline_plan
from jaxptd.shapes import ParamShape, Spec

Named = Iterator[tuple[str, ParamShape]]


def parameter_infos(config: Config) -> dict[str, ParamShape]:
    """Shapes and axes of the parameters of a config's model, as layers hold them.

    Their names are the model's where one of its kind has one name in all models.

    Raises:
        UserError: the model's layers do not fill the pipeline.
    """
    model, layout = config.model, config.layout
    infos = dict(_Parameters(model, layout, Specs.of(layout)).all(architecture_of(model)))
    if layout.pp == 1:
        return infos
    place = StagePlacement(outline_plan(config), layout.sizes)
    return {name: place(info) for name, info in infos.items()}


@dataclasses.dataclass(frozen=True)
class _Parameters:
    """The parameters of layers, without a pipeline.

    Args:
        model: that they are of.
        layout: of its devices.
        specs: the axes of the layout.
    """

    model: ModelConfig
    layout: Layout
    specs: Specs

    # ---- sizes -----------------------------------------------------------------------------------

    def padded(self, size: int, each: int = 1) -> int:
        """A size rounded up as `TensorParallel.padded` does it."""
        return padded_for(self.layout, size, each)

    def hidden(self, size: int) -> int:
        """D with its padding."""
        return self.padded(size) if self.specs.hidden else size

    def cut(self, shape: Sequence[int], dim: int, padded: int | None) -> tuple[int, ...]:
        """A shape whose `dim` is padded; None: so that it splits evenly."""
        size = padded or self.padded(shape[dim], math.prod(shape[dim + 1 :]))
        return (*shape[:dim], size, *shape[dim + 1 :])

    def heads(self, part: Attention) -> HeadCounts:
        """Numbers of heads as the layer `Heads` has them."""
        if self.specs.head_dim:
            return HeadCounts(part.heads, part.kv_heads)
        return heads_for(self.layout, part.heads, part.kv_heads, part.head_size)

    # ---- layers ----------------------------------------------------------------------------------

    def column(
        self,
        size: int,
        out: Sequence[int],
        *,
        dim: int,
        bias: bool,
        padded: int | None = None,
        parts: int = 0,
    ) -> Named:
        """`ColumnParallelLinear`: `w[D, *out]` and `b[*out]`."""
        shape, stored, dims = tuple(out), self.cut(out, dim, padded), len(out)
        yield (
            "w",
            ParamShape(
                (size, *shape),
                (self.hidden(size), *stored),
                self.specs.column_spec(dims, dim),
                decay=True,
                cast=True,
                matrix="r" + "s" * parts + "c" * (dims - parts),
            ),
        )
        if bias:
            yield "b", _vector(shape, stored, self.specs.inner_spec(dims, dim))

    def row(
        self, inside: Sequence[int], size: int, *, dim: int, bias: bool, padded: int | None = None
    ) -> Named:
        """`RowParallelLinear`: `w[*in, D]` and `b[D]`."""
        hidden = self.hidden(size)
        yield (
            "w",
            ParamShape(
                (*inside, size),
                (*self.cut(inside, dim, padded), hidden),
                self.specs.row_spec(len(inside), dim),
                decay=True,
                cast=True,
                matrix="r" * len(inside) + "c",
            ),
        )
        if bias:
            yield "b", _vector((size,), (hidden,), self.specs.hidden_spec())

    def square(self, size: int) -> Named:
        """`SquareLinear`: `w[D, D]` and `b[D]`."""
        hidden = self.hidden(size)
        yield "w", _matrix((size, size), (hidden, hidden), self.specs.square_spec())
        yield "b", _vector((size,), (hidden,), self.specs.hidden_spec())

    def norm(self, size: int, statistics: int) -> Named:
        """`Norm`: `w[D]`, and `b[D]` with a mean."""
        info = _vector((size,), (self.hidden(size),), self.specs.hidden_spec())
        yield from (("w", info), ("b", info))[:statistics]

    def table(self, rows: int, size: int, padded: int) -> Named:
        """`VocabParallelEmbedding`: `table[V, D]`; padded: its rows with padding."""
        shape = (padded, self.hidden(size))
        yield "table", _matrix((rows, size), shape, self.specs.table_spec())

    def mlp(self, part: MLP) -> Named:
        """`MLP`."""
        gates = (2,) if part.gated else ()
        dim, out = len(gates), (*gates, part.size)
        up = self.column(part.hidden, out, dim=dim, bias=part.bias, parts=dim)
        yield from _inside("up", up)
        yield from _inside("down", self.row((part.size,), part.hidden, dim=0, bias=part.bias))

    def attention(self, part: Attention) -> Named:
        """`Heads`."""
        dim, head, counts = self.specs.head_dim, part.head_size, self.heads(part)
        size = part.unit * self.padded(head // part.unit, part.unit) if dim else head
        if dim:
            counts = HeadCounts(size, size)
        yield from self._queries_keys_values(part, counts)
        if part.has_norm:
            vector = _vector((head,), (size,), self.specs.head_spec())
            normed = dataclasses.replace(vector, over=self.specs.head_axes)
            yield from (("q_norm.w", normed), ("k_norm.w", normed))
        shape, bias = (part.heads, head), part.out_bias
        out = self.row(shape, part.hidden, dim=dim, bias=bias, padded=counts.queries)
        yield from _inside("out", out)

    def _queries_keys_values(self, part: Attention, counts: HeadCounts) -> Named:
        """One product for queries, keys and values, or one for queries and one for the others.

        counts: of the dim that is sharded.
        """
        dim, head, heads, kv_heads = self.specs.head_dim, part.head_size, part.heads, part.kv_heads
        column = partial(self.column, part.hidden, bias=part.bias)
        makes_keys = partial(column, dim=1 + dim, padded=counts.keys, parts=1)
        if counts.gathered:
            makes_keys = partial(column, dim=2, parts=1)
        if part.source is None and kv_heads == heads:
            yield from _inside("qkv", makes_keys((3, heads, head)))
            return
        queries = column((heads, head), dim=dim, padded=counts.queries)
        yield from _inside("q", queries)
        yield from _inside("kv", makes_keys((2, kv_heads, head)))

    # ---- the model -------------------------------------------------------------------------------

    def all(self, parts: Architecture) -> Named:
        """Every parameter, the layers of a stack as one."""
        size, specs = parts.hidden, self.specs
        vocab = self.model.padded_vocab(self.padded)
        yield from _inside("tokens", self.table(parts.tokens.rows, size, vocab))
        if parts.positions is not None:
            rows = parts.positions.rows
            shape = (self.hidden(rows), self.hidden(size))
            yield "positions.table", _matrix((rows, size), shape, specs.position_spec())
        if parts.types:
            shape = (parts.types, self.hidden(size))
            plain = (None, *specs.hidden_spec())
            yield "types.w", ParamShape((parts.types, size), shape, plain, decay=True, cast=True)
        for stack in parts.stacks:
            layers = ((name, _stacked(info, stack)) for name, info in self.stack(stack, size))
            yield from _inside(stack.name, layers)
            yield from _inside("common", self.common(stack, size))
        yield from _inside("norm", self.norm(size, parts.first_norm))
        for number, head in enumerate(parts.heads):
            yield from _inside(f"head{number or ''}", self.head(head, parts))

    def stack(self, stack: Stack, size: int) -> Named:
        """One layer of a stack: of each pair its norm and its products."""
        for sublayer in stack.of_text:
            yield from _inside(f"{_word(sublayer)}_norm", self.norm(size, stack.statistics))
            parameters = (
                self.mlp(sublayer) if isinstance(sublayer, MLP) else self.attention(sublayer)
            )
            yield from _inside(_word(sublayer), parameters)

    def common(self, stack: Stack, size: int) -> Named:
        """The parameters that all layers of a stack read."""
        specs = self.specs
        for each in stack.attentions:
            if each.buckets:
                shapes = (each.buckets, each.heads), (each.buckets, self.heads(each).queries)
                table = _vector(*shapes, (None, *specs.by_head_spec()))
                over = specs.score_axes
                yield f"{stack.name}_bias.table", dataclasses.replace(table, over=over)
            yield from _inside("source_norm", self.norm(size, each.source_statistics))

    def head(self, head: Head, parts: Architecture) -> Named:
        """The parameters behind the stacks that make logits."""
        for number in range(head.squares):
            yield from _inside(f"square{number}", self.square(head.hidden))
        yield from _inside("norm", self.norm(head.hidden, head.norm))
        tokens = head.columns == parts.tokens.rows
        rows = self.model.padded_vocab(self.padded) if tokens else self.padded(head.columns)
        if head.own:
            yield from self.table(head.columns, head.hidden, rows)
        if head.bias:
            yield "b", _vector((head.columns,), (rows,), self.specs.inner_spec(1, 0))


def _word(sublayer: Attention | MLP) -> str:
    if isinstance(sublayer, MLP):
        return "mlp"
    return "attention" if sublayer.source is None else "cross"


def _inside(name: str, parameters: Named) -> Named:
    """Parameters of a part, with its name before theirs."""
    return ((f"{name}.{inner}", info) for inner, info in parameters)


def _stacked(info: ParamShape, stack: Stack) -> ParamShape:
    """The parameter of all layers of a stack, `[L, ..]`."""
    return dataclasses.replace(
        info,
        shape=(stack.layers, *info.shape),
        stored_shape=(stack.layers, *info.stored_shape),
        spec=(None, *info.spec),
        stack=stack.name,
        matrix="s" + info.matrix if info.matrix else "",
    )


def _vector(shape: tuple[int, ...], padded: tuple[int, ...], spec: Spec) -> ParamShape:
    return ParamShape(shape, padded, spec, decay=False)


def _matrix(shape: tuple[int, int], padded: tuple[int, int], spec: Spec) -> ParamShape:
    return ParamShape(shape, padded, spec, decay=True, cast=True, matrix="rc")
