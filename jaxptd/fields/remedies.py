"""Remedies for an argument of the wrong class: where an object of the right one comes from."""

from collections.abc import Sequence
from typing import Any

# (class that was given, class that is wanted) -> the remedy
PARTS = {
    ("Config", "Layout"): "pass config.layout",
    ("Config", "DataConfig"): "pass config.data",
    ("Config", "ModelConfig"): "pass config.model",
    ("Config", "Path"): "pass config.train.run_dir",
    ("Layout", "Mesh"): "pass jaxptd.make_mesh(layout)",
    ("Mesh", "Layout"): "pass the layout that the mesh was made of",
    ("list", "Run"): 'pass a run, or several by name: {"first": run}',
    ("Program", "Config"): "pass program.config",
    ("Run", "Config"): "pass run.config",
    ("Run", "Layout"): "pass run.config.layout",
    ("Run", "Program"): "pass run.program",
    ("Run", "Path"): "pass run.path",
}
# Class that is wanted -> where it comes from
SOURCES = {
    "Config": "jaxptd.load_config(name) reads one from a YAML file or a packaged config",
    "CommsReport": "jaxptd.comms(config) makes one",
    "DataConfig": "pass config.data",
    "Figure": "jaxptd.plot.mesh(layout), say, makes one",
    "Layout": "jaxptd.Layout(tp=2), say",
    "MemoryReport": "jaxptd.memory(config) makes one",
    "Mesh": "jaxptd.make_mesh(config.layout) makes one",
    "ProfileReport": "jaxptd.profile(config) makes one",
    "Program": "jaxptd.Program(config, jaxptd.make_mesh(config.layout)) makes one",
    "Run": "jaxptd.load(run_dir) gives one",
    "Samples": "pass run.data.train, say",
    "Schedule": 'jaxptd.make_schedule("1f1b", stages=4, micro_batches=8), say, makes one',
    "Tokenizer": 'jaxptd.load_tokenizer("bytes"), say, gives one',
}


def remedy(value: Any, wanted: Sequence[str]) -> str:
    """The remedy for a value that is of none of these classes; empty if there is nothing to say."""
    given = type(value).__name__
    pairs = [PARTS[given, name] for name in wanted if (given, name) in PARTS]
    sources = [SOURCES[name] for name in wanted if name in SOURCES]
    return next(iter([*pairs, *sources]), "")
