"""Parameters straight from safetensors files, on any layout: each device's slices only.

Beside the parameters themselves, host memory has one device's slice of one of them at a time, and
what one layer of it is read from.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxptd.checkpoint.canonical import abstract_canonical, params_from_canonical
from jaxptd.errors import UserError
from jaxptd.hf.dims import Ranges, Rule
from jaxptd.hf.directory import Directory
from jaxptd.hf.families import FAMILIES, Family
from jaxptd.hf.mapping import HEAD, Mapped, file_name, map_tensors
from jaxptd.hf.sizes import check_sizes, read_sizes
from jaxptd.params import Params
from jaxptd.step import Program


def sizes_of(directory: Directory) -> dict:
    """The fields of `ModelConfig` that a directory decides. Raises UserError as `read_sizes`."""
    family = FAMILIES.get(str(directory.config.get("model_type")))
    tied = family is None or _is_tied(directory, family)
    return read_sizes(directory.config, tied=tied, where=directory)


def _is_tied(directory: Directory, family: Family) -> bool:
    """True unless the output layer has a table of its own; one that equals the embedding is none.

    `tie_word_embeddings: false` keeps even those apart, and true ties no tables that differ.
    Source: transformers 5.24, `tie_weights`.

    Raises:
        UserError: an output layer that is not tied is missing; transformers would draw it.
    """
    table, found = next(family.tensors.others(HEAD), None), list(directory.shapes)
    names = [name and file_name(family.name, name, found) for name in (HEAD, table)]
    flag = directory.config.get("tie_word_embeddings", family.tied)
    if names[0] is None and names[1] and not (flag or family.always_tied):
        told = "" if "tie_word_embeddings" in directory.config else " by default"
        raise UserError(
            f"{directory} has no {HEAD}, and tie_word_embeddings is false{told}; write it as true "
            "into config.json if the output layer is the embedding, else download the directory "
            "again"
        )
    if None in names:
        return True
    head, tokens = map(str, names)
    return flag is not False and directory.are_equal(head, tokens)


def read_params(program: Program, directory: Directory) -> Params:
    """The parameters of a directory, as the program's state holds them.

    Each process reads what its own devices hold; of equal slices one.

    Raises:
        UserError: the directory has another model than the program's config, or is damaged.
    """
    model = program.config.model
    check_sizes(model, sizes_of(directory), where=directory)
    targets = abstract_canonical(program)["params"]
    ours = {name: target.shape for name, target in targets.items()}
    mapped = map_tensors(model.family, ours, directory.shapes, where=directory)
    _check_copies(directory, mapped)
    params: Params = {}
    for name, target in targets.items():
        read = partial(_read, directory, mapped, name=name, target=target)
        params |= params_from_canonical(program, {"params": {name: _array(target, read)}})
    return params


def _check_copies(directory: Directory, mapped: Mapped) -> None:
    """Raises UserError if a tensor that the model has once is there twice with other numbers."""
    for copy, name in mapped.copies.items():
        if not directory.are_equal(copy, name):
            raise UserError(
                f"{directory}: {copy} and {name} have different numbers, and the model has one "
                "tensor for both; use weights in which they are tied"
            )


def _array(target: jax.ShapeDtypeStruct, read: Callable[[Ranges], np.ndarray]) -> jax.Array:
    """A global array, of which each slice that this process's devices hold is read once."""
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
        jax.block_until_ready(shards)  # before the next slice is in memory, too
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


def _read(
    directory: Directory, mapped: Mapped, ranges: Ranges, *, name: str, target: Any
) -> np.ndarray:
    """A slice of a parameter, layer by layer."""
    found = np.empty([end - begin for begin, end in ranges], target.dtype)
    for rule in mapped.rules[name]:
        names = rule.names(target.shape)
        for layer, place in _places(rule, ranges):
            tensor = directory.tensor(mapped.names[names[layer]])
            found[place] = rule.read(tensor, target.shape, rule.ranges(ranges))
    return found


def _places(rule: Rule, ranges: Ranges) -> Iterator[tuple[int, tuple[slice | int, ...]]]:
    """The layers of a slice that a rule is for, and where in the slice each of them is."""
    place: list[slice | int] = [slice(None)] * len(ranges)
    if rule.entry:
        dim, number = rule.entry
        begin, end = ranges[dim]
        if not begin <= number < end:
            return
        place[dim] = number - begin
    first, last = ranges[0] if rule.is_stacked else (0, 1)
    for layer in range(first, last):
        yield layer, (layer - first, *place[1:]) if rule.is_stacked else tuple(place)
