"""The moments that each optimizer keeps, as shapes and axes, without their arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxptd.config import OptimizerConfig, OptimizerName
from jaxptd.shapes import ParamShape, StoredShape


class Factors(NamedTuple):
    """Means of a matrix's squared gradients. rows: `[S, R]`; columns: `[S, C]`; S matrices."""

    rows: Any
    columns: Any


class Average(NamedTuple):
    """The moving average of parameters. steps: that it has seen, int32. average: by parameter."""

    steps: Any
    average: Any


def factors(stored: StoredShape) -> Factors:
    """The forms in which a state holds the means of a matrix: cut like it, in no shards."""
    return Factors(rows=_without(stored, "c"), columns=_without(stored, "r"))


def _without(stored: StoredShape, kind: str) -> ParamShape:
    info = stored.info
    kept = [dim for dim, each in enumerate(info.matrix) if each != kind]
    return dataclasses.replace(
        info,
        shape=tuple(info.shape[dim] for dim in kept),
        stored_shape=tuple(info.stored_shape[dim] for dim in kept),
        spec=tuple(info.spec[dim] for dim in kept),
        matrix="",
    )


def is_orthogonalised(stored: StoredShape) -> bool:
    """True for the matrices of layers: no table, no output layer, no vector."""
    return stored.info.stack is not None and bool(stored.info.matrix)


@dataclasses.dataclass(frozen=True)
class Moments:
    """The moments of an optimizer; kept: how a state holds what is kept for a parameter."""

    kept: Callable[[StoredShape], tuple[StoredShape, ...]]


def kept(optimizer: OptimizerConfig, stored: StoredShape) -> tuple[StoredShape, ...]:
    """The moments of a parameter, and its average if there is one.

    A parameter that no optimizer updates has none of them.
    """
    average = (stored,) if optimizer.ema_decay else ()
    return (*MOMENTS[optimizer.name].kept(stored), *average) if stored.info.optimized else ()


MOMENTS: Mapping[OptimizerName, Moments] = {
    "adamw": Moments(lambda each: (each, each)),
    "lion": Moments(lambda each: (each,)),
    "sgd": Moments(lambda each: (each,)),
    "muon": Moments(lambda each: (each,) if is_orthogonalised(each) else (each, each)),
    "adafactor": Moments(lambda each: factors(each) if each.info.matrix else (each,)),
}
