"""Draws random cases from the values of all fields, so that pairs of values meet early.

A case begins with a pair of values that has not met yet, and random values for all other fields.
If the config is refused, a field that the error names is drawn again until the config is accepted;
thus nothing here knows what a layout divides. Four consecutive cases have the same model, batch and
optimizer, and share the step of one device.
"""

import dataclasses
import itertools
import math
import multiprocessing
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxptd.config import Config, from_dict, nested
from jaxptd.config.effects import without_effect
from jaxptd.errors import UserError
from jaxptd.layout import Axis
from jaxptd.models.families import family_of
from jaxptd.models.stages import make_plan
from jaxptd.proof.compare import table_file
from jaxptd.proof.values import (
    DRAWN,
    FIXED,
    HOW,
    OWN,
    UNEVEN,
    Values,
    has_field,
    of_section,
    plain,
    small,
)

# ---- a case: values of fields, and the config that they make -------------------------------------

_FIELD = re.compile(r"\b(?:model|layout|data|optimizer|train)(?:\.[a-z0-9_]+)+")
_NUMBER = re.compile(r"(?<![A-Za-z_])\d+(?:\.\d+)?(?:e-?\d+)?")
FACTOR = 3.0  # of the learning rate, in `optimizer.rates`
_PARTS: Mapping[str, int] = {"interleaved": 2, "zb-v": 2, "own-v.csv": 2}  # of each stage


def made(values: Values, folder: Path) -> Config:
    """The config of a case that its layout can train.

    Args:
        values: of every drawn field.
        folder: where schedule tables are written.

    Raises:
        UserError: the config is refused.
    """
    fields = {**FIXED, **small(values)}
    if fields["layout.schedule"] in OWN and fields["layout.pp"] > 1:
        fields["layout.schedule"] = str(
            table_file(
                folder,
                fields["layout.schedule"],
                stages=fields["layout.pp"],
                micro_batches=fields["train.micro_batches"],
            )
        )
    if fields["layout.stage_layers"] == UNEVEN:
        fields["layout.stage_layers"] = uneven(values)
    if pattern := fields["optimizer.rates"]:
        fields["optimizer.rates"] = {pattern: FACTOR}
    config = from_dict(nested(fields))
    family_of(config.model).check(config)
    if config.layout.pp > 1:
        make_plan(config)
    return config


def uneven(values: Values) -> tuple[int, ...]:
    """A random number of layers for each part of the model."""
    layers, decoders = values["model.num_layers"], 0
    if values["model.family"] == "t5":
        decoders = values["model.encoder_decoder.num_layers"] or layers
    chunks = values["layout.virtual_stages"] or _PARTS.get(values["layout.schedule"], 1)
    parts, layers = values["layout.pp"] * chunks, layers + decoders
    draw = random.Random(f"{parts} {layers}")
    cuts = sorted(draw.sample(range(1, layers), parts - 1)) if parts <= layers else []
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def named(sentence: str) -> list[str]:
    """The drawn fields that an error names, each once."""
    fields = dict.fromkeys(_FIELD.findall(sentence))
    return [name for name in fields if name in DRAWN]


def without_effect_of(config: Config) -> Iterator[str]:
    """Yields a sentence for each drawn field without effect."""
    for sentence in without_effect(config.model, config.layout):
        if named(sentence):
            yield sentence


def general(sentence: str) -> str:
    """An error without its numbers and lists, to count errors of the same kind."""
    short = re.sub(r"\S+/", "", re.sub(r"\([\d, ]+\)", "(...)", sentence))
    return _NUMBER.sub("N", short)


def try_made(values: Values, folder: Path) -> Config | str:
    """The config of a case, or the error that refuses it."""
    try:
        return made(values, folder)
    except UserError as error:
        return str(error)


# ---- several processes at once, which add to one record ------------------------------------------

SHARED = 4  # cases in a row with the same step on one device


@dataclasses.dataclass(frozen=True)
class Share:
    """Every K-th group of cases that share the step of one device.

    Args:
        number: of the share, from 0.
        of: K, the number of shares.
    """

    number: int = 0
    of: int = 1

    def has(self, case: int) -> bool:
        """True for the numbers of this share's cases."""
        return case // SHARED % self.of == self.number


def run_in_processes(work: Callable[..., None], count: int, *given: Any) -> list[int]:
    """Calls `work(Share, *given)` for each share in a new process; returns the exit codes.

    A process that a signal ended has the signal's negative number.

    Args:
        work: a module-level function, which the processes import.
        count: number of processes.
        given: the same for all.
    """
    context = multiprocessing.get_context("spawn")  # forking a process with threads may hang
    shares = [Share(number, count) for number in range(count)]
    processes = [context.Process(target=work, args=(share, *given)) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode or 0 for process in processes]


# ---- pairs of values of two fields: which of them have met in a case -----------------------------

Level = tuple[str, Any]  # a field and its value
Pair = tuple[Level, Level]


class Pairs:
    """The pairs of values that have met, and those that no config can have.

    Args:
        draw: orders the pairs to look for.
    """

    def __init__(self, draw: random.Random) -> None:
        self.open = _all_pairs()
        draw.shuffle(self.open)
        self.met: set[Pair] = set()
        self.refused: set[Pair] = set()

    @cached_property
    def number(self) -> int:
        """The total number of pairs."""
        return len(_all_pairs())

    def counts(self) -> dict[str, int]:
        """The pairs that have met, out of how many, and those for which no config was found."""
        refused = len(self.refused)
        return {"met": len(self.met), "of": self.number - refused, "refused": refused}

    def new(self, values: Values) -> int:
        """The number of pairs of a case that have not met yet."""
        return sum(pair not in self.met for pair in pairs_of(values))

    def add(self, values: Values) -> None:
        """Counts the pairs of a case."""
        self.met.update(pairs_of(values))
        self.refused -= self.met

    def next(self, kept: Values) -> Pair | None:
        """A pair that has not met and contradicts no value of `kept`; None if there is none."""
        self.open = [pair for pair in self.open if pair not in self.met]
        for pair in self.open:
            if pair not in self.refused and all(kept.get(n, v) == v for n, v in pair):
                return pair
        return None


def pairs_of(values: Values) -> Iterator[Pair]:
    """Every pair of two values of a case, in the order of `DRAWN`."""
    return itertools.combinations([(name, values[name]) for name in DRAWN], 2)


def _all_pairs() -> list[Pair]:
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(DRAWN, 2)
        for x in DRAWN[a]
        for y in DRAWN[b]
    ]


# ---- drawing cases -------------------------------------------------------------------------------

CANDIDATES = 2  # accepted candidates, among which the one with most new pairs wins
TRIES = 60  # redraws before giving up a pair
SET = 0.6  # share of options with a random value, of a layout and of sections of a model
TARGETS = 2  # pairs to try for a case before drawing it without one
_AXES = tuple(f"layout.{axis}" for axis in Axis)
# ep meets routers in few of the families; what follows needs other options, and is often redrawn.
_OFTEN = (*_AXES, "layout.ep", "layout.ep", "layout.replicas", "layout.ulysses")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case that was drawn.

    Args:
        number: from 0.
        values: of every drawn field.
        config: the config they make.
        refused: the errors that refused earlier draws.
    """

    number: int
    values: Values
    config: Config
    refused: tuple[str, ...]


class Draws:
    """Draws the cases of a seed, one after the other.

    Args:
        seed: of all cases.
        devices: largest number of devices in a layout.
        folder: for schedule tables.
    """

    def __init__(self, seed: int, devices: int, folder: Path) -> None:
        self._draw = random.Random(f"{seed} {devices}")
        self.pairs = Pairs(self._draw)
        self._devices, self._folder = devices, folder

    def __iter__(self) -> Iterator[Case]:
        model: Values = {}
        for number in itertools.count():
            if number % SHARED == 0:
                model = {}
            case = self._next(number, model)
            model = {name: x for name, x in case.values.items() if name not in HOW}
            self.pairs.add(case.values)
            yield case

    def _next(self, number: int, kept: Values) -> Case:
        """The candidate with the most new pairs, among those that begin with a new one."""
        for _ in range(TARGETS):
            pair = self.pairs.next(kept)
            if pair is None:
                break
            drawn = [self._accepted(number, {**kept, **dict(pair)}) for _ in range(CANDIDATES)]
            if cases := [case for case in drawn if case]:
                return max(cases, key=lambda case: self.pairs.new(case.values))
            if not kept:
                self.pairs.refused.add(pair)
        while True:
            if case := self._accepted(number, kept) or self._accepted(number, {}):
                return case

    def _accepted(self, number: int, pinned: Values) -> Case | None:
        """Draws values again until a config is accepted; None if that takes too long."""
        drawn = {**self._others(), **self._layout(), **pinned}
        refused: dict[str, None] = {}
        for _ in range(TRIES):
            values = _of_family(drawn, pinned)
            sentence: str | None = " ".join(_AXES)
            if 1 < self._size(values) <= self._devices:
                config = try_made(values, self._folder)
                if isinstance(config, str):
                    sentence = config
                    refused[config] = None
                else:
                    sentence = next(without_effect_of(config), None)
                    if sentence is None:
                        return Case(number, values, config, tuple(refused))
            free = [name for name in named(sentence or "") if name not in pinned]
            if not free:
                return None
            name = self._draw.choice(free)
            drawn[name] = self._value(name)
        return None

    def _others(self) -> dict[str, object]:
        """Random values of all but the layout; plain ones for many options of a section."""
        return {
            name: plain(name)
            if of_section(name) and self._draw.random() > SET
            else self._value(name)
            for name in DRAWN
            if not name.startswith("layout.")
        }

    def _layout(self) -> dict[str, object]:
        """Two or three axes of random size, and options that go with them."""
        values = {name: DRAWN[name][0] for name in DRAWN if name.startswith("layout.")}
        axes = self._draw.sample(_OFTEN, self._draw.choice((1, 2, 2, 3, 3)))
        values |= {name: self._value(name) for name in dict.fromkeys(axes)}
        options = [name for name in values if name not in _AXES]
        chosen = (name for name in options if self._draw.random() < SET)
        return values | {name: self._value(name) for name in chosen}

    def _value(self, name: str) -> object:
        return self._draw.choice(DRAWN[name])

    @staticmethod
    def _size(values: Values) -> int:
        return math.prod(values[name] for name in _AXES)


def _of_family(drawn: Values, pinned: Values) -> Values:
    """The values drawn, but plain ones for fields of sections that their family lacks."""
    family = drawn["model.family"]
    return {
        name: value if name in pinned or has_field(family, name) else plain(name)
        for name, value in drawn.items()
    }
