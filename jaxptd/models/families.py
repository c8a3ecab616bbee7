"""The families of models: the one place that knows a model by its family's name.

The presets of a family's options are in `jaxptd.config.block`, its tensors in Hugging Face's files
in `jaxptd.hf.rules`: they too are rows of a table.
"""

from collections.abc import Mapping

from jaxptd.config import FamilyName, ModelConfig
from jaxptd.models.decoder import DECODER
from jaxptd.models.encoder import ENCODER
from jaxptd.models.family import Family

FAMILIES: Mapping[FamilyName, Family] = {
    "gpt": DECODER,
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "bert": ENCODER,
}


def family_of(model: ModelConfig) -> Family:
    """The family of a model."""
    return FAMILIES[model.family]
