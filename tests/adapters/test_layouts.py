"""Low-rank adapters: every layout trains them as one device does, which computes what they mean."""

import pytest
import tiny
from one_device import case, hold
from turns import slow

from jaxptd.mesh import Layout

LLAMA = {"family": "llama", "num_kv_heads": 2, "lora.rank": 3}
SOME = LLAMA | {"num_layers": 3, "dropout": 0.1, "batch": 12}
GPT = {"lora.rank": 2, "lora.targets": ("attention.*",), "batch": 12}
EXPERTS = tiny.MOE | {"lora.rank": 2}


@pytest.mark.parametrize(
    ("layout", "choice"),
    [
        case(SOME, 2, dp=2, tp=2, sequence_parallel=True, zero=3),
        case(GPT, 2, pp=2, tp=2, schedule="zb-h1"),
        *(
            slow(*each.values)
            for each in (
                case(SOME, 2, dp=2, tp=2),
                case(SOME, 2, tp=2, sequence_parallel=True, collective_matmul=True),
                case(SOME | {"remat": "dots"}, 2, dp=2, cp=2, zero=1),
                case(EXPERTS, 2, dp=2, ep=2, zero=2),
            )
        ),
    ],
)
def test_a_step_equals_one_device(layout: Layout, choice: dict) -> None:
    hold(layout, **choice)
