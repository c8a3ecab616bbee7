"""`Config`: every section of a run, checked together; from plain dicts and back.

Anything wrong raises `UserError`: one line that names the field and the remedy. `command_line.py`
reads configs from YAML and options.
"""

import dataclasses
import fnmatch
import ipaddress
import math
import re
import typing
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from jaxptd.config.block import Kernels
from jaxptd.config.checks import require_not_negative, require_positive
from jaxptd.config.effects import check_layout, refuse_without_effect
from jaxptd.config.lora import INSIDE
from jaxptd.config.model import ModelConfig
from jaxptd.config.training import (
    WHOLE_MATRICES,
    CheckpointConfig,
    DataConfig,
    OptimizerConfig,
    TrainConfig,
)
from jaxptd.context_parallel import CHUNK, placed_blocks
from jaxptd.display import settings_html, settings_text
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_fields, meant_field, named_fields
from jaxptd.layout import SAMPLE_AXES, Axis, Layout

# ---- the section `processes` of a config ---------------------------------------------------------


@named_fields
@dataclasses.dataclass(frozen=True)
class ProcessesConfig:
    """The processes of a run. Null fields are read from Slurm, Open MPI, Kubernetes or torchrun.

    Args:
        coordinator: host:port of process 0, as the others reach it, with a port that is free there;
            an IPv6 address stands in brackets, [::1]:55527.
        count: number of processes; 1, or null without a launcher, is this process alone.
        id: number of this process, from 0.
        elastic: fewest and most processes of a run that may start again with fewer; the layout is
            for the most, and with fewer layout.dp shrinks while micro-batches grow. null is always
            as many.
        wait: seconds that processes wait for each other when a run starts.
        domain: number of the NVLink domain that this process's devices are in, such as that of a
            rack; each process has its own; null is what the driver says.
        place: where this process's node is in the network, as names from the top down with points
            between them, rack3.node17; each process has its own, and neighbours become neighbours
            in the mesh; null is Slurm's SLURM_TOPOLOGY_ADDR, if it is set.
        stuck_after: ends the run when a process has been silent for this many seconds, or has spent
            them in one phase (in a step: this or ten times its usual duration, whichever is
            longer); 0 is never.
        slow_factor: names a process for which the others wait, if all but waiting for its devices
            takes it more than this many times as long as them; 0 is never.
    """

    coordinator: str | None = dataclasses.field(default=None, metadata={"paths": False})
    count: int | None = None
    id: int | None = None
    elastic: list[int] | None = None
    wait: float = 300.0
    domain: int | None = None
    place: str | None = dataclasses.field(default=None, metadata={"paths": False})
    stuck_after: float = 40.0
    slow_factor: float = 2.0

    def __post_init__(self) -> None:
        check_fields(self, "processes")
        require_positive("processes", self, "count", "wait")
        require_not_negative("processes", self, "id", "stuck_after", "slow_factor", "domain")
        if 0 < self.slow_factor < 1:
            raise UserError(
                f"processes.slow_factor={self.slow_factor}: use 1 or more, or 0 for never"
            )
        if self.coordinator is not None:
            check_address("processes.coordinator", self.coordinator)
        if self.elastic is not None:
            self._check_elastic(self.elastic)

    def _check_elastic(self, bounds: list[int]) -> None:
        if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
            raise UserError(
                f"processes.elastic={quoted(bounds)}: give the fewest and the most processes, "
                "[2, 8] for example"
            )

    def anywhere(self) -> "ProcessesConfig":
        """Clears the fields that say where a run ran, since it may be resumed elsewhere."""
        return dataclasses.replace(
            self, coordinator=None, count=None, id=None, domain=None, place=None
        )


def address_of(host: str, port: int) -> str:
    """Joins a host and a port; an IPv6 address, with or without brackets, gets them.

    >>> address_of("node01", 55527), address_of("fe80::1%eth0", 55527)
    ('node01:55527', '[fe80::1%eth0]:55527')
    """
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{port}" if _is_ipv6(bare) else f"{host}:{port}"


def check_address(what: str, address: str) -> None:
    """Raises UserError unless `address` is host:port. what: the field, for the message."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|[^\s:\[\]]+):([0-9]+)", address)
    if match and (match[1] is None or _is_ipv6(match[1])) and 0 < int(match[2][:9]) < 65536:
        return
    remedy = "use host:port, as in node01:55527"
    host, _, port = address.rpartition(":")
    forms = [f"[{host}]:{port}"] * _is_ipv6(host) + [f"[{address}]:55527"] * _is_ipv6(address)
    if forms:
        remedy += f", and brackets for an IPv6 address: {' or '.join(forms)}"
    raise UserError(f"{what}={quoted(address)}: {remedy}")


def _is_ipv6(host: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


# ---- a run's whole config ------------------------------------------------------------------------


@named_fields
@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run needs to know. Checks that the sections fit together.

    >>> Config(layout=Layout(tp=2), train=TrainConfig(steps=100))
    Config(layout=Layout(tp=2), train=TrainConfig(steps=100))
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    layout: Layout = dataclasses.field(default_factory=Layout)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    processes: ProcessesConfig = dataclasses.field(default_factory=ProcessesConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_positions()
        self._check_frozen()
        check_layout(self.model, self.layout)
        refuse_without_effect(self.model, self.layout)
        self._check_update()
        self._check_steps()
        self._check_balance()
        self._check_pairs()
        slices = self.layout.sample_shards * self.train.micro_batches
        sizes = {axis: self.layout.sizes[axis] for axis in SAMPLE_AXES}
        named = [f"layout.{axis}={n}" for axis, n in sizes.items() if n > 1 or axis is Axis.DP]
        if self.train.global_batch_size % slices:
            raise UserError(
                f"train.global_batch_size={self.train.global_batch_size} does not split over "
                f"{' x '.join(named)} x train.micro_batches={self.train.micro_batches}; "
                f"use a multiple of {slices}"
            )

    def _check_update(self) -> None:
        name = self.optimizer.name
        if self.layout.update_on == "host" and name in WHOLE_MATRICES:
            raise UserError(
                f"layout.update_on=host with optimizer.name={name}: it needs whole matrices, but "
                "devices hold shards; use adamw, lion or sgd, or layout.update_on=device"
            )

    def _check_steps(self) -> None:
        chosen = f"train.check_steps={self.train.check_steps}"
        if self.train.check_steps == "none":
            return
        if self.model.dtype == "float16":
            raise UserError(
                f"{chosen} with model.dtype=float16, whose loss scale grows until a step overflows "
                "and is skipped; use bfloat16, or train.check_steps=none"
            )
        hosted = self.layout.hosts_parameters or self.layout.hosts_moments
        if self.train.check_steps == "replicas" and hosted:
            raise UserError(
                f"{chosen} with layout.offload={self.layout.offload}: the state is in host memory, "
                "and reading it all would slow each step; use train.check_steps=skipped"
            )

    def _check_balance(self) -> None:
        layout, length = self.layout, self.model.seq_length
        chosen = f"layout.balance={layout.balance}"
        if layout.balance == "none":
            return
        if not self.data.apart:
            raise UserError(
                f"{chosen} arranges work that differs by documents; use data.documents=apart, or "
                "leave it out"
            )
        if not layout.places_tokens:
            return
        if layout.has_grid:
            raise UserError(
                f"{chosen} with a grid (layout.row, layout.col), whose rows hold fixed parts of a "
                "sequence; use layout.tp instead of the grid, or layout.balance=samples"
            )
        if not layout.context_parallel.exchange.any_order:
            raise UserError(
                f"{chosen} with layout.ring={layout.ring}, whose devices hold fixed chunks; use "
                "layout.ring=gather, or layout.ulysses instead of layout.cp, which is balanced"
            )
        blocks = placed_blocks(length, layout.ring_size)
        if length % math.lcm(blocks, layout.sequence_unit):
            block = CHUNK if blocks > 2 * layout.ring_size else 2
            unit = math.lcm(block * layout.ring_size, layout.sequence_unit)
            raise UserError(
                f"{chosen} cuts sequences into {blocks} blocks for layout.cp={layout.cp}, which "
                f"model.seq_length={length} does not split into; use a multiple of {unit}"
            )

    def _check_pairs(self) -> None:
        if self.model.preference and self.data.documents != "whole":
            raise UserError(
                f"model.preference.loss={self.model.preference.loss} compares whole answers; use "
                "data.documents=whole"
            )
        if self.data.rejected_field is not None and not self.model.preference:
            raise UserError(
                f"data.rejected_field={quoted(self.data.rejected_field)} is read for pairs of "
                "answers; use model.preference.loss=sigmoid, or leave it out"
            )

    def _check_frozen(self) -> None:
        name = "model.lora" if self.model.lora else "optimizer.frozen"
        if self.freezes_some and self.layout.has_grid:
            raise UserError(
                f"{name} with a grid (layout.row, layout.col), whose products compute all "
                "gradients; use layout.tp instead of the grid"
            )
        if self.freezes_some and (self.layout.hosts_parameters or self.layout.hosts_moments):
            raise UserError(
                f"{name} with parameters or moments in host memory (layout.offload); use "
                "layout.zero=3 instead"
            )

    @property
    def freezes_some(self) -> bool:
        """True if some parameters do not train."""
        return bool(self.optimizer.frozen or self.model.lora)

    def freezes(self, name: str) -> bool:
        """True if the parameter of that name does not train.

        Without `optimizer.frozen` a model with adapters trains only these.
        """
        if self.optimizer.frozen is None and self.model.lora:
            return INSIDE not in name
        return any(fnmatch.fnmatchcase(name, each) for each in self.optimizer.frozen or ())

    def _check_positions(self) -> None:
        model = self.model
        if self.data.restart_positions or self.restarts_positions:
            self._check_restart()
        if model.block.positions == "learned" and model.seq_length > model.num_positions:
            raise UserError(
                f"model.seq_length={model.seq_length} is more than model.max_positions="
                f"{model.max_positions}; use a shorter one, or model.positions=rope"
            )

    @property
    def restarts_positions(self) -> bool:
        """True if learned positions are looked up from 0 in each document."""
        whole = self.data.documents == "whole" and self.model.block.positions == "learned"
        return self.data.restart_positions or whole

    def _check_restart(self) -> None:
        chosen, positions = "data.restart_positions=true", self.model.block.positions
        if not self.data.restart_positions:
            chosen = "data.documents=whole, whose positions begin at 0 in each record,"
        elif self.data.documents == "whole":
            raise UserError(f"{chosen} has no effect with data.documents=whole; leave it out")
        if not self.data.apart:
            raise UserError(f"{chosen} begins at each document; use data.documents=apart as well")
        if positions != "learned":
            raise UserError(
                f"{chosen} has no effect with model.positions={positions}, which know only how far "
                "two tokens of a document are apart; leave it out"
            )
        if self.layout.has_grid:
            raise UserError(
                f"{chosen} with a grid (layout.row, layout.col), whose rows look up the same "
                "positions in all sequences; use layout.tp instead of the grid"
            )

    @property
    def kernels_on_gpus(self) -> Kernels:
        """The kernels of `model.kernels` on NVIDIA GPUs: xla or triton.

        Auto is triton where each device has all numbers of a token.
        """
        chosen = self.model.kernels
        if chosen != "auto":
            return chosen
        return "xla" if self.layout.has_grid else "triton"

    @property
    def gathers_again(self) -> bool:
        """True if backward gathers the inputs of each layer's first matmuls again."""
        layout = self.layout
        return layout.gathers_inputs and not layout.keep_gathered and self.model.keeps_inputs

    @cached_property
    def padded_model(self) -> ModelConfig:
        """The model with sequences as long as the devices hold, padded if need be.

        Padding does not change the noise of embeddings, which depends on the length.
        """
        unit, model = self.layout.sequence_unit, self.model
        padded = model.with_lengths(lambda length: -(-length // unit) * unit)
        if not model.neftune:
            return padded
        longer = padded.seq_length / model.seq_length
        return dataclasses.replace(padded, neftune=model.neftune * math.sqrt(longer))

    __repr__ = settings_text
    _repr_html_ = settings_html


def from_dict(sections: dict[str, Any]) -> Config:
    """Builds and checks a config from its sections, as `{"model": {"num_layers": 4}, ...}`.

    Raises:
        UserError: unknown section or field, or values that do not fit each other.
    """
    types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
    for name, values in _items("a config", sections):
        if name not in types:
            remedy = f"the sections are {', '.join(types)}"
            raise UserError(f"unknown section {quoted(name)}; {remedy}")
        _check_keys(name, types[name], values)
    return Config(**{name: types[name](**values) for name, values in sections.items()})


def _check_keys(name: str, cls: Any, values: Any) -> None:
    """Raises UserError unless these are fields of a section."""
    kinds = {field.name: section_class(field.type) for field in dataclasses.fields(cls)}
    for key, value in _items(name, values):
        if key not in kinds:
            remedy = meant_field(cls, quoted(key), see="see jaxptd train --help-all")
            raise UserError(f"unknown key {name}.{quoted(key)}; {remedy}")
        if kinds[key] is not None and not isinstance(value, kinds[key] | None):
            _check_keys(f"{name}.{key}", kinds[key], value)


def section_class(kind: Any) -> Any:
    """The dataclass of a field that is a section, or None."""
    members = [kind, *typing.get_args(kind)]
    return next((each for each in members if dataclasses.is_dataclass(each)), None)


def _items(what: str, fields: Any) -> Iterable[tuple[Any, Any]]:
    """Names and values of fields. Raises UserError for anything but a dict."""
    if not isinstance(fields, dict):
        raise UserError(f"{what}: expected a section of fields, got {quoted(fields)}")
    return fields.items()


def to_dict(config: Config) -> dict[str, Any]:
    """Converts a config to nested dicts, as in its YAML file."""
    return dataclasses.asdict(config)
