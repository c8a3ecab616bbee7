"""A compiled step that also takes batches of numpy arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxptd.errors import UserError
from jaxptd.step.batch import Batch


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledStep:
    """A jitted function of arrays and a batch; has its methods, `lower` and `trace`, too.

    Args:
        jitted: (arrays, batch on devices) -> anything.
        place: checks a batch of numpy arrays, in text order, and puts it on the mesh.
        check: raises UserError if arrays are not those that the step takes; called when it fails.
    """

    jitted: Any
    place: Callable[[Mapping[str, np.ndarray]], Batch]
    check: Callable[[Any], object] = lambda arrays: None

    def __call__(self, arrays: Any, batch: Mapping[str, Any]) -> Any:
        """Runs the step; a batch of numpy arrays is placed first.

        Raises:
            UserError: the batch is not one that the config has, or the arrays not the program's.
        """
        is_dict = isinstance(batch, Mapping)
        on_host = [isinstance(x, np.ndarray) for x in batch.values()] if is_dict else [True]
        if any(on_host) and not all(on_host):
            raise UserError("a batch mixes numpy arrays with others; use Program.place for all")
        return self._run(arrays, self.place(batch) if any(on_host) else batch)

    def _run(self, arrays: Any, batch: Mapping[str, Any]) -> Any:
        try:
            return self.jitted(arrays, batch)
        except UserError:
            raise
        except (TypeError, ValueError, LookupError, OverflowError):
            self.check(arrays)
            raise
        except RuntimeError as error:
            if "deleted" in str(error):  # else an error of the devices, as memory that ran out
                self.check(arrays)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)
