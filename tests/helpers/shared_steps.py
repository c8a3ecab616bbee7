"""Runs with equal configs share the programs that the first of them traced and compiled.

A run of the tiny model takes a second of tracing and a fifth of one for all else. Only runs share
(`MODULES`), and only where all fields of their configs are equal, except for the places of their
files. A test that changes what is traced has to use a config of its own.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxptd.config import Config
from jaxptd.params import Params
from jaxptd.run.generator import Generator
from jaxptd.step import Program

MODULES = ("jaxptd.train", "jaxptd.api.loading", "jaxptd.hf.load", "jaxptd.run.saved")
OF_PROGRAMS = ("train_step", "step_metrics", "eval_step", "gradients", "classes", "_canonical")
OF_GENERATORS = ("_write", "_chunk_functions", "_write_ahead")
PLACES = {"data": "source", "train": "run_dir"}
FIRST, STARTS = "first of its config", "initial parameters"


def program_of_a_run(config: Config, mesh: Mesh) -> Program:
    """The program of a config, with the steps of the first program with an equal config."""
    program = Program(config, mesh)
    sections = {name: value for name, value in vars(config).items() if name != "checkpoint"}
    fields = sections | {
        name: [each for each in vars(sections[name]).items() if each[0] != place]
        for name, place in PLACES.items()
    }
    devices = tuple(device.id for device in mesh.devices.flat)
    program.__dict__[FIRST] = _first((repr(fields), devices), program)
    return program


_firsts: dict[Any, Any] = {}


def _first(key: Any, made: Any) -> Any:
    """The first object with this key."""
    return _firsts.setdefault(key, made)


def _of_program(program: Program) -> Any:
    return program.__dict__.get(FIRST, program)


def _of_generator(generator: Generator) -> Any:
    program = generator.program.__dict__.get(FIRST)
    if program is None:
        return generator
    options = generator.vocab_size, generator.sampling, generator.ends, generator.drafts is None
    return _first((id(program), repr(options)), generator)


def _share(owner: Any, names: Collection[str], first_of: Callable[[Any], Any]) -> None:
    """Takes the cached properties with these names from the first object of its kind."""
    for name in names:
        original = vars(owner)[name].func

        def shared(self: Any, name: str = name, original: Callable = original) -> Any:
            first = first_of(self)
            return original(self) if first is self else getattr(first, name)

        made = functools.cached_property(shared)
        made.__set_name__(owner, name)
        setattr(owner, name, made)


def _initial(program: Program, names: Collection[str]) -> Params:
    """`Program.initial` from the numbers that the first program with an equal config made."""
    first = program.__dict__.get(FIRST)
    if first is None or not names:
        return _initial_of(program, names)
    starts = first.__dict__.setdefault(STARTS, {})
    if tuple(names) not in starts:
        made = _initial_of(program, names)
        starts[tuple(names)] = {name: (np.asarray(x), x.sharding) for name, x in made.items()}
        return made
    return {name: jax.device_put(*each) for name, each in starts[tuple(names)].items()}


_initial_of = Program.initial
_share(Program, OF_PROGRAMS, _of_program)
_share(Generator, OF_GENERATORS, _of_generator)
Program.initial = _initial


@pytest.fixture(autouse=True, scope="module")
def shared_steps() -> Any:
    """Runs that tests of a module start share their steps, also with those of other modules."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            patch.setattr(f"{module}.Program", program_of_a_run)
        yield
