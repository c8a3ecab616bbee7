"""The parameters of a model on a layout, from its architecture: no model is built, and no array."""

from jaxptd.config import Config
from jaxptd.models.families import architecture_of
from jaxptd.models.stages import StagePlacement, outline_plan
from jaxptd.parts.parameters import LayoutSharding
from jaxptd.shapes import ParamShape


def parameter_infos(config: Config) -> dict[str, ParamShape]:
    """Shapes and axes of the parameters of a config's model, as layers hold them.

    Their names are the model's where one of its kind has one name in all models.

    Raises:
        UserError: the model's layers do not fill the pipeline.
    """
    model, layout = config.model, config.layout
    sharding = LayoutSharding(layout)
    vocab = model.padded_vocab(sharding.padded)
    infos = dict(architecture_of(model).parameters(sharding, vocab))
    if layout.pp == 1:
        return infos
    place = StagePlacement(outline_plan(config), layout.sizes)
    return {name: place(info) for name, info in infos.items()}
