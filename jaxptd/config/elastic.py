"""A run on fewer processes than its layout is for: dp shrinks, the global batch does not change.

Each device computes more micro-batches instead, none larger than before. The samples of a step
follow from its number alone, and losses are sums over the global batch, so the loss curve is the
same to rounding.
"""

import dataclasses
import math
from collections.abc import Iterator

from jaxptd.config.run import Config
from jaxptd.errors import UserError


def for_processes(config: Config, count: int) -> Config:
    """The config of a run on this many processes; unchanged without `processes.elastic`.

    Raises:
        UserError: the layout or the batch does not split so, or the number is outside of
            `processes.elastic`.
    """
    if config.processes.elastic is None:
        return config
    fewest, most = config.processes.elastic
    possible = possible_counts(config)
    shown = f"processes.elastic=[{fewest}, {most}]"
    if fewest not in possible:
        _shrunk(config, fewest)  # which raises
    if not fewest <= count <= most:
        raise UserError(f"{shown}, but there {_are(count)}; start {_listed(possible)}")
    try:
        return _shrunk(config, count)
    except UserError as error:
        raise UserError(f"{error}; start {_listed(possible)}") from error


def for_all_processes(config: Config, given: Config) -> Config:
    """Undoes `for_processes`: the config of a run as its directory keeps it.

    Args:
        config: of a run on fewer processes.
        given: what `for_processes` took.
    """
    train = dataclasses.replace(config.train, micro_batches=given.train.micro_batches)
    elastic = dataclasses.replace(config.processes, elastic=given.processes.elastic)
    return dataclasses.replace(config, layout=given.layout, train=train, processes=elastic)


def possible_counts(config: Config) -> list[int]:
    """The numbers of processes on which an elastic run may be started, ascending."""
    possible = []
    fewest, most = config.processes.elastic or (1, 1)
    step = most // math.gcd(config.layout.dp, most)  # layout.dp has to shrink to a whole number
    for count in range(step * -(-fewest // step), most + 1, step):
        try:
            _shrunk(config, count)
        except UserError:
            continue
        possible.append(count)
    return possible


def _shrunk(config: Config, count: int) -> Config:
    assert config.processes.elastic is not None
    fewest, most = config.processes.elastic
    shown = f"processes.elastic=[{fewest}, {most}]"
    dp = config.layout.dp
    if dp * count % most:
        raise UserError(
            f"{shown} with {count} of {most} processes: layout.dp={dp} does not shrink to "
            f"{count}/{most} of it"
        )
    layout = dataclasses.replace(config.layout, dp=dp * count // most)
    batch, shards = config.train.global_batch_size, layout.sample_shards
    if batch % shards:
        raise UserError(
            f"{shown} with {count} of {most} processes: train.global_batch_size={batch} does not "
            f"split over layout.dp={layout.dp}"
        )
    failed: UserError | None = None
    for number in _micro_batches(config, batch // shards):
        train = dataclasses.replace(config.train, micro_batches=number)
        processes = dataclasses.replace(config.processes, elastic=None)
        try:
            return dataclasses.replace(config, layout=layout, train=train, processes=processes)
        except UserError as error:  # a schedule may need others
            failed = failed or error
    raise UserError(f"{shown} with {count} of {most} processes: {failed}") from failed


def _micro_batches(config: Config, samples: int) -> Iterator[int]:
    """Numbers of micro-batches, the fewest first, with at most as many samples each as before.

    Args:
        config: of all processes.
        samples: of a step on each of the devices that split the batch now.
    """
    before = config.layout.sample_shards * config.train.micro_batches
    most = config.train.global_batch_size // before
    for number in range(1, samples + 1):
        if samples % number == 0 and samples // number <= most:
            yield number


def _are(count: int) -> str:
    return f"is {count} process" if count == 1 else f"are {count} processes"


def _listed(counts: list[int]) -> str:
    return " or ".join(map(str, counts)) + (" processes" if counts != [1] else " process")
