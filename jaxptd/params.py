"""Parameters: declared in one line by a layer, gathered into a `Blueprint` of the whole model.

Inside the step parameters are a plain dict `{"blocks.mlp.up.w": array, ...}` of a device's blocks.
A parameter has two global forms. *Held*: what the layout lays over the mesh, perhaps zero-padded so
that it splits evenly. *Canonical*: without padding, the same for every layout; checkpoints and
`verify` speak of that one only.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

Params = dict[str, Array]
Initialiser = Callable[[Array, Sequence[int]], Array]


def normal(stddev: float) -> Initialiser:
    """Draws from a normal distribution, as sums of twelve uniform 16-bit integers, float32.

    Sums of integers are exact and one rounding follows, so the numbers are the same to the last bit
    however the array is cut and fused. (The inverse error function of `jax.random.normal` is not:
    its last bit depends on how XLA vectorises it.)
    """

    def draw(key: Array, shape: Sequence[int]) -> Array:
        words = jax.random.bits(key, (6, *shape), jnp.uint32)
        total = ((words & 0xFFFF) + (words >> 16)).astype(jnp.int32).sum(0, dtype=jnp.int32)
        return (total - 6 * 0xFFFF).astype(jnp.float32) * jnp.float32(stddev / 2**16)

    return draw


def zeros(key: Array, shape: Sequence[int]) -> Array:
    return jnp.zeros(shape, jnp.float32)


def ones(key: Array, shape: Sequence[int]) -> Array:
    return jnp.ones(shape, jnp.float32)


def param(
    key: Array,
    shape: Sequence[int],
    init: Initialiser,
    *,
    spec: P,
    held: Sequence[int] | None = None,
    decay: bool = True,
    cast: bool = False,
) -> nnx.Param:
    """Declares a parameter.

    Args:
        key: of its random numbers.
        shape: its canonical global shape.
        init: makes it from key and shape.
        spec: how its held form lies over the mesh.
        held: its global shape with padding, where that differs.
        decay: whether weight decay applies.
        cast: whether all that is read of it is read in the compute precision.
    """
    held = tuple(held or shape)
    padding = [(0, have - want) for have, want in zip(held, shape, strict=True)]
    return nnx.Param(
        jnp.pad(init(key, tuple(shape)), padding),
        spec=spec,
        canonical=tuple(shape),
        decay=decay,
        cast=cast,
        stacked=False,
    )


def stacked(make: Callable[[Array], Any], keys: Array) -> Any:
    """One module whose parameters are those of `make(key)` for every key, stacked `[L, ...]`."""
    modules = jax.vmap(make)(keys)

    def relabel(p: nnx.Param) -> nnx.Param:
        canonical, spec = (keys.shape[0], *p.canonical), P(None, *p.spec)
        same = {"decay": p.decay, "cast": p.cast}
        return nnx.Param(p.get_value(), spec=spec, canonical=canonical, stacked=True, **same)

    return jax.tree.map(relabel, modules, is_leaf=lambda p: isinstance(p, nnx.Param))


class Stored(Protocol):
    """How the state holds an array: its global shape there, and the way to its canonical form."""

    @property
    def info(self) -> "ParamInfo":
        """How layers hold it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Canonical."""

    @property
    def held(self) -> tuple[int, ...]:
        """Of the held form."""

    @property
    def spec(self) -> P:
        """How that lies over the mesh."""

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes it is cut over."""

    @property
    def is_canonical(self) -> bool:
        """Whether the held form is the canonical one."""

    def canonical(self, x: Array) -> Array:
        """Held -> canonical."""

    def pad(self, x: ArrayLike) -> Array:
        """Canonical -> held."""

    def arrange(self, x: Array) -> Array:
        """As a layer makes it -> held."""

    def __hash__(self) -> int:
        """What is compiled for it is kept by it."""


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """What is known of a parameter before it exists.

    Args:
        shape: canonical, global.
        held: with padding, global.
        spec: how the held form lies over the mesh.
        decay: whether weight decay applies.
        cast: whether all that is read of it is read in the compute precision.
        stacked: whether it is `[L, ...]`, one of each layer.
        rows: where it is stacked, the held row of each layer; None: as they are numbered.
    """

    shape: tuple[int, ...]
    held: tuple[int, ...]
    spec: P
    decay: bool
    cast: bool = False
    stacked: bool = False
    rows: tuple[int, ...] | None = None

    @property
    def info(self) -> "ParamInfo":
        return self

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes it is cut over."""
        return frozenset(axis for axes in self.axes_of_dims for axis in axes)

    @property
    def axes_of_dims(self) -> list[tuple[str, ...]]:
        """The mesh axes that each dim is cut over."""
        return [() if a is None else a if isinstance(a, tuple) else (a,) for a in self.spec]

    @property
    def is_canonical(self) -> bool:
        """Whether the held form is the canonical one."""
        return self.shape == self.held and self.rows is None

    def canonical(self, x: Array) -> Array:
        """Held -> canonical: layers in their order, the padding cut off."""
        ordered = x if self.rows is None else x[np.array(self.rows)]
        return ordered[tuple(slice(n) for n in self.shape)]

    def pad(self, x: ArrayLike) -> Array:
        """Canonical -> held: zeros appended, layers in their rows."""
        skip = 0 if self.rows is None else 1
        sizes = list(zip(self.held, self.shape, strict=True))[skip:]
        padding = [(0, 0)] * skip + [(0, h - n) for h, n in sizes]
        return self.arrange(jnp.pad(jnp.asarray(x), padding))

    def arrange(self, x: Array) -> Array:
        """A stack with all but its rows as held -> its layers in their rows."""
        if self.rows is None:
            return x
        return jnp.zeros(self.held, x.dtype).at[np.array(self.rows)].set(x)

    def cut_over(self, axis: str, sizes: Mapping[Any, int]) -> "ParamInfo":
        """Cut over one more axis: along its longest dim that splits; as it is, if none does.

        Args:
            axis: that it is not cut over.
            sizes: devices along each axis.
        """
        axes = self.axes_of_dims
        blocks = [
            n // math.prod(sizes[each] for each in cut)
            for n, cut in zip(self.held, axes, strict=True)
        ]
        able = [dim for dim, block in enumerate(blocks) if block % sizes[axis] == 0]
        if not able:
            return self
        dim = max(able, key=blocks.__getitem__)
        spec = [*self.spec]
        spec[dim] = (*axes[dim], axis) if axes[dim] else axis
        return dataclasses.replace(self, spec=P(*spec))


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The parameters of the model that `make(key)` builds, without building it.

    Args:
        make: key -> the model.
        place: how each parameter is held over stages, out of how it is held over one.
    """

    make: Callable[[Array], Any]
    place: Callable[[ParamInfo], ParamInfo] = lambda info: info

    @cached_property
    def _abstract(self) -> Any:
        with nnx.use_eager_sharding(False):
            return jax.eval_shape(self.make, jax.random.key(0))

    @cached_property
    def infos(self) -> dict[str, ParamInfo]:
        leaves = jax.tree_util.tree_leaves_with_path(self._abstract, is_leaf=_is_param)
        return {_name(path): self.place(_info(p)) for path, p in leaves}

    @property
    def specs(self) -> dict[str, P]:
        return {name: info.spec for name, info in self.infos.items()}

    def build(self, params: Mapping[str, Array]) -> Any:
        """The model with these arrays as its parameters; one without its others has None there."""
        return jax.tree.unflatten(
            jax.tree.structure(self._abstract), [params.get(name) for name in self.infos]
        )

    def shardings(self, mesh: Mesh) -> dict[str, NamedSharding]:
        return shardings(self.infos, mesh)

    def init(
        self, seed: int, *, mesh: Mesh, dtype: Any, stored: Mapping[str, Stored] | None = None
    ) -> Params:
        """Initial parameters, laid over the mesh; the same numbers on every mesh.

        Args:
            seed: of their random numbers.
            mesh: to lie on.
            dtype: their precision.
            stored: how they are held; None: as layers do.
        """
        held: Mapping[str, Stored] = stored or self.infos

        def make(key: Array) -> Params:
            with nnx.use_eager_sharding(False):
                leaves = jax.tree.leaves(self.make(key))
            return {
                name: held[name].arrange(leaf.astype(dtype))
                for name, leaf in zip(self.infos, leaves, strict=True)
            }

        return jax.jit(make, out_shardings=shardings(held, mesh))(jax.random.key(seed))

    def canonical(self, params: Mapping[str, Array]) -> Params:
        """Held -> canonical, for every parameter."""
        return {name: self.infos[name].canonical(x) for name, x in params.items()}

    def held(self, params: Mapping[str, Array]) -> Params:
        """Canonical -> held, for every parameter."""
        return {name: self.infos[name].pad(x) for name, x in params.items()}


def shardings(stored: Mapping[str, Stored], mesh: Mesh) -> dict[str, NamedSharding]:
    """How parameters lie over the mesh."""
    return {name: NamedSharding(mesh, each.spec) for name, each in stored.items()}


def _info(p: nnx.Param) -> ParamInfo:
    return ParamInfo(p.canonical, p.get_value().shape, p.spec, p.decay, p.cast, p.stacked)


def _is_param(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Param)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
