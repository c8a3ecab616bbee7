"""Adapters of a run, merged into the matrices that they are beside."""

import dataclasses
import itertools

import numpy as np

from jaxptd.config import Config
from jaxptd.config.lora import INSIDE
from jaxptd.layout import Layout
from jaxptd.models.stages import parameter_infos
from jaxptd.run.saved import SavedParams
from jaxptd.stores import Place


def letters_of(config: Config) -> dict[str, str]:
    """The letters of the dims of adapters, by their names, as in `ParamShape.matrix`."""
    infos = parameter_infos(dataclasses.replace(config, layout=Layout()))
    return {name: info.matrix for name, info in infos.items() if INSIDE in name}


def merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, *, matrix: str, scale: float) -> np.ndarray:
    """W + scale A B of each layer and each separate matrix, in w's precision.

    Args:
        w: `[L, *rows, *parts, *columns]`, without L in a layer that is in no stack.
        a: `[L, *rows, *parts, R]`.
        b: `[L, R, *parts, *columns]`.
        matrix: a letter for each dim of a, as in `ParamShape`.
        scale: of the adapter.
    """
    stack = matrix.startswith("s")
    rows, parts = matrix.count("r"), matrix.count("s") - stack
    letters = iter("abcdefghijklmnopqrstuvwxy")
    of_stack, of_rows, of_parts, of_columns = (
        "".join(itertools.islice(letters, number))
        for number in (int(stack), rows, parts, w.ndim - stack - rows - parts)
    )
    first, second = f"{of_stack}{of_rows}{of_parts}z", f"{of_stack}z{of_parts}{of_columns}"
    terms = f"{first},{second}->{of_stack}{of_rows}{of_parts}{of_columns}"
    wide = (x.astype(np.float64) for x in (a, b))
    return (w + scale * np.einsum(terms, *wide)).astype(w.dtype)


class MergedParams(SavedParams):
    """The parameters of a run, its adapters merged: those of its model without adapters.

    Arguments and errors as of `SavedParams`.
    """

    def __init__(self, run_dir: Place, *, ema: bool = False) -> None:
        super().__init__(run_dir, ema=ema)
        self._letters = letters_of(self.config)
        self._lora, model = self.config.model.lora, self.config.model
        self.config = dataclasses.replace(self.config, model=dataclasses.replace(model, lora=None))
        self.shapes = {name: x for name, x in self.shapes.items() if INSIDE not in name}

    def read(self, name: str) -> np.ndarray:
        w, linear = super().read(name), name.removesuffix(".w")
        first, second = (f"{linear}{INSIDE}{each}" for each in "ab")
        if self._lora is None or first not in self._letters:
            return w
        pair = super().read(first), super().read(second)
        return merged(w, *pair, matrix=self._letters[first], scale=self._lora.scale)
