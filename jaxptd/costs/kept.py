"""Tensors that layers keep for backward, and the policies of `model.remat` that keep them."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxptd.config import Remat


class Kept(NamedTuple):
    """A tensor that the backward pass of a layer needs.

    Args:
        name: in words.
        bytes: of the tensor, on one device.
        times: how often each policy keeps it.
    """

    name: str
    bytes: int
    times: Mapping[Remat, int]


def by(*policies: Remat) -> dict[Remat, int]:
    """Once by each of these policies."""
    return dict.fromkeys(policies, 1)


MOST, SOME = by("none", "attention", "dots"), by("none", "attention")
