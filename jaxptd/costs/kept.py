"""Tensors that layers save for backward, and the policies of `model.remat` that save them."""

from collections.abc import Mapping
from typing import NamedTuple

from jaxptd.config import Remat


class Kept(NamedTuple):
    """A tensor that the backward pass of a layer needs.

    Args:
        name: the tensor's name in reports.
        bytes: its size on one device.
        times: how often each policy saves it.
    """

    name: str
    bytes: int
    times: Mapping[Remat, int]


def by(*policies: Remat) -> dict[Remat, int]:
    """Saved once by each of these policies."""
    return dict.fromkeys(policies, 1)


MOST, SOME = by("none", "attention", "dots"), by("none", "attention")
