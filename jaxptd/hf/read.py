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
from jaxptd.hf.dims import Ranges, Rule
from jaxptd.hf.directory import Directory
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.mapping import HEAD, Mapped, file_name, map_tensors
from jaxptd.hf.sizes import check_sizes, read_sizes
from jaxptd.params import Params
from jaxptd.step import Program


def sizes_of(directory: Directory) -> dict:
    """The fields of `ModelConfig` that a directory decides. Raises UserError as `read_sizes`."""
    family = FAMILIES.get(str(directory.config.get("model_type")))
    tied = family is None or file_name(family.name, HEAD, list(directory.shapes)) is None
    return read_sizes(directory.config, tied=tied, where=directory)


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
    params: Params = {}
    for name, target in targets.items():
        read = partial(_read, directory, mapped, name=name, target=target)
        params |= params_from_canonical(program, {"params": {name: _array(target, read)}})
    return params


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
