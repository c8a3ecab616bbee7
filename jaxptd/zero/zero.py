"""ZeRO: state that data parallel devices would hold alike, cut into parts, one on each.

At every stage from 1 the state (parameters, moments) lies in parts (`parts.py`). What the stages
differ in is the layers' parameters during a step; what is not a layer is treated as at stage 1.

| stage | a layer's parameters                     | its gradient                                  |
|-------|------------------------------------------|-----------------------------------------------|
| 1     | gathered at the beginning of the step    | summed over micro-batches, reduce-scattered   |
| 2     | gathered at the beginning of the step    | reduce-scattered as soon as backward makes it |
| 3     | gathered for forward, again for backward | as at stage 2                                 |

Gathers move the precision that layers compute in, gradients are summed in float32. At stages 2 and
3 a layer's parameters travel in one message of each precision and set of axes that cut them.

Letters: L layers, Z devices along dp x cp.
Source: Rajbhandari et al., arXiv 1910.02054.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxptd.collectives import varying_axes
from jaxptd.mesh import BATCH_AXES, Axis
from jaxptd.params import ParamInfo, Params, Stored
from jaxptd.pipeline.model import LayerInputs
from jaxptd.pipeline.split_backward import trace_layer
from jaxptd.zero.shards import Shard

StepParams = dict[
    str, Any
]  # parameters as a step's passes take them: arrays, or layers' `Gatherable`


@dataclasses.dataclass(frozen=True)
class Zero:
    """What of the state is cut, and how a step comes by whole parameters.

    Args:
        stage: 0 to 3.
        infos: of the parameters.
        sizes: devices along each axis.
        dtype: in which layers compute.
        copies: whether a step has copies of parameters of its own even where nothing is cut.
    """

    stage: int
    infos: Mapping[str, ParamInfo]
    sizes: Mapping[Axis, int]
    dtype: Any
    copies: bool = False

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """How the state holds each parameter."""
        if self.stage == 0:
            return {**self.infos}
        return {
            name: Shard(info, self.sizes, lead=int(self.per_layer(name)))
            for name, info in self.infos.items()
        }

    def begin_step(self, params: Params, *, training: bool = True) -> StepParams:
        """The state's parameters, which vary over the axes of their gradients' sums -> a step's.

        Args:
            params: as the state holds them.
            training: whether there will be gradients.
        """
        return {name: self._begin(name, p, training) for name, p in params.items()}

    def end_step(self, gradients: Params) -> Params:
        """Gradients of what was lent -> of what the state holds, summed over dp x cp if it is cut.

        Those of layers that travel alone are home already.
        """
        return {name: self._end(name, g) for name, g in gradients.items()}

    def per_layer(self, name: str) -> bool:
        """Whether it is a layer's, and moved layer by layer."""
        return self.stage >= 2 and self.infos[name].stacked

    def gather_dtype(self, name: str) -> Any:
        """The precision in which it is gathered.

        A grid sums gradients inside a layer, in the precision of what they are of: float32 then.
        """
        info = self.infos[name]
        narrow = info.cast and Axis.ROW not in info.axes
        return self.dtype if narrow else jnp.promote_types(self.dtype, jnp.float32)

    def _begin(self, name: str, p: Array, training: bool) -> Any:
        cut, info = self.stored[name], self.infos[name]
        dtype = self.gather_dtype(name)
        if not isinstance(cut, Shard):
            return p.astype(dtype) if self.copies else p
        early = self.stage < 3 or not info.stacked
        whole = cut.gather(p, dtype) if early else None
        alone = self.per_layer(name) and (training or not early)
        return Gatherable(p, whole, cut, dtype) if alone else whole

    def _end(self, name: str, gradient: Array) -> Array:
        cut = self.stored[name]
        if not isinstance(cut, Shard) or self.per_layer(name):
            return gradient
        return cut.reduce_scatter(gradient)


@partial(
    jax.tree_util.register_dataclass, data_fields=["part", "whole"], meta_fields=["cut", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class Gatherable:
    """A layer's parameter during a step, as a leaf of its module: a layer is made whole to run.

    Args:
        part: what this device holds, `[L, n/Z]`, or of one layer `[n/Z]`.
        whole: the block, where it was gathered at the beginning of the step.
        cut: how it is cut.
        dtype: in which it is gathered.
    """

    part: Array
    whole: Array | None
    cut: Shard
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return (*self.part.shape[:-1], *self.cut.block)


def _is_gatherable(leaf: Any) -> bool:
    return isinstance(leaf, Gatherable)


def shards_of(lent: Any) -> Any:
    """What gradients are of: of each lent leaf its part, the rest as it is."""
    return jax.tree.map(
        lambda leaf: leaf.part if _is_gatherable(leaf) else leaf, lent, is_leaf=_is_gatherable
    )


def with_shards(lent: Any, parts: Any) -> Any:
    """`lent` with other arrays for `shards_of(lent)`."""
    return jax.tree.map(
        lambda leaf, part: dataclasses.replace(leaf, part=part) if _is_gatherable(leaf) else part,
        lent,
        parts,
        is_leaf=_is_gatherable,
    )


# ---- one layer ----------------------------------------------------------------------------------


def gathered(layer: Any) -> Any:
    """A layer's tree -> the same with every lent leaf whole: one all-gather for those alike."""
    leaves, tree = jax.tree.flatten(layer, is_leaf=_is_gatherable)
    away = [i for i, leaf in enumerate(leaves) if _is_gatherable(leaf) and leaf.whole is None]
    for numbers in _alike(away, lambda i: (leaves[i].part, leaves[i].dtype)):
        parts = [leaves[i].part.astype(leaves[i].dtype) for i in numbers]
        every = lax.all_gather(jnp.concatenate(parts), BATCH_AXES)
        for i, flat in zip(
            numbers, _split(every, [leaves[i].cut.part for i in numbers]), strict=True
        ):
            leaves[i] = leaves[i].cut.shaped(flat.reshape(-1))
    whole = [leaf.whole if _is_gatherable(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(tree, whole)


def regathered(layer: Any) -> Any:
    """As `gathered`, for backward.

    Through barriers, or XLA finds, where layers are unrolled, that forward gathered the same, and
    keeps that. One by one: what goes through one barrier comes out varying over the same axes.
    """

    def apart(leaf: Any) -> Any:
        return jax.tree.map(lax.optimization_barrier, leaf) if _is_gatherable(leaf) else leaf

    return gathered(jax.tree.map(apart, layer, is_leaf=_is_gatherable))


def reduce_scattered(gradients: Any, layer: Any) -> Any:
    """Gradients of `gathered(layer)` -> of the parts, summed over Z: one reduce-scatter for alike.

    Where a leaf is lent, the result has the gradient of its part alone.
    """
    leaves, tree = jax.tree.flatten(layer, is_leaf=_is_gatherable)
    found = jax.tree.leaves(gradients)
    lent = [i for i, leaf in enumerate(leaves) if _is_gatherable(leaf)]
    for numbers in _alike(lent, lambda i: (leaves[i].part, leaves[i].part.dtype)):
        flats = [leaves[i].cut.flat(found[i].astype(leaves[i].part.dtype)) for i in numbers]
        widths = [leaves[i].cut.part for i in numbers]
        rows = [flat.reshape(-1, n) for flat, n in zip(flats, widths, strict=True)]
        mine = lax.psum_scatter(jnp.concatenate(rows, axis=1), BATCH_AXES, tiled=True)
        for i, part in zip(numbers, _split(mine, widths), strict=True):
            found[i] = part.reshape(-1)
    return jax.tree.unflatten(tree, found)


def _alike(numbers: list[int], key: Callable[[int], tuple[Array, Any]]) -> list[list[int]]:
    """Numbers in groups of one precision, whose arrays vary over the same axes."""
    groups: dict[Any, list[int]] = {}
    for i in numbers:
        array, dtype = key(i)
        groups.setdefault((varying_axes(array), jnp.dtype(dtype)), []).append(i)
    return list(groups.values())


def _split(rows: Array, widths: list[int]) -> list[Array]:
    """[Z, n] -> columns of these widths."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths) - 1)]
    return jnp.split(rows, ends, axis=1)


def with_gathering(
    run: Callable[[Any, LayerInputs, Any], Any],
) -> Callable[[Any, LayerInputs, Any], Any]:
    """`run(layer, inputs, x)`, for a layer that may have lent leaves: whole only while it runs.

    Backward keeps what `run` keeps, but no parameter: it fetches the layer again.
    """

    @jax.custom_vjp
    def borrowed(layer: Any, inputs: LayerInputs, x: Array) -> Any:
        return run(gathered(layer), inputs, x)

    def forward(layer: Any, inputs: LayerInputs, x: Array) -> tuple[Any, tuple]:
        whole = gathered(layer)
        traced, _ = trace_layer(run, whole, inputs, x)
        y, kept = traced.forward(whole, inputs, x)
        return y, (jax.tree_util.Partial(traced.backward, kept), layer, inputs)

    def backward(residuals: tuple, dy: Any) -> tuple:
        back, layer, inputs = residuals
        found, dx = back(regathered(layer), inputs, dy)
        return _of_shards(layer, reduce_scattered(found, layer)), None, dx

    borrowed.defvjp(forward, backward)

    def either(layer: Any, inputs: LayerInputs, x: Array) -> Any:
        lent = any(map(_is_gatherable, jax.tree.leaves(layer, is_leaf=_is_gatherable)))
        return borrowed(layer, inputs, x) if lent else run(layer, inputs, x)

    return either


def _of_shards(layer: Any, gradients: Any) -> Any:
    """The layer's tree with gradients of its parts; None, which is zero, for what is whole."""
    return jax.tree.map(
        lambda leaf, g: (
            dataclasses.replace(leaf, part=g, whole=None) if _is_gatherable(leaf) else g
        ),
        layer,
        gradients,
        is_leaf=_is_gatherable,
    )
