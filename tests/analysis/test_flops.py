"""The FLOPs of single equations."""

from types import SimpleNamespace

import pytest

from jaxptd.analysis.flops import attention_flops


@pytest.mark.parametrize(
    ("name", "mask", "flops"),
    [
        ("dot_product_attention_fwd_wrapper", "CAUSAL", 2 * 2 * 4 * 128**2 * 64),
        ("dot_product_attention_bwd_wrapper", "CAUSAL", 5 * 2 * 4 * 128**2 * 64),
        ("dot_general", "CAUSAL", 0),
    ],
)
def test_flops_of_attention(name, mask, flops):
    q = SimpleNamespace(aval=SimpleNamespace(shape=(2, 128, 4, 64)))
    equation = SimpleNamespace(
        primitive=SimpleNamespace(name=name), params={"mask_type": mask}, invars=[q]
    )
    assert attention_flops(equation) == flops
