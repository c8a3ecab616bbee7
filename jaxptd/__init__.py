"""jaxptd: transformers on many devices, every layout proved equal to one device.

Names exported here are kept stable; everything else may change between versions. Their modules are
imported when a name is first used, so `import jaxptd` is quick and starts no device.
"""

import importlib
from typing import Any

__version__ = "0.1.0.dev0"

_HOMES = {
    "jaxptd.config": (
        "CheckpointConfig",
        "Config",
        "DataConfig",
        "ModelConfig",
        "OptimizerConfig",
        "ProcessesConfig",
        "TrainConfig",
    ),
    "jaxptd.config.command_line": ("load_config",),
    "jaxptd.errors": ("UserError",),
    "jaxptd.mesh": ("Axis", "Layout", "make_mesh", "rank_groups"),
    "jaxptd.models.gpt": ("GPT",),
    "jaxptd.step": ("Program",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'jaxptd' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
