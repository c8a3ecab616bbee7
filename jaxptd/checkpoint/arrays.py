"""Reading and writing the arrays of a checkpoint; the only file that imports orbax (its v1).

Each process writes the shards on its devices; any number of processes can read them.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxptd.checkpoint.folders import CheckpointError, reason

try:
    from orbax.checkpoint import v1 as ocp
except ImportError:  # where orbax 0.12 still keeps its v1 interface
    from orbax.checkpoint.experimental import v1 as ocp

JOIN_TIMEOUT = 60.0  # seconds to let a write finish after another one failed
TENSORSTORE_PAUSE = 0.5  # seconds for tensorstore's own threads, which cannot be joined
POLL_INTERVAL = 0.25  # seconds between checks for a failed write


class Background:
    """Runs `work` in a daemon thread, started at once.

    The process may exit without `wait`, which ends the work.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxptd-background", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits this many seconds for the work (None: no limit); True once it is done.

        Raises:
            BaseException: what the work raised.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._failure = error


class PendingWrite:
    """Writes arrays in the background; the caller may change or donate them at once.

    Accelerators copy them to the host first. On the CPU orbax keeps a view of each buffer, so a
    step that donates the buffer writes into a copy instead.

    After writing a process's arrays, orbax waits for the other processes and cannot be told that
    one of them failed. So it is held before that wait until `finish` or `abort`.

    Args:
        folder: the folder to create.
        tensors: arrays by name.
    """

    def __init__(self, folder: Path, tensors: dict[str, jax.Array]) -> None:
        self._gate = _Gate(len(tensors))
        context = ocp.Context()
        # Asynchronously, an early failure would leave a coroutine that warns it was never awaited.
        context.asynchronous.create_directories_asynchronously = False
        context.memory.serialization_status_callback = self._gate
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_quiet())
        try:
            with context:
                response = ocp.save_async(folder.absolute(), tensors)
        except BaseException:
            self._clean_up_after_failure()
            raise
        self._writing = Background(response.result)

    def wait_written(self) -> None:
        """Waits until this process's arrays are written. Raises orbax's error if they cannot be."""
        while not self._gate.reached.wait(POLL_INTERVAL):
            if self._writing.wait(0):
                return

    def finish(self) -> None:
        """Completes the folder once `wait_written` returned on all processes. Raises as orbax."""
        self._gate.open.set()
        self._writing.wait()
        self._quiet.close()

    def abort(self) -> None:
        """Returns once all writing has stopped, after a failure on any process."""
        self._gate.aborted = True
        self._gate.open.set()
        try:
            self._writing.wait()
        except Exception:
            self._clean_up_after_failure()

    def _clean_up_after_failure(self) -> None:
        _join_writers()
        self._quiet.__exit__(*sys.exc_info())


class _Gate:
    """Stops orbax after it has written `count` arrays; its SerializationStatusCallback."""

    def __init__(self, count: int) -> None:
        self.reached, self.open, self.aborted = threading.Event(), threading.Event(), False
        self._left = count

    def on_transfer_start(self, _: Any) -> None:
        """Does nothing; orbax requires the method."""

    def on_transfer_end(self, _: Any) -> None:
        """Does nothing; orbax requires the method."""

    def on_write_start(self, _: Any) -> None:
        """Does nothing; orbax requires the method."""

    def on_write_end(self, _: Any) -> None:
        """Blocks after the last array until the gate is open."""
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            self.open.wait()
            if self.aborted:
                raise CheckpointError("aborted")


def load(folder: Path, wanted: dict[str, Any], *, checkpoint: Path) -> dict[str, jax.Array]:
    """Reads the arrays that a `PendingWrite` wrote.

    Args:
        folder: the one that `PendingWrite` created.
        wanted: shape, dtype and sharding (None: the first device) by name.
        checkpoint: the checkpoint's folder, for messages.

    Raises:
        CheckpointError: orbax cannot read them, or JAX does not have the dtype.
    """
    first_device = SingleDeviceSharding(jax.local_devices()[0])
    shardings = {name: getattr(x, "sharding", None) or first_device for name, x in wanted.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in wanted.items()
    }
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # `wanted` may be only a part
    with _quiet(), context:
        try:
            arrays = ocp.load(folder.absolute(), abstract)
        except (
            Exception
        ) as error:  # the files are intact, so it is another orbax version, or too little memory
            raise CheckpointError(
                f"could not read checkpoint {checkpoint}: {reason(error)}"
            ) from error
    for name, x in wanted.items():
        if arrays[name].dtype != x.dtype:
            raise CheckpointError(
                f"checkpoint {checkpoint}: {name} is {x.dtype}, jax made it {arrays[name].dtype}; "
                'call jax.config.update("jax_enable_x64", True)'
            )
    return arrays


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses orbax's log lines: failures raise exceptions, which we print as one line."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    outer_hook = sys.unraisablehook

    def silence(_: logging.LogRecord) -> bool:
        return False

    def hook(unraisable: Any) -> None:  # from a write that ends after orbax gave up
        if str(unraisable.exc_value) != "Event loop is closed":
            outer_hook(unraisable)

    for logger in loggers:
        logger.addFilter(silence)
    sys.unraisablehook = hook
    try:
        yield
        sys.unraisablehook = (
            outer_hook  # left behind after a failure: nothing tells when all writes have ended
        )
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


def _join_writers() -> None:
    """Waits for orbax's threads, which could still write into a folder about to be removed.

    When one write fails, orbax does not wait for the others.
    """
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            with contextlib.suppress(Exception):  # raised by the thread itself
                thread.join(JOIN_TIMEOUT)
    time.sleep(TENSORSTORE_PAUSE)
