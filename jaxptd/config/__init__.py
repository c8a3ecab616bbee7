"""A run's configuration: its sections, their checks, and how a command line is read."""

from jaxptd.config.layout_checks import check_layout
from jaxptd.config.processes import ProcessesConfig
from jaxptd.config.sections import (
    AttentionKind,
    CheckpointConfig,
    Config,
    DataConfig,
    Documents,
    Dtype,
    ModelConfig,
    OptimizerConfig,
    Products,
    Remat,
    TrainConfig,
    from_dict,
    to_dict,
)

__all__ = [
    "AttentionKind",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "Documents",
    "Dtype",
    "ModelConfig",
    "OptimizerConfig",
    "ProcessesConfig",
    "Products",
    "Remat",
    "TrainConfig",
    "check_layout",
    "from_dict",
    "to_dict",
]
