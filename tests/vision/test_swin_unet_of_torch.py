"""Loss and gradients of Swin-UNet equal those of Swin-Unet's torch code in float64.

`tests/golden/make_swin_unet.py` computed them.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hugging import swin_unet
from hugging.compared import check_losses
from hugging.reference import check_summaries

from jaxptd import Config, Layout, ModelConfig, Program, TrainConfig, make_mesh
from jaxptd.params import Params

GOLDEN = Path(__file__).parents[1] / "golden" / "swin-unet.json"


def computed(layout: Layout) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """The loss with its terms, and the gradients by Swin-Unet's names."""
    with jax.enable_x64(True):
        remat = "dots" if "activations" in layout.offloaded else "none"
        model = ModelConfig(**swin_unet.MODEL, dtype="float64", remat=remat)
        train = TrainConfig(global_batch_size=swin_unet.ROWS)
        config = Config(model, layout, train=train)
        program = Program(config, make_mesh(layout))
        stored, abstract = program.states.stored, program.abstract_state["params"]
        drawn = swin_unet.drawn({name: info.shape for name, info in program.infos.items()})
        place = jax.jit(lambda p: {name: stored[name].from_canonical(x) for name, x in p.items()})
        held = jax.tree.map(np.asarray, place(drawn))
        params: Params = {n: jax.device_put(x, abstract[n].sharding) for n, x in held.items()}
        loss, terms, gradients = program.gradients(program.states.new(params), swin_unet.batch())
        canonical = jax.tree.map(np.asarray, jax.jit(program.canonical)(gradients))
    losses = {"loss": float(loss), **{name: float(x) for name, x in terms.items()}}
    return losses, swin_unet.tensors(canonical)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sequence_parallel=True),
        Layout(),
        Layout(cp=2),
        Layout(cp=4),
        Layout(cp=2, row=2, col=2),
        Layout(dp=2),
        Layout(tp=4, sequence_parallel=True),
        Layout(row=2, col=2, matmul2d="gather"),
        Layout(row=2, col=2, matmul2d="cannon"),
        Layout(row=2, col=2, matmul2d="fox"),
        Layout(row=2, col=2, matmul2d="summa"),
        Layout(row=2, col=2, attention2d="blocks"),
        Layout(dp=2, zero=2),
        Layout(dp=2, tp=2, zero=3),
        Layout(tp=2, offload=("optimizer", "parameters", "activations")),
    ],
    ids=str,
)
def test_loss_and_gradients_are_those_of_torch(layout: Layout) -> None:
    golden = json.loads(GOLDEN.read_text())
    losses, gradients = computed(layout)
    check_losses(losses, golden["losses"])
    check_summaries(gradients, golden["gradients"])
