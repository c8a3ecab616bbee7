"""A run's configuration: its sections, their checks, and how a command line is read.

`model`, `training` and `processes` define sections, `run` joins them to a `Config`.
"""

from jaxptd.config.block import (
    Activation,
    BlockOptions,
    EncoderDecoder,
    FamilyName,
    Kernels,
    Relative,
    Rope,
)
from jaxptd.config.effects import check_layout
from jaxptd.config.images import Images
from jaxptd.config.latent import Latent
from jaxptd.config.model import (
    AttentionKind,
    Dtype,
    ModelConfig,
    Products,
    Remat,
    flat,
    itemsize,
    nested,
    option,
    with_fields,
)
from jaxptd.config.run import Config, ProcessesConfig, from_dict, to_dict
from jaxptd.config.training import (
    BeginToken,
    CheckpointConfig,
    DataConfig,
    Documents,
    OptimizerConfig,
    OptimizerName,
    SpecialTokens,
    TrainConfig,
)
