"""Token files that change while a run reads them.

Where a file was truncated, its mapping has no pages any more: to read there ends the process with
SIGBUS, without a message. So the size is looked at before each read.
"""

import contextlib
import os

import numpy as np

from jaxptd.data.concatenated import Concatenated, whole
from jaxptd.errors import UserError


class MappedFiles:
    """The files that an array of tokens maps, as they were when this object was made.

    A file that is deleted or replaced is no error: its mapping keeps the ids.
    """

    def __init__(self, tokens: np.ndarray | Concatenated) -> None:
        self._found = {id(each): _stat(each) for each in _maps(tokens)}

    def check(self, tokens: np.ndarray | Concatenated) -> None:
        """Raises UserError if a file that these tokens map, a part of all, has changed."""
        for each in _maps(tokens):
            if _changed(each, self._found[id(each)]):
                raise UserError(
                    f"data.source: {each.filename} was changed while the run read it; put the "
                    "file back as it was, and start the run again"
                )


def _maps(tokens: np.ndarray | Concatenated) -> list[np.memmap]:
    """The mappings of whole files that an array is part of."""
    arrays = tokens.arrays if isinstance(tokens, Concatenated) else (tokens,)
    return [whole(array) for array in arrays if isinstance(array, np.memmap)]


def _changed(mapped: np.memmap, before: os.stat_result | None) -> bool:
    """True if a file is shorter than its mapping, or was written to."""
    try:
        if mapped._mmap.size() < mapped.nbytes:  # type: ignore[attr-defined]
            return True
    except OSError:  # deleted on another host of a network file system
        return True
    now = _stat(mapped)
    if now is None or before is None or not os.path.samestat(now, before):
        return False
    return (now.st_mtime_ns, now.st_size) != (before.st_mtime_ns, before.st_size)


def _stat(mapped: np.memmap) -> os.stat_result | None:
    """The state of the file at a mapping's path, by now perhaps another file; None without one."""
    with contextlib.suppress(OSError):
        return os.stat(str(mapped.filename))
    return None
