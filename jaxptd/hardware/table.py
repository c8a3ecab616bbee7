"""The table of accelerators: read from YAML, every number with its kind and its source."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxptd.errors import UserError, did_you_mean, quoted, read_small

PACKAGED = Path(__file__).with_name("accelerators.yaml")
KINDS = ("data sheet", "measured", "fitted", "estimate")
MAY_BE_ZERO = ("fp8_flops",)
WHOLE = ("multiprocessors", "nvlink_domain")


class _Loader(yaml.SafeLoader):
    """Reads plain values; duplicate keys and aliases are errors."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias; write the values out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [str(key.value) for key, _ in node.value]
        if again := [name for name in names if names.count(name) > 1]:
            raise yaml.YAMLError(f"{again[0]} is given twice; give it once")
        return super().construct_mapping(node, deep=deep)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number with its kind (one of `KINDS`) and its source."""

    value: float
    kind: str
    source: str


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Limits of one accelerator. Link bandwidths are per direction.

    Args:
        name: in the table, such as `h100`.
        bf16_flops, fp8_flops: FLOP/s of dense matmuls. 0 if there are none in that precision.
        hbm_bandwidth: bytes/s of its memory.
        hbm_bytes: size of its memory.
        multiprocessors: number of units that run matmul tiles at the same time.
        nvlink_bandwidth: bytes/s to the other devices of its domain.
        nvlink_domain: number of devices that NVLink joins.
        network_bandwidth: bytes/s to other nodes.
        host_bandwidth: bytes/s to its host's memory.
        products_share, hbm_share, nvlink_share, network_share: the share of these limits that large
            matmuls, memory-bound kernels and collectives reach.
        attention_forward_share, attention_backward_share: the share of `bf16_flops` that a fused
            causal kernel reaches with heads of 128.
    """

    name: str
    bf16_flops: float
    fp8_flops: float
    hbm_bandwidth: float
    hbm_bytes: float
    multiprocessors: int
    nvlink_bandwidth: float
    nvlink_domain: int
    network_bandwidth: float
    host_bandwidth: float
    products_share: float
    hbm_share: float
    nvlink_share: float
    network_share: float
    attention_forward_share: float
    attention_backward_share: float


NUMBERS = tuple(field.name for field in dataclasses.fields(Accelerator))[1:]


@functools.cache
def _packaged() -> Mapping[str, Mapping[str, Figure]]:
    return read_figures(PACKAGED)


def accelerators(path: str | Path | None = None) -> dict[str, Accelerator]:
    """The accelerators of a file, or of the packaged table, by name.

    Raises:
        UserError: the file cannot be read, or a number is missing or impossible.
    """
    rows = _packaged() if path is None else read_figures(Path(path))
    return {name: _accelerator(name, figures) for name, figures in rows.items()}


def find_accelerator(name: str, path: str | Path | None = None) -> Accelerator:
    """The accelerator with this name, from a file or from the packaged table.

    Raises:
        UserError: there is none of that name.
    """
    return _accelerator(name, figures_of(name, path))


def figures_of(name: str, path: str | Path | None = None) -> Mapping[str, Figure]:
    """The numbers of the accelerator with this name, with kinds and sources.

    Raises:
        UserError: there is none of that name.
    """
    known = {**_packaged(), **(read_figures(Path(path)) if path is not None else {})}
    if name in known:
        return known[name]
    remedy = did_you_mean(name, known, otherwise=f"use one of {', '.join(known)}")
    raise UserError(f"hardware={quoted(name)}: no such accelerator; {remedy}")


def read_figures(path: Path) -> dict[str, dict[str, Figure]]:
    """The numbers of each accelerator in a file, with kinds and sources.

    Raises:
        UserError: the file cannot be read, or a number is missing or impossible.
    """
    document = _document(path)
    if not isinstance(document, dict) or not document:
        raise UserError(
            f"{path}: expected accelerators by name; see docs/planning.md for the format"
        )
    return {_name(path, name): _figures(path, name, row) for name, row in document.items()}


def _document(path: Path) -> Any:
    text = read_small(path, remedy="name a YAML file of accelerators")
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path} is not YAML: {quoted(' '.join(str(error).split()))}") from error


def _name(path: Path, name: Any) -> str:
    if not isinstance(name, str):
        raise UserError(f"{path}: {quoted(name)} cannot be an accelerator's name; use text")
    return name


def _figures(path: Path, name: str, row: Any) -> dict[str, Figure]:
    where = f"{path}: {quoted(name)}"
    if not isinstance(row, dict):
        raise UserError(f"{where} has no numbers; give it {', '.join(NUMBERS[:3])} and so on")
    for field in row:
        if field not in NUMBERS:
            remedy = did_you_mean(str(field), NUMBERS, otherwise="remove it")
            raise UserError(f"{where} has an unknown number {quoted(field)}; {remedy}")
    missing = [field for field in NUMBERS if field not in row]
    if missing:
        raise UserError(f"{where} lacks {missing[0]}; give every number of the accelerator")
    return {field: _figure(f"{where}.{field}", field, row[field]) for field in NUMBERS}


def _figure(where: str, field: str, cell: Any) -> Figure:
    if not isinstance(cell, dict) or set(cell) != {"value", "kind", "source"}:
        raise UserError(f"{where}: expected {{value: ..., kind: ..., source: ...}}")
    value, kind, source = cell["value"], cell["kind"], cell["source"]
    if kind not in KINDS:
        raise UserError(f"{where}: kind={quoted(kind)}; use one of {', '.join(KINDS)}")
    if not isinstance(source, str) or not source.strip():
        raise UserError(f"{where}: no source; say where the number comes from")
    return Figure(_number(where, field, value), kind, source)


def _number(where: str, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(
            f"{where}: value={quoted(value)} is not a number; write it like 3.0e+12, with the sign"
        )
    lowest = 0 if field in MAY_BE_ZERO else 1e-9
    if not lowest <= value < 1e18:
        raise UserError(f"{where}: value={quoted(value)}; use a number above 0 and below 1e18")
    if field.endswith("_share") and value > 1:
        raise UserError(f"{where}: value={value}; use at most 1 for a share")
    if field in WHOLE and value != int(value):
        raise UserError(f"{where}: value={value}; use a whole number")
    return int(value) if field in WHOLE else float(value)


def _accelerator(name: str, figures: Mapping[str, Figure]) -> Accelerator:
    numbers: dict[str, Any] = {field: figure.value for field, figure in figures.items()}
    return Accelerator(name, **numbers)


# ---- groups of devices, and the links that a collective among them uses --------------------------
# Devices are numbered in mesh order: tp innermost, then cp, dp, pp. A node is an NVLink domain;
# every device has its own network card, a rail.


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices whose numbers are `stride` apart.

    Args:
        members: n, 1 or more.
        stride: k, 1 or more.
    """

    members: int
    stride: int = 1


class Links(NamedTuple):
    """A group of devices in a cluster.

    local: members that share a node: min(n, node / k).
    nodes: over which the group is spread.
    bandwidth: maximum bytes per second that each member of a ring sends.
    resource: name of the limiting link: `NVLink` or `network`.
    """

    local: int
    nodes: int
    bandwidth: float
    resource: str


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Accelerators of one kind in nodes.

    Args:
        accelerator: their limits.
        node: devices per node. 0 means as many as NVLink joins.
    """

    accelerator: Accelerator
    node: int = 0

    @property
    def node_size(self) -> int:
        return self.node or self.accelerator.nvlink_domain

    def links(self, group: Group) -> Links:
        """The links of a group; a plan asks for the same few groups thousands of times."""
        links = self._links.get(group)
        if links is None:
            links = self._links[group] = self._spread(group)
        return links

    @functools.cached_property
    def _links(self) -> dict[Group, Links]:
        return {}

    def _spread(self, group: Group) -> Links:
        """A ring within a node uses NVLink.

        A ring over nodes leaves each node once per rail, and has as many rails as members in a
        node.
        """
        a = self.accelerator
        members = max(1, min(group.members, self.node_size // group.stride))
        nodes = math.ceil(group.members / members)
        nvlink = a.nvlink_bandwidth * a.nvlink_share
        bandwidth = nvlink if nodes == 1 else min(nvlink, members * self.rail)
        return Links(members, nodes, bandwidth, "NVLink" if bandwidth >= nvlink else "network")

    @property
    def rail(self) -> float:
        """Bytes per second of one device's network card."""
        return self.accelerator.network_bandwidth * self.accelerator.network_share
