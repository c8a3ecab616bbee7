"""Reads parameters straight from safetensors files onto any layout, only each device's slices.

Besides the parameters, host memory holds one device's slice of one parameter at a time, and the
data that one layer of it is read from.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxptd.checkpoint.canonical import abstract_canonical, params_from_canonical
from jaxptd.config import FamilyName
from jaxptd.config.lora import INSIDE
from jaxptd.errors import UserError
from jaxptd.hf.dims import Ranges, Rule
from jaxptd.hf.directory import Directory
from jaxptd.hf.families import FAMILIES, Family
from jaxptd.hf.families.family import flag
from jaxptd.hf.mapping import HEAD, Mapped, file_name, map_tensors
from jaxptd.hf.sizes import check_sizes, read_sizes, with_defaults
from jaxptd.params import Params
from jaxptd.run.saved import check_finite
from jaxptd.run.upcycle import (
    DenseSource,
    Read,
    begun_from,
    dense_shapes,
    given_as,
    upcycled,
    upcycles,
)
from jaxptd.step import Program

TIED = "tie_word_embeddings"


def sizes_of(directory: Directory) -> dict:
    """The fields of `ModelConfig` that a directory decides. Raises UserError as `read_sizes`."""
    family = FAMILIES.get(str(directory.config.get("model_type")))
    tied = family is None or _is_tied(directory, family)
    sizes = read_sizes(directory.config, tied=tied, where=directory)
    depths = [sizes.get(name) or 0 for name in ("num_layers", "encoder_decoder.num_layers")]
    layers = max(*depths, *(sizes.get("images.depths") or ()))
    if layers > len(directory.shapes):
        raise UserError(
            f"{directory}: {layers} layers in its config.json, and {len(directory.shapes)} tensors "
            "in its files; download the directory again"
        )
    return sizes


def sizes_without_weights(directory: Directory) -> dict:
    """The fields of `ModelConfig` in a `config.json` alone, without files of tensors.

    The output layer is tied as `tie_word_embeddings` says.

    Raises:
        UserError: as `read_sizes`.
    """
    family = FAMILIES.get(str(directory.config.get("model_type")))
    tied = family is None or _says_tied(directory, family)
    return read_sizes(directory.config, tied=tied, where=directory)


def remarks_of(directory: Directory) -> list[str]:
    """Remarks for whoever reads a directory: duplicates, and keys without effect.

    Raises:
        UserError: as `sizes_of`.
    """
    remarks, family = directory.remarks(), FAMILIES.get(str(directory.config.get("model_type")))
    if family is not None:
        remarks += family.remarks(with_defaults(directory.config, family))
        names = _head_and_tokens(directory, family)
        if _says_tied(directory, family) and None not in names and not _is_tied(directory, family):
            remarks.append(
                f"{TIED} is true, but {names[0]} and {names[1]} have "
                "different numbers: they are not tied, as in transformers"
            )
    return [f"{directory}: {line}" for line in remarks]


def _is_tied(directory: Directory, family: Family) -> bool:
    """True if the output layer is tied: as `tie_word_embeddings` says, unless the tables differ.

    Raises:
        UserError: it is not tied, and has no table.
    """
    head, tokens = _head_and_tokens(directory, family)
    tied = _says_tied(directory, family)
    if tied and head is not None and tokens is not None:
        return directory.are_equal(head, tokens)
    if (
        not tied and head is None and tokens is not None
    ):  # if both are missing, the names are different
        given = "" if TIED in directory.config else f", the default of {family.name}"
        raise UserError(
            f"{directory} has no {HEAD}, and {TIED} is false{given}; if the output layer is the "
            f'embedding, write "{TIED}": true into its config.json, else download it again'
        )
    return tied


def _says_tied(directory: Directory, family: Family) -> bool:
    """True if `tie_word_embeddings` ties the output layer to the embedding."""
    if family.tied is None:
        return True
    try:
        return flag(TIED, directory.config.get(TIED, family.tied))
    except UserError as error:
        raise UserError(f"{directory}: {error}") from error


def _head_and_tokens(directory: Directory, family: Family) -> list[str | None]:
    """The names in the files of the output layer's table and the embedding; None if missing."""
    table, names = next(family.tensors.others(HEAD), None), list(directory.shapes)
    return [name and file_name(family.name, name, names) for name in (HEAD, table)]


def read_params(program: Program, directory: Directory) -> Params:
    """The parameters of a directory, as the program's state holds them.

    Each process reads what its own devices hold, and equal slices only once. With
    `model.moe.upcycle` the directory has the dense model without experts. Adapters begin as in a
    new run.

    Raises:
        UserError: the directory's model differs from the program's config, is damaged, or has a
            NaN or infinity in a parameter.
    """
    model, sizes = program.config.model, sizes_of(directory)
    begun = begun_from(model, sizes["family"], where=directory)
    check_sizes(begun, sizes, where=directory, named=partial(given_as, model, begun))
    if upcycles(model):
        return upcycled(program, _reader_of_dense(program, directory, sizes["family"]))
    every = abstract_canonical(program)["params"]
    targets = {name: target for name, target in every.items() if INSIDE not in name}
    ours = {name: target.shape for name, target in targets.items()}
    mapped = map_tensors(model.family, ours, directory.shapes, where=directory)
    _check_copies(directory, mapped)
    params = program.initial(every.keys() - targets.keys())
    for name, target in targets.items():
        read = partial(_read, directory, mapped, name=name, target=target)
        params |= params_from_canonical(program, {"params": {name: _array(target, read)}})
    return params


def _reader_of_dense(program: Program, directory: Directory, family: FamilyName) -> Read:
    """Reads slices of a dense model's parameters."""
    shapes = dense_shapes(program)
    mapped = map_tensors(family, shapes, directory.shapes, where=directory)
    _check_copies(directory, mapped)

    def read(source: DenseSource, part: jax.ShapeDtypeStruct) -> jax.Array:
        whole = jax.ShapeDtypeStruct(shapes[source.name], part.dtype)
        of_slice = partial(_read, directory, mapped, name=source.name, target=whole)
        return _array(part, lambda ranges: of_slice(source.ranges(ranges)))

    return read


def _check_copies(directory: Directory, mapped: Mapped) -> None:
    """Raises UserError if two copies of one tensor of the model differ."""
    for copy, name in mapped.copies.items():
        if not directory.are_equal(copy, name):
            raise UserError(
                f"{directory}: {copy} and {name} differ, but the model has one tensor for both; "
                "use weights in which they are tied"
            )


def _array(target: jax.ShapeDtypeStruct, read: Callable[[Ranges], np.ndarray]) -> jax.Array:
    """A global array; each slice that this process's devices hold is read once."""
    sharding: Any = target.sharding
    holders: dict[Ranges, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(target.shape).items():
        ranges = tuple(each.indices(n)[:2] for each, n in zip(index, target.shape, strict=True))
        holders.setdefault(ranges, []).append(device)
    shards = []
    for held, devices in holders.items():
        x = read(held)
        places = [SingleDeviceSharding(each, memory_kind=sharding.memory_kind) for each in devices]
        shards += [jax.device_put(x, place) for place in places]
        jax.block_until_ready(shards)  # before the next slice is read into memory
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


def _read(
    directory: Directory, mapped: Mapped, ranges: Ranges, *, name: str, target: Any
) -> np.ndarray:
    """A slice of a parameter, layer by layer."""
    rules, shape = mapped.rules[name], [end - begin for begin, end in ranges]
    array = np.empty(shape, target.dtype) if rules else np.zeros(shape, target.dtype)
    for rule in rules:
        for index, place in _places(rule, ranges):
            key = mapped.names[rule.tensor_at(index)]
            tensor = directory.tensor(key)
            with np.errstate(over="ignore"):
                array[place] = rule.read(tensor, target.shape, rule.ranges(ranges))
            if rule.plus:
                array[place] += rule.plus
            if not np.isfinite(array[place]).all():
                bad = directory.not_finite(key, target.dtype)
                check_finite(f"{directory}: {key}", bad)
    return array


def _places(
    rule: Rule, ranges: Ranges
) -> Iterator[tuple[tuple[int, ...], tuple[slice | int, ...]]]:
    """The tensors of a rule for a slice: layer, and expert, of each, and its place in the slice."""
    place: list[slice | int] = [slice(None)] * len(ranges)
    if rule.entry:
        dim, number = rule.entry
        begin, end = ranges[dim]
        if not begin <= number < end:
            return
        place[dim] = number - begin
    numbers = ranges[: rule.numbered]
    for index in itertools.product(*(range(*each) for each in numbers)):
        held = tuple(number - begin for number, (begin, _) in zip(index, numbers, strict=True))
        yield index, (*held, *place[rule.numbered :])
