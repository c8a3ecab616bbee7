"""The FLOPs of single equations."""

from types import SimpleNamespace

import pytest
import tiny

from jaxptd.analysis.jaxprs import attention_flops, executed, flops
from jaxptd.mesh import Layout


@pytest.mark.parametrize(
    ("name", "mask", "window", "flops"),
    [
        ("dot_product_attention_fwd_wrapper", "CAUSAL", None, 2 * 2 * 4 * 128**2 * 64),
        ("dot_product_attention_bwd_wrapper", "CAUSAL", None, 5 * 2 * 4 * 128**2 * 64),
        ("dot_product_attention_bwd_wrapper", "CAUSAL", 32, 10 * 2 * 4 * (112 * 32) * 64),
        ("dot_product_attention_fwd_wrapper", "CAUSAL", 500, 2 * 2 * 4 * 128**2 * 64),
        ("dot_product_attention_fwd_wrapper", "NO_MASK", None, 4 * 2 * 4 * (128 * 96) * 64),
        ("dot_product_attention_bwd_wrapper", "NO_MASK", None, 10 * 2 * 4 * (128 * 96) * 64),
        ("dot_general", "CAUSAL", None, 0),
    ],
)
def test_flops_of_attention(name, mask, window, flops):
    keys = 128 if mask == "CAUSAL" else 96
    q, k = (SimpleNamespace(aval=SimpleNamespace(shape=(2, n, 4, 64))) for n in (128, keys))
    equation = SimpleNamespace(
        primitive=SimpleNamespace(name=name),
        params={"mask_type": mask, "sliding_window_length": window},
        invars=[q, k],
    )
    assert attention_flops(equation) == flops


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2)], ids=str)
def test_documents_count_as_if_all_met(layout: Layout) -> None:
    """How many chunks of scores share a document depends on the data; the most are counted."""
    joined, apart = [
        executed(tiny.program(layout, seq_length=1024, documents=documents), flops)
        for documents in ("joined", "apart")
    ]
    assert joined == apart
