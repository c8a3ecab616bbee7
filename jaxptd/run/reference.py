"""The reference of `model.preference`: what the model that a run begins with says of each pair.

Its log-probabilities are computed once, before the first step, and kept in the run's directory, so
that a resumed run compares with the same model.
"""

import io
import math
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxptd.atomic_files import write_whole
from jaxptd.data import Data, Pairs
from jaxptd.distributed.coordination import first_only
from jaxptd.errors import UserError
from jaxptd.models.decoder import REFERENCE
from jaxptd.models.families import family_of
from jaxptd.run.folder import RunDir, run_dir_errors
from jaxptd.stores import open_binary

if TYPE_CHECKING:
    from jaxptd.api.run import Run

NAME = "reference.npz"


def sets_of_pairs(data: Data) -> Iterator[tuple[str, Pairs]]:
    """Yields the sets of pairs of a run's data, with their names in the file."""
    sets = {"train": data.train, **{f"validation/{k}": x for k, x in data.evaluated.items()}}
    for name, samples in sets.items():
        if isinstance(samples, Pairs):
            yield name, samples


def batches_of(samples: Pairs, size: int) -> int:
    """The number of batches that have all pairs."""
    return math.ceil(samples.windows_per_epoch / size)


def compute(run: "Run", samples: Pairs, *, advance: Callable[[], None]) -> None:
    """Fills in the log-probabilities of all pairs, by the run's model.

    advance: called after each batch.
    """
    program, params = run.program, run.arrays["params"]
    family, size = family_of(program.config.model), program.config.train.global_batch_size
    end_of_document, programs = run.tokenizer.end_of_document, run.programs

    def rows_of(first: int, field: str, numbers: np.ndarray) -> np.ndarray:
        if field == REFERENCE:
            return np.zeros((len(numbers), samples.seq_length))
        return family.rows(samples, field, first + numbers, end_of_document=end_of_document)

    for first in range(0, samples.windows_per_epoch, size):
        batch = program.batches.read(partial(rows_of, first))
        function = program.log_probabilities
        with programs.ready("log_probabilities", function, params, batch) as log_probabilities:
            sums_BK = np.asarray(log_probabilities(params, batch))
        for row in range(min(size, samples.windows_per_epoch - first)):
            samples.put_scores(first + row, sums_BK[row])
        advance()


@first_only
def write(run_dir: RunDir, data: Data) -> None:
    """Writes the log-probabilities of all pairs into the run's directory."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{name: x.scores for name, x in sets_of_pairs(data)})
    write_whole({run_dir.path / NAME: file.getvalue()}, lambda _: run_dir_errors(run_dir.path))
    run_dir.publish()


def require(run_dir: RunDir, data: Data) -> None:
    """Raises UserError if the directory of a run that goes on has no log-probabilities of pairs."""
    if dict(sets_of_pairs(data)) and not read(run_dir, data):
        raise UserError(
            f"{run_dir.where / NAME} is missing: it has the log-probabilities of the model that "
            "the run began with; put it back, or begin again in another train.run_dir"
        )


def read(run_dir: RunDir, data: Data) -> bool:
    """Fills in the log-probabilities that a run has kept; False if there are none.

    Raises:
        UserError: they cannot be read, or are of other pairs.
    """
    if not dict(sets_of_pairs(data)):
        return False
    where = run_dir.where / NAME
    try:
        with open_binary(where) as opened:
            content = io.BytesIO(opened.read())
        with np.load(content, allow_pickle=False) as file:
            kept = {name: file[name] for name in file.files}
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{where} cannot be read ({error}); put the run's own file back") from error
    for name, samples in sets_of_pairs(data):
        scores = kept.get(name)
        if scores is None or scores.shape != samples.scores.shape or not np.isfinite(scores).all():
            raise UserError(f"{where} is of other pairs than data.source; put the run's own back")
        samples.scores[:] = scores
    return True
