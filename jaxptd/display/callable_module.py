"""Modules that are called like the function they are named after: `jaxptd.train(config)`.

`jaxptd.train` has to be two things: the module of `python -m jaxptd.train` and the function. Python
sets the attribute `train` of the package to the module whenever something imports `jaxptd.train`,
so a function of that name would disappear at the first such import. A module that can be called is
both, in any order of imports.
"""

import inspect
import sys
import types
from typing import Any


class _CallableModule(types.ModuleType):
    """A module that calls its function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_function(self))


def callable_module(name: str) -> None:
    """Makes the module of this name call its function: in `jaxptd.verify` the function `verify`."""
    sys.modules[name].__class__ = _CallableModule


def _function(module: types.ModuleType) -> Any:
    return getattr(module, module.__name__.rpartition(".")[2])
