"""A directory of Hugging Face's: `config.json` and safetensors, whose headers are read first."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxptd.errors import UserError, quoted
from jaxptd.hf.dims import Tensor

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = ("F64", "F32", "F16", "BF16")
EXTRA = "needs the safetensors library; pip install 'jaxptd[hf]'"
AGAIN = "download the directory again"
LARGEST = 2**28  # bytes of a JSON file
AT_A_TIME = 2**22  # numbers of a tensor that are compared


def is_directory(path: str | Path) -> bool:
    """True for a directory with a `config.json`, which a run does not have."""
    return os.path.isfile(Path(path) / CONFIG)


class Directory:
    """A directory of Hugging Face's. Reads headers only, until a tensor is asked for slices.

    Args:
        path: of the directory.

    Raises:
        UserError: it is no such directory, its weights are pickled, or safetensors is missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_directory(path):
            raise UserError(f"{path} has no {CONFIG}; name a directory of a Hugging Face model")

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return read_json(self.path / CONFIG)

    @cached_property
    def _open(self) -> dict[str, Any]:
        """Name of each tensor -> the open file that has it, of several the last one."""
        found: dict[str, Any] = {}
        for name in self._files:
            with _explained(self.path / name):
                file = _safe_open(self.path / name)
                found |= dict.fromkeys(file.keys(), file)
        return found

    @property
    def _files(self) -> list[str]:
        """The names of the files with tensors, as transformers chooses them.

        The index beside a single file is not read; of an index all tensors of all its files are
        there, and the last file that has one counts, whichever the index names.
        Source: transformers 5.24, `_get_resolved_checkpoint_files`, `_load_pretrained_model`.
        """
        if os.path.lexists(self.path / SINGLE):
            return [SINGLE]
        path = self.path / INDEX
        if not os.path.lexists(path):
            self._refuse_without_tensors()
        entries = read_json(path).get("weight_map")
        names = list(entries.values()) if isinstance(entries, dict) else []
        if not names or not all(map(_is_file_name, names)):
            raise UserError(f"{path} does not name a file beside it for each tensor; {AGAIN}")
        return sorted(set(names))

    def _refuse_without_tensors(self) -> NoReturn:
        names = sorted(os.listdir(self.path))
        if pickled := [name for name in names if name.endswith(PICKLED)]:
            raise UserError(
                f"{self} has its weights in {quoted(pickled[0])} only, a pickle, which may run any "
                "code when it is read; load it with transformers where you trust it, and "
                "save_pretrained writes safetensors"
            )
        raise UserError(f"{self} has neither {SINGLE} nor {INDEX}; {AGAIN}")

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of all tensors, from the headers."""
        return {name: list(self._slice(name).get_shape()) for name in self._open}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Precisions of all tensors, in safetensors' words."""
        return {name: str(self._slice(name).get_dtype()) for name in self._open}

    def tensor(self, name: str) -> Tensor:
        """A tensor; `tensor[slices]` reads these slices from the file.

        Raises:
            UserError: it is of integers or 8-bit numbers.
        """
        if self.dtypes[name] not in DTYPES:
            raise UserError(
                f"{self}: {name} is of {self.dtypes[name]}; use weights that are not quantized"
            )
        tensor: Tensor = self._slice(name)
        return tensor

    def are_equal(self, one: str, other: str) -> bool:
        """True if two tensors have the same numbers; reads some rows at a time."""
        size = self.shapes[one]
        if not size or size != self.shapes[other]:
            return False
        a, b = self.tensor(one), self.tensor(other)
        rows = max(1, AT_A_TIME // max(1, math.prod(size[1:])))
        pieces = (slice(begin, min(begin + rows, size[0])) for begin in range(0, size[0], rows))
        others = (slice(None),) * (len(size) - 1)
        return all(np.array_equal(a[(each, *others)], b[(each, *others)]) for each in pieces)

    def _slice(self, name: str) -> Any:
        return self._open[name].get_slice(name)


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import safe_open  # the optional extra
    except ImportError as error:
        raise UserError(f"{path} {EXTRA}") from error
    if not os.path.isfile(path):
        raise UserError(f"{path} is missing, or no regular file; {AGAIN}")
    return safe_open(path, "np")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Inside, what safetensors and the system raise is one line."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {AGAIN}") from error
    except Exception as error:  # SafetensorError is the library's own, without an import
        raise UserError(f"{path} is damaged: {quoted(str(error), 200)}; {AGAIN}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError for anything else."""
    with _explained(path):
        if not os.path.isfile(path):
            raise UserError(f"{path} is no regular file; {AGAIN}")
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path} has more than {LARGEST} bytes; {AGAIN}")
        found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise UserError(f"{path} is no JSON object; {AGAIN}")
    return found


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
