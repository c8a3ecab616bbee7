"""Parameters: declared in one line by a layer, collected in a `Blueprint` of the whole model.

Inside the step parameters are a plain dict `{"blocks.mlp.up.w": array, ...}` of local blocks. A
parameter has four forms; as an example `w[D, F]` of every layer, F padded to F' so that it splits:

    canonical  [L, D, F]         global, the same for every layout: in checkpoints and `verify`
       |  ^
       |  |    stacked  [L, D, F']   global, as a model's constructor makes it, padded with zeros
       |  |       |
       v  |       v  from_stacked: layers into rows of stages (pipelines), flattened (ZeRO)
    stored     [R, D, F']        global, in the state: `stored_shape`, sharded by `spec`
       v  shard_map
    local      [R/pp, D, F'/tp]  one device's block

On the left `from_canonical` goes down, `to_canonical` up.
"""

import dataclasses
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

from jaxptd.shapes import ParamShape, StoredShape

Params = dict[str, Array]
Initialiser = Callable[[Array, Sequence[int]], Array]
CPU_OPTIONS = {"xla_backend_optimization_level": 1}  # else random numbers compile for seconds


def normal(stddev: float) -> Initialiser:
    """Draws from a normal distribution, as sums of twelve uniform 16-bit integers, float32.

    Sums of integers are exact and one rounding follows, so the numbers are the same to the last bit
    however the array is sharded and fused. (In `jax.random.normal` that bit depends on how XLA
    vectorises the inverse error function.)
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


def param(key: Array, shape: ParamShape, init: Initialiser) -> nnx.Param:
    """Declares a parameter.

    Args:
        key: random key of its initial values.
        shape: its description; records in `jaxptd.parts.parameters` make one.
        init: makes the initial values from key and canonical shape.
    """
    sizes = zip(shape.stored_shape, shape.shape, strict=True)
    return nnx.Param(
        jnp.pad(init(key, shape.shape), [(0, size - n) for size, n in sizes]),
        spec=shape.spec,
        canonical=shape.shape,
        decay=shape.decay,
        cast=shape.cast,
        over=shape.over,
        matrix=shape.matrix,
        counts=shape.counts,
        stacked=False,
    )


def stacked(make: Callable[[Array], Any], keys: Array) -> Any:
    """A module with the parameters of `make(key)` for all L keys, stacked `[L, ...]`."""
    modules = jax.vmap(make)(keys)

    def relabel(p: nnx.Param) -> nnx.Param:
        canonical, spec = (keys.shape[0], *p.canonical), (None, *p.spec)
        same = {"decay": p.decay, "cast": p.cast, "over": p.over, "counts": p.counts}
        same["matrix"] = "s" + p.matrix if p.matrix else ""
        return nnx.Param(p.get_value(), spec=spec, canonical=canonical, stacked=True, **same)

    return jax.tree.map(relabel, modules, is_leaf=lambda p: isinstance(p, nnx.Param))


class Stored(StoredShape, Protocol):
    """The stored form of a parameter, and the conversions from and to the other global forms."""

    @property
    def info(self) -> "ParamInfo":
        """The form in which layers use the parameter."""

    def to_canonical(self, x: Array) -> Array:
        """Stored -> canonical."""

    def from_canonical(self, x: ArrayLike) -> Array:
        """Canonical -> stored."""

    def from_stacked(self, x: Array) -> Array:
        """Stacked (or, of a parameter without layers, padded) -> stored."""

    def __hash__(self) -> int: ...  # a key of what is compiled for it


@dataclasses.dataclass(frozen=True)
class ParamInfo(ParamShape):
    """Describes a parameter before it exists, and converts its arrays."""

    def to_canonical(self, x: Array) -> Array:
        """Stored -> canonical: puts layers in order, removes the padding."""
        ordered = x if self.rows is None else x[np.array(self.rows)]
        return ordered[tuple(slice(n) for n in self.shape)]

    def from_canonical(self, x: ArrayLike) -> Array:
        """Canonical -> stored: appends zeros, puts layers in their rows."""
        skip = 0 if self.rows is None else 1
        sizes = list(zip(self.stored_shape, self.shape, strict=True))[skip:]
        padding = [(0, 0)] * skip + [(0, size - n) for size, n in sizes]
        return self.from_stacked(jnp.pad(jnp.asarray(x), padding))

    def from_stacked(self, x: Array) -> Array:
        """Stacked -> stored: puts layers in their rows."""
        if self.rows is None:
            return x
        return jnp.zeros(self.stored_shape, x.dtype).at[np.array(self.rows)].set(x)


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """The parameters of the model that `make(key)` builds, without building it.

    Args:
        make: key -> the model.
        place: for pipelines, a parameter's info on one stage -> its info on all stages.
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
        named = ((_name(path), p) for path, p in leaves)
        return {name: self.place(_info(name, p)) for name, p in named}

    @property
    def specs(self) -> dict[str, P]:
        return {name: P(*info.spec) for name, info in self.infos.items()}

    def build(self, params: Mapping[str, Array]) -> Any:
        """The model with these arrays as its parameters; None for the parameters not given."""
        leaves = [params.get(name) for name in self.infos]
        return jax.tree.unflatten(jax.tree.structure(self._abstract), leaves)

    def init(
        self, seed: int, *, mesh: Mesh, dtype: Any, stored: Mapping[str, Stored] | None = None
    ) -> Params:
        """Initial parameters, the same on every mesh.

        stored: their forms, if only of some, these are made; None: of all, without ZeRO.
        """
        forms: Mapping[str, Stored] = self.infos if stored is None else stored

        def make(key: Array) -> Params:
            with nnx.use_eager_sharding(False):
                leaves = jax.tree.leaves(self.make(key))
            return {
                name: forms[name].from_stacked(leaf.astype(dtype))
                for name, leaf in zip(self.infos, leaves, strict=True)
                if name in forms
            }

        options = CPU_OPTIONS if mesh.devices.flat[0].platform == "cpu" else None
        compiled = jax.jit(make, out_shardings=shardings(forms, mesh), compiler_options=options)
        return compiled(jax.random.key(seed))

    def to_canonical(self, params: Mapping[str, Array]) -> Params:
        """Stored without ZeRO -> canonical, for every parameter."""
        return {name: self.infos[name].to_canonical(x) for name, x in params.items()}

    def from_canonical(self, params: Mapping[str, Array]) -> Params:
        """Canonical -> stored without ZeRO, for every parameter."""
        return {name: self.infos[name].from_canonical(x) for name, x in params.items()}


def shardings(stored: Mapping[str, Stored], mesh: Mesh) -> dict[str, NamedSharding]:
    """The sharding of each parameter's stored form."""
    return {name: NamedSharding(mesh, P(*each.spec)) for name, each in stored.items()}


def _info(name: str, p: nnx.Param) -> ParamInfo:
    shape, stack = p.get_value().shape, name.partition(".")[0] if p.stacked else None
    return ParamInfo(
        *(p.canonical, shape, p.spec, p.decay, p.cast, p.over, stack, p.matrix), counts=p.counts
    )


def _is_param(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Param)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
