"""The folders of a run's checkpoints: which there are, and how one comes, is replaced and goes.

See checkpoint.py for their names. In a run of many processes only the first one changes anything.
"""

import os
import re
from pathlib import Path

from jaxptd.checkpoint import manifest as files
from jaxptd.checkpoint.manifest import CheckpointError, reason


class Folders:
    """One folder a step, in `directory`, which need not be there yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)

    def all(self) -> dict[int, Path]:
        """Folder of each step, complete or not, ascending."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(
                f"cannot look for checkpoints in {self.directory}: {reason(error)}"
            ) from error
        found = {}
        for name in sorted(names):  # "." sorts first: once there is a new step, that one counts
            match = re.fullmatch(rf"({files.STEP})|\.({files.STEP})\.replaced", name)
            if match and (self.directory / name).is_dir():
                found[int(match[1] or match[2])] = self.directory / name
        return dict(sorted(found.items()))

    def folder(self, step: int) -> Path:
        """Raises CheckpointError if there is none."""
        folders = self.all()
        if step not in folders:
            there = f"it has steps {', '.join(map(str, folders))}" if folders else "it has none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; {there}")
        return folders[step]

    def partial(self, step: int) -> Path:
        """Where a step is written and deleted: it does not count."""
        return self._hidden(step, "partial")

    def make_partial(self, step: int) -> None:
        """An empty folder to write a step into; what a killed save left goes first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        self.partial(step).mkdir()

    def move_into_place(self, step: int) -> None:
        """Makes the folder that was written count, instead of an older one of this step."""
        final, replaced = self._final(step), self._hidden(step, "replaced")
        if final.exists():
            final.rename(replaced)  # a folder cannot be renamed onto one that is not empty
        self.partial(step).rename(final)
        files.sync_folder(self.directory)
        files.remove(replaced)

    def delete(self, step: int) -> None:
        """Raises OSError if the folder cannot be moved aside."""
        doomed = self.partial(step)
        self._final(step).rename(doomed)  # killed while deleting, it does not look damaged
        files.remove(doomed)

    def set_aside(self, step: int) -> Path:
        """Renames a step so that it does not count any more; its new name.

        Raises:
            OSError: it cannot be renamed.
        """
        aside = self.directory / f"{step:08d}.aside"
        number = 1
        while aside.exists():
            number += 1
            aside = self.directory / f"{step:08d}.aside{number}"
        self.folder(step).rename(aside)
        return aside

    def _final(self, step: int) -> Path:
        return self.directory / f"{step:08d}"

    def _hidden(self, step: int, kind: str) -> Path:
        return self.directory / f".{step:08d}.{kind}"

    def _clear_leftovers(self) -> None:
        """Removes what a killed save left; a step that lost its place to nothing gets it back."""
        for path in self.directory.iterdir():
            match = re.fullmatch(rf"\.({files.STEP})\.(partial|replaced)", path.name)
            if match and match[2] == "replaced" and not self._final(int(match[1])).exists():
                path.rename(self._final(int(match[1])))
            elif match:
                files.remove(path)
