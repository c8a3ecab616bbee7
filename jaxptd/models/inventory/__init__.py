"""The parts of a model, by which bytes, memory and FLOPs are counted."""

from jaxptd.models.inventory.parts import MLP, Attention, Head, Inventory, Pair, Stack, Table
from jaxptd.vision.inventory import ImageEnds, Resampling, Windows

__all__ = [
    "MLP",
    "Attention",
    "Head",
    "ImageEnds",
    "Inventory",
    "Pair",
    "Resampling",
    "Stack",
    "Table",
    "Windows",
]
