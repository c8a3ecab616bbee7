"""The arrays of a checkpoint, in one folder, by orbax. The only file that imports it (its v1).

Each process writes the parts that lie on its devices; any number of processes reads them again.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxptd.checkpoint.background import Background
from jaxptd.checkpoint.manifest import CheckpointError, reason

try:
    from orbax.checkpoint import v1 as ocp
except ImportError:  # orbax 0.12 still keeps its v1 interface here
    from orbax.checkpoint.experimental import v1 as ocp

PATIENCE = 60.0  # seconds that a write may still take after another one failed
SETTLE = 0.5  # seconds for tensorstore's own threads, which cannot be waited for
LOOK = 0.25  # seconds between looks whether a write has failed


class ArraysBeingWritten:
    """Arrays on their way to the disk. The caller may change or donate them from here on.

    On accelerators they have been copied to the host. On the CPU orbax's view of a buffer is what
    keeps JAX from writing into it: a step that wants to copies it first.

    Once a process's arrays are written, orbax waits for the other processes, and could not be told
    that one of them failed. So it is held before that until `end` or `give_up`.

    Args:
        path: the folder to make.
        tensors: arrays by name.
    """

    def __init__(self, path: Path, tensors: dict[str, jax.Array]) -> None:
        self._gate = _Gate(len(tensors))
        context = ocp.Context()
        # At once: later, an early failure leaves a coroutine that warns of not being awaited.
        context.asynchronous.create_directories_asynchronously = False
        context.memory.serialization_status_callback = self._gate
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_quiet())
        try:
            with context:
                response = ocp.save_async(path.absolute(), tensors)
        except BaseException:
            self._end_after_failure()
            raise
        self._writing = Background(response.result)

    def wait(self) -> None:
        """Waits until this process's arrays are written. Raises what orbax does if they cannot."""
        while not self._gate.reached.wait(LOOK):
            if self._writing.wait(0):
                return

    def end(self) -> None:
        """After all processes' `wait`: finishes the folder. Raises what orbax does."""
        self._gate.open.set()
        self._writing.wait()
        self._quiet.close()

    def give_up(self) -> None:
        """After a failure, here or elsewhere: nothing is being written any more."""
        self._gate.given_up = True
        self._gate.open.set()
        try:
            self._writing.wait()
        except Exception:
            self._end_after_failure()

    def _end_after_failure(self) -> None:
        _wait_for_writers()
        self._quiet.__exit__(*sys.exc_info())


class _Gate:
    """Holds orbax once it has written `left` arrays: its SerializationStatusCallback."""

    def __init__(self, left: int) -> None:
        self.reached, self.open, self.given_up = threading.Event(), threading.Event(), False
        self._left = left

    def on_transfer_start(self, _: Any) -> None:
        """Nothing to do."""

    def on_transfer_end(self, _: Any) -> None:
        """Nothing to do."""

    def on_write_start(self, _: Any) -> None:
        """Nothing to do."""

    def on_write_end(self, _: Any) -> None:
        """An array is written."""
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            self.open.wait()
            if self.given_up:
                raise CheckpointError("given up")


def load(folder: Path, wanted: dict[str, Any], *, of: Path) -> dict[str, jax.Array]:
    """The arrays in a folder.

    Args:
        folder: what `ArraysBeingWritten` made.
        wanted: shape, dtype and sharding (none: the first device) by name.
        of: the checkpoint, for messages.

    Raises:
        CheckpointError: orbax cannot read it, or JAX has no such dtype.
    """
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    shardings = {name: getattr(x, "sharding", None) or first_device for name, x in wanted.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in wanted.items()
    }
    with _quiet():
        try:
            arrays = ocp.load(folder.absolute(), abstract)
        except Exception as error:  # its files are whole: another orbax, too little memory
            raise CheckpointError(f"could not read checkpoint {of}: {reason(error)}") from error
    for name, x in wanted.items():
        if arrays[name].dtype != x.dtype:
            raise CheckpointError(
                f"checkpoint {of}: {name} is {x.dtype}, jax made it {arrays[name].dtype}; "
                'call jax.config.update("jax_enable_x64", True)'
            )
    return arrays


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No lines on the console from orbax: what matters is an exception, then one line of ours."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    outer_hook = sys.unraisablehook

    def silence(_: logging.LogRecord) -> bool:
        return False

    def hook(unraisable: Any) -> None:  # a write that ends after orbax gave up on all of them
        if str(unraisable.exc_value) != "Event loop is closed":
            outer_hook(unraisable)

    for logger in loggers:
        logger.addFilter(silence)
    sys.unraisablehook = hook
    try:
        yield
        sys.unraisablehook = outer_hook  # but after a failure it stays: nothing says when all ended
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


def _wait_for_writers() -> None:
    """When one write fails orbax leaves the others behind, to write into what is removed next."""
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            with contextlib.suppress(Exception):  # its own
                thread.join(PATIENCE)
    time.sleep(SETTLE)
