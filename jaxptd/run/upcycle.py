"""Experts that begin as copies of a dense model's MLP, with `model.moe.upcycle`.

A dense model has one stack of layers, `blocks`. Here those with and without experts are stacks of
their own. Of each dense parameter a device reads the slice that its own numbers are copies of.

Letters: L layers of the dense model, R layers of a stack, E experts.
Source: Komatsuzaki et al., Sparse Upcycling, arXiv 2212.05055.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxptd.checkpoint.canonical import abstract_canonical, params_from_canonical
from jaxptd.collectives import as_varying
from jaxptd.config import FamilyName, ModelConfig, option
from jaxptd.config.block import FAMILIES, SECTIONS
from jaxptd.errors import UserError
from jaxptd.models.families import architecture_of, family_of
from jaxptd.params import Params
from jaxptd.shapes import axes_in
from jaxptd.step import Program
from jaxptd.step.expert_load import first_layers

DENSE_STACK = "blocks"
COPIED = ("mlp.up.", "mlp.down.")  # parameters of a layer that each expert has a copy of
DRAWN = "mlp.router."  # those that a dense layer lacks


# ---- the dense model -----------------------------------------------------------------------------


def upcycles(model: ModelConfig) -> bool:
    """True if a run of this model begins with a dense model's weights."""
    return model.moe is not None and model.moe.upcycle


def begun_from(model: ModelConfig, family: FamilyName, *, where: object) -> ModelConfig:
    """The model whose weights a run begins with: itself, or with `upcycle` the dense one.

    It has no adapters, which begin beside any weights.

    Args:
        model: of the run.
        family: of the weights.
        where: they are, for messages.

    Raises:
        UserError: the weights have experts where they should not, or none where they should.
    """
    model, has_experts = dataclasses.replace(model, lora=None), "moe" in FAMILIES[family]
    if model.moe is None or (has_experts and not model.moe.upcycle):
        return model
    if not model.moe.upcycle:
        raise UserError(
            f"{where} has no experts, but this model has; use --model.moe.upcycle=true to start "
            "each expert as a copy of its MLP"
        )
    if has_experts:
        raise UserError(
            f"model.moe.upcycle=true, but {where} has experts already; leave upcycle out"
        )
    if family_of(model) is not family_of(dataclasses.replace(ModelConfig(), family=family)):
        raise UserError(
            f"model.moe.upcycle=true: {where} is of family {family}, and this model of "
            f"{model.family}; name a decoder such as llama"
        )
    return _dense(model, family)


def given_as(model: ModelConfig, begun: ModelConfig, name: str) -> str:
    """The field of a model that decides one of the model that `begun_from` returned."""
    of_experts = name == "ffn_hidden_size" and begun.mlp_size != model.mlp_size
    return f"moe.{name}" if of_experts else name


def _dense(model: ModelConfig, family: FamilyName) -> ModelConfig:
    """The model with an MLP in place of experts; its family decides nothing that is left open."""
    moe = model.moe
    assert moe is not None
    size = moe.ffn_hidden_size or model.mlp_size
    if size != model.mlp_size and not all(map(moe.is_sparse, range(model.num_layers))):
        raise UserError(
            f"model.moe.upcycle=true with model.ffn_hidden_size={model.mlp_size} and "
            f"model.moe.ffn_hidden_size={size}: both kinds of layers begin as those of one dense "
            "model; use one size"
        )
    names = [field.name for field in dataclasses.fields(model) if field.name not in SECTIONS]
    open_ = {name: option(model, name) for name in names if getattr(model, name) is None}
    changed = {**open_, "family": family, "moe": None, "ffn_hidden_size": size}
    return dataclasses.replace(model, **changed)


# ---- its parameters ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DenseSource:
    """The part of a dense model's parameter that one of ours begins as.

    Args:
        name: of the dense parameter.
        first: its first layer in the part; None if it has no layers.
        of_experts: whether ours has a copy for each expert, along its second dim.
    """

    name: str
    first: int | None
    of_experts: bool

    def ranges(self, part: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Ranges along the dims of the part -> along those of the whole parameter."""
        first = self.first or 0
        return tuple(
            (begin + first, end + first) if dim == 0 else (begin, end)
            for dim, (begin, end) in enumerate(part)
        )

    def held(self, shape: tuple[int, ...], part: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The whole parameter, sharded like the part, where layers split."""
        mesh, spec = part.sharding.mesh, part.sharding.spec
        devices = math.prod(mesh.shape[axis] for axis in axes_in(spec[:1])[0])
        layers = spec[0] if shape[0] % devices == 0 else None
        sharding = NamedSharding(mesh, P(layers, *spec[1:]))
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=sharding)

    def rows(self, x: Array, part: jax.ShapeDtypeStruct) -> Array:
        """The part of the whole parameter that `held` describes; moves a layer at a time."""
        if x.shape == part.shape:
            return x
        shardings: Any = x.sharding, part.sharding
        given, wanted = (each.spec for each in shardings)
        first, mesh = self.first or 0, shardings[1].mesh
        over, along = axes_in(given)[0], axes_in(wanted)[0]
        axes = sorted({axis for axes in axes_in(wanted) for axis in axes})

        def body(x: Array) -> Array:
            def move(rows: Array, layer: Array) -> tuple[Array, None]:
                at = first + layer - (lax.axis_index(over) * len(x) if over else 0)
                there = (at >= 0) & (at < len(x))
                moved = jnp.where(there, x[jnp.clip(at, 0, len(x) - 1)], 0)
                moved = lax.psum(moved, over) if over else moved
                row = layer - (lax.axis_index(along) * len(rows) if along else 0)
                here = (row >= 0) & (row < len(rows))
                row = jnp.clip(row, 0, len(rows) - 1)
                return rows.at[row].set(jnp.where(here, moved, rows[row])), None

            local = shardings[1].shard_shape(part.shape)
            empty = as_varying(jnp.zeros(local, x.dtype), axes)
            return lax.scan(move, empty, jnp.arange(part.shape[0]))[0]

        mapped = jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=wanted, check_vma=True)
        return jax.jit(mapped)(x)


# Reads a part: which one -> shape, dtype and sharding of the part -> the part.
Read = Callable[[DenseSource, jax.ShapeDtypeStruct], Array]


def sources(program: Program) -> dict[str, DenseSource]:
    """Where the numbers of parameters are in a dense model, for all that it has."""
    stacks, found = architecture_of(program.config.model).stacks, {}
    sparse = {stack.name for stack in stacks if any(part.routes for part in stack.parts)}
    firsts = first_layers(program.config)
    for name, info in program.infos.items():
        stack, _, rest = name.partition(".")
        if info.stack is None:
            found[name] = DenseSource(name, None, of_experts=False)
        elif not rest.startswith(DRAWN):
            of_experts = stack in sparse and rest.startswith(COPIED)
            found[name] = DenseSource(f"{DENSE_STACK}.{rest}", firsts[stack], of_experts)
    return found


def dense_shapes(program: Program) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters of the dense model, by name."""
    shapes = {}
    for name, source in sources(program).items():
        shape = _without_experts(source, program.infos[name].shape)
        layers = shape[:1] if source.first is None else (program.config.model.num_layers,)
        shapes[source.name] = (*layers, *shape[1:])
    return shapes


def upcycled(program: Program, read: Read) -> Params:
    """Parameters as the program's state holds them, begun as a dense model's.

    Routers are drawn at random, as without `upcycle`.
    """
    found, targets = sources(program), abstract_canonical(program)["params"]
    params = program.initial([name for name in targets if name not in found])
    for name, source in found.items():
        x = _copies(targets[name], source, read)
        params |= params_from_canonical(program, {"params": {name: x}})
    return params


def _copies(target: jax.ShapeDtypeStruct, source: DenseSource, read: Read) -> Array:
    """A parameter in canonical form."""
    mesh, spec = target.sharding.mesh, target.sharding.spec
    sharding = NamedSharding(mesh, P(*_without_experts(source, spec)))
    shape = _without_experts(source, target.shape)
    x = read(source, jax.ShapeDtypeStruct(shape, target.dtype, sharding=sharding))
    if source.of_experts:
        copy = jax.jit(
            lambda x: jnp.broadcast_to(x[:, None], target.shape),
            out_shardings=NamedSharding(mesh, spec),
        )
        x = copy(x)
    return jax.device_put(x, target.sharding)


def _without_experts(source: DenseSource, dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes, or axes, of a parameter's dims without that of experts."""
    return (*dims[:1], *dims[2:]) if source.of_experts else tuple(dims)
