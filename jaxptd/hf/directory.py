"""A Hugging Face directory: `config.json` and safetensors files, whose headers are read first."""

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from jaxptd.data.records import LONGEST, is_pointer
from jaxptd.errors import UserError, install, quoted
from jaxptd.hf import mxfp4
from jaxptd.hf.dims import Tensor
from jaxptd.hf.stored_tensors import StoredTensors
from jaxptd.stores import Place, StorePath, place, read_bytes, size_of

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = ("F64", "F32", "F16", "BF16")
EXTRA = f"needs the safetensors library; {install('hf')}"
AGAIN = "download the directory again"
LARGEST = 2**28  # bytes of a JSON file
AT_A_TIME = 2**22  # elements of a tensor that are compared at a time


def is_directory(path: str | Place) -> bool:
    """True for a directory with a `config.json`, which runs do not have."""
    return size_of(place(path) / CONFIG) is not None


class Directory:
    """A Hugging Face model directory. Only headers are read until a tensor is sliced.

    Args:
        path: of the directory.

    Raises:
        UserError: it is not such a directory, its weights are pickled, or safetensors is missing.
    """

    def __init__(self, path: str | Place) -> None:
        self.path = place(path)
        if not is_directory(path):
            raise UserError(f"{path} has no {CONFIG}; name a directory of a Hugging Face model")

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return read_json(self.path / CONFIG)

    @cached_property
    def _keys(self) -> dict[str, tuple[Any, list[str]]]:
        """Name of each file -> the open file, and the names of its tensors."""
        files = {}
        for name in self.weight_files():
            with _explained(self.path / name):
                file = _safe_open(self.path / name)
                files[name] = file, list(file.keys())
        return files

    @cached_property
    def _open(self) -> dict[str, Any]:
        """Name of each tensor -> the open file that has it, the last one if several do."""
        return {key: file for file, keys in self._keys.values() for key in keys}

    @property
    def has_weights(self) -> bool:
        """False if there is only a `config.json`, which is enough for sizes."""
        return any(map(self._has, (SINGLE, INDEX)))

    def _has(self, name: str) -> bool:
        path = self.path / name
        return size_of(path) is not None if isinstance(path, StorePath) else os.path.lexists(path)

    def weight_files(self) -> list[str]:
        """The names of the files with tensors, in the order in which transformers reads them.

        An index counts only if there is no single file, and only names files.

        Raises:
            UserError: there are none, or they are pickled.
        """
        other = self.config.get("transformers_weights")
        if other not in (None, SINGLE):
            raise UserError(
                f"{self}: transformers_weights={quoted(other)} in {CONFIG}; remove the key, and "
                f"rename its file to {SINGLE}"
            )
        path = self.path / INDEX
        if size_of(self.path / SINGLE) is not None or not self._has(INDEX):
            if not self._has(SINGLE):
                self._refuse_without_tensors()
            return [SINGLE]
        entries = read_json(path).get("weight_map")
        named = list(entries.values()) if isinstance(entries, dict) else []
        if not named or not all(_is_file_name(x) for x in named):
            raise UserError(f"{path} does not name an existing file for each tensor; {AGAIN}")
        return sorted(set(named))

    def remarks(self) -> list[str]:
        """Remarks on files without effect and on duplicate tensors."""
        lines = []
        if self.weight_files() == [SINGLE] and self._has(INDEX):
            lines.append(f"{INDEX} is ignored: {SINGLE} takes precedence, as in transformers")
        names = [key for _, keys in self._keys.values() for key in keys]
        if twice := [key for key, times in Counter(names).items() if times > 1]:
            last = [file for file, (_, keys) in self._keys.items() if twice[0] in keys][-1]
            lines.append(
                f"several files have {quoted(twice[0])}; {quoted(last)} is used, the last "
                "one, as in transformers"
            )
        return lines

    def _refuse_without_tensors(self) -> None:
        if isinstance(self.path, StorePath):
            names = sorted(map(self.path.inside, self.path.store.listing(self.path.key)))
        else:
            names = sorted(os.listdir(self.path))
        if pickled := [name for name in names if name.endswith(PICKLED)]:
            raise UserError(
                f"{self} has its weights only in {quoted(pickled[0])}, a pickle, which can run any "
                "code when read; if you trust it, load it with transformers and write safetensors "
                "with save_pretrained"
            )
        raise UserError(f"{self} has neither {SINGLE} nor {INDEX}; {AGAIN}")

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of all tensors, from the headers; of those in MXFP4, as they are read."""
        names = mxfp4.replaced(self._open, self._pairs)
        packed = {name: list(self._packed(name).unpacked_shape) for name in self._pairs}
        return {name: packed.get(name) or list(self._slice(name).get_shape()) for name in names}

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Precisions of all tensors, in safetensors' words."""
        return {
            name: mxfp4.NAME if name in self._pairs else str(self._slice(name).get_dtype())
            for name in self.shapes
        }

    def tensor(self, name: str) -> Tensor:
        """A tensor; `tensor[slices]` reads these slices from the file.

        Raises:
            UserError: it holds integers or 8-bit numbers.
        """
        if name in self._pairs:
            return self._packed(name)
        if self.dtypes[name] not in DTYPES:
            raise UserError(
                f"{self}: {name} has dtype {self.dtypes[name]}; use weights that are not quantized"
            )
        tensor: Tensor = self._slice(name)
        return tensor

    def are_equal(self, one: str, other: str) -> bool:
        """True if two tensors are equal; reads some rows at a time."""
        if not self.shapes[one] or self.shapes[one] != self.shapes[other]:
            return False
        a, b = self.tensor(one), self.tensor(other)
        return all(np.array_equal(a[each], b[each]) for each in self._pieces(one))

    def not_finite(self, name: str, dtype: Any) -> int:
        """Counts the elements of a tensor that are NaN or infinite in a precision."""
        tensor = self.tensor(name)
        with np.errstate(over="ignore"):
            pieces = (tensor[each].astype(dtype) for each in self._pieces(name))
            return sum(int(np.count_nonzero(~np.isfinite(piece))) for piece in pieces)

    def _pieces(self, name: str) -> Iterator[tuple[slice, ...]]:
        """Slices of some rows at a time."""
        first, *rest = self.shapes[name]
        rows = max(1, AT_A_TIME // max(1, math.prod(rest)))
        for begin in range(0, first, rows):
            yield slice(begin, min(begin + rows, first)), *(slice(None) for _ in rest)

    @cached_property
    def _pairs(self) -> dict[str, tuple[str, str]]:
        """Name of each tensor in MXFP4 -> those of its blocks and scales, if they fit together."""
        return {
            name: pair
            for name, pair in mxfp4.packed_names(self._open).items()
            if mxfp4.fits(
                [self._slice(each).get_shape() for each in pair],
                [str(self._slice(each).get_dtype()) for each in pair],
            )
        }

    def _packed(self, name: str) -> mxfp4.Packed:
        blocks, scales = map(self._slice, self._pairs[name])
        return mxfp4.Packed(blocks, scales, tuple(blocks.get_shape()))

    def _slice(self, name: str) -> Any:
        return self._open[name].get_slice(name)


def _safe_open(path: Place) -> Any:
    if isinstance(path, StorePath):
        return StoredTensors(path)
    try:
        from safetensors import safe_open  # the optional extra
    except ImportError as error:
        raise UserError(f"{path} {EXTRA}") from error
    if not os.path.isfile(path):
        raise UserError(f"{path} is missing or not a regular file; {AGAIN}")
    with open(path, "rb") as file:
        if is_pointer(file.read(LONGEST)):
            raise UserError(f"{path} is a Git LFS pointer; fetch the file itself: git lfs pull")
    return safe_open(path, "np")


@contextlib.contextmanager
def _explained(path: Place) -> Iterator[None]:
    """Turns errors of safetensors and the system into one line."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; {AGAIN}") from error
    except Exception as error:  # SafetensorError is the library's own, without an import
        raise UserError(f"{path} is damaged: {quoted(str(error), 200)}; {AGAIN}") from error


def read_json(path: Place) -> dict[str, Any]:
    """Reads a JSON object. Raises UserError for anything else."""
    with _explained(path):
        if (size := size_of(path)) is None:
            raise UserError(f"{path} is not a regular file; {AGAIN}")
        if size > LARGEST:
            raise UserError(f"{path} has more than {LARGEST} bytes; {AGAIN}")
        content = json.loads(read_bytes(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; {AGAIN}")
    return content


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")
