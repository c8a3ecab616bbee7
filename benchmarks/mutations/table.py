"""The mutations: a place in the code, what replaces it, and who must notice.

They are in `rows/`, by area and file:

    jaxptd/collectives.py:
    - name: reduce_from sums nothing
      in reduce_from: lax.psum(x, axis) => lax.pmax(x, axis)
      tests: tests/test_collectives.py -k reduce
      detect: {kind: SUM_FORWARD, cases: [TP]}

`in` is followed by a definition's name, or by `module`. The value is the pattern of a place in it
and what replaces it (`matching.Change`), or a list of these, applied in order. `given` is a pattern
of another place, for names. All detectors look for a row with `detect`; for other rows, only the
tests do. A row with `each` stands for several: each key there replaces the word EACH, and its value
is the case.
"""

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.mutations.matching import Change, changed, code_of
from jaxptd.errors import UserError

ROOT = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "rows"
CASES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())


class Reach(StrEnum):
    """Where a mutation shows."""

    LAYOUT = "layout"  # one device computes the right step
    BOTH = "both"  # one device computes the same wrong step, so comparing with it shows nothing
    RUN = "run"  # no step changes: data, checkpoints, evaluation


class Kind(StrEnum):
    """What a mutation does."""

    SUM_FORWARD = "a forward sum over an axis, dropped or doubled"
    SUM_BACKWARD = "a backward sum over an axis, dropped or doubled"
    RING = "a ring reversed, a hop missing, the wrong source block"
    STAGE = "a permute off by one stage"
    OWED = "a pending sum that misses an axis"
    TIED = "a tied weight's gradient counted once"
    COUNT = "a loss divided by the wrong count"
    DROPOUT = "dropout from local counters"
    ORDER = "zigzag order in only one place"
    MASK = "a mask off by one"
    DOCUMENTS = "segments not gathered"
    STALE = "stale parameters under ZeRO"
    SHARD = "a wrong offset of a shard"
    MICRO_BATCHES = "double reduction with micro-batches"
    NORM = "a norm without other devices' elements"
    ROWS = "the wrong layers in a chunk"
    ACTIVATION = "the activation of the wrong micro-batch"
    STATE = "optimizer state of another shard"
    SCALE = "the scale of float16 not undone"
    CLIP = "clipping by a local norm"
    GRID = "panels of a grid: SUMMA, Cannon, Fox, slices"
    COLLECTIVE_MATMUL = "steps of a collective matmul"
    VOCABULARY = "shards of the vocabulary"
    HEADS = "heads of another device"
    FAMILY = "specifics of a family: T5, BERT, Llama"
    OFFLOAD = "offload and recomputation"
    OPTIMIZER = "optimizers of whole matrices: Muon, Adafactor"
    PADDING = "padding of sequences and heads"
    EIGHT_BITS = "8-bit matmuls"
    CHECKPOINT = "rows of a checkpoint permuted, pieces in the wrong place"
    DATA = "the data cursor off by one"
    EVALUATION = "an evaluation counted twice"


class Mutation(NamedTuple):
    """A mutation.

    name: the bug that it introduces.
    file: the file that it changes.
    changes: its changes, in order.
    tests: files and folders of tests that must notice it.
    select: pytest's -k, or empty.
    kind: what it does; if None, only the tests look for it.
    cases: layouts and options of the tiny config in which a step is wrong; empty if no step is.
    reach: where it shows.
    explained: if it changes nothing, why.
    """

    name: str
    file: str
    changes: tuple[Change, ...]
    tests: str
    select: str = ""
    kind: Kind | None = None
    cases: tuple[str, ...] = ()
    reach: Reach = Reach.LAYOUT
    explained: str = ""

    def made(self, text: str) -> str:
        """Returns the file's text with the bug.

        Raises:
            UserError: the place does not exist exactly once.
        """
        try:
            for change in self.changes:
                text = (
                    changed(text, change) if self.file.endswith(".py") else _replaced(text, change)
                )
        except UserError as error:
            raise UserError(f"{self.name}: {self.file}: {error}; correct the row") from None
        return text

    def difference(self, text: str) -> list[list[str]]:
        """The differing parts of changed definitions, before and after; findings depend on them.

        text: the file's text without the bug.
        """
        both = []
        for each in (text, self.made(text)):
            parts = each.splitlines()
            if self.file.endswith(".py"):
                wheres = dict.fromkeys(change.where for change in self.changes)
                parts = [part for where in wheres for part in code_of(each).parts(where)]
            both.append(parts)
        before, after = both
        return [[x for x in before if x not in after], [x for x in after if x not in before]]


def _replaced(text: str, change: Change) -> str:
    """The text of a file that is not Python, which must contain the old text exactly once."""
    if (found := text.count(change.old)) != 1:
        raise UserError(f"the file has {change.old!r} {found} times, not once")
    return text.replace(change.old, change.new)


@cache
def mutations() -> tuple[Mutation, ...]:
    """All mutations, by area."""
    return tuple(row for path in sorted(ROWS.glob("*.yaml")) for row in read(path.read_text()))


def read(text: str) -> Iterator[Mutation]:
    """The mutations in the text of one of the files in `rows/`."""
    for file, rows in yaml.load(text, yaml.BaseLoader).items():  # all values are words
        for row in rows:
            for word, case in row.pop("each", {"": ""}).items():
                yield _mutation(file, **_filled(row, word), case=case)


def _filled(value: Any, word: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, word) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, word) for each in value]
    return value.replace("EACH", word) if word else value


def _mutation(
    file: str,
    *,
    name: str,
    tests: str,
    given: str = "",
    detect: dict[str, Any] | None = None,
    case: str = "",
    **places: str | list[str],
) -> Mutation:
    paths, _, select = tests.partition(" -k ")
    more = detect or {}
    return Mutation(
        name=name,
        file=file,
        changes=tuple(_changes(name, places, given)),
        tests=paths,
        select=select,
        kind=Kind[more["kind"]] if more else None,
        cases=tuple(options(each) for each in (*more.get("cases", ()), case) if each),
        reach=Reach[more.get("reach", "LAYOUT")],
        explained=more.get("explained", ""),
    )


def options(case: str) -> str:
    """The options of a case on top of `probe.TINY`, with names from `cases.yaml` replaced."""
    return " ".join(options(CASES[word]) if word in CASES else word for word in case.split())


def _changes(name: str, places: dict[str, str | list[str]], given: str) -> Iterator[Change]:
    for key, texts in places.items():
        if not key.startswith("in "):
            raise UserError(f"{name}: a row has no {key}; see benchmarks/mutations/table.py")
        for text in [texts] if isinstance(texts, str) else texts:
            if text.count("=>") != 1:
                raise UserError(f"{name}: write OLD => NEW, not {text!r}")
            where, (old, new) = key.removeprefix("in "), text.split("=>")
            yield Change("" if where == "module" else where, old.strip(), new.strip(), given)
