"""The attention kernel that a device runs, and the reasons not to use cuDNN's."""

from types import SimpleNamespace

import pytest

from jaxptd.config import Config, Latent, ModelConfig
from jaxptd.errors import UserError
from jaxptd.layers.attention import choose_kernel
from jaxptd.mesh import Layout
from jaxptd.models.families import sizes_of

GPU = SimpleNamespace(platform="gpu", compute_capability="9.0")
CPU = SimpleNamespace(platform="cpu")


def config(layout: Layout, **choices) -> Config:
    return Config(ModelConfig(**{"dtype": "bfloat16", **choices}), layout)


def chosen(config: Config, device: SimpleNamespace) -> tuple:
    return choose_kernel(config, device, documents=False)


def test_documents_need_xla() -> None:
    kernel, words = choose_kernel(config(Layout()), GPU, documents=True)
    assert kernel == "xla"
    assert "documents" in words


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(cp=2), Layout(row=2, col=2), Layout(attention2d="blocks")], ids=str
)
def test_cudnn_is_picked_where_it_can_run(layout: Layout) -> None:
    assert chosen(config(layout), GPU) == ("cudnn", None)
    assert chosen(config(layout, attention="xla"), GPU) == ("xla", None)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(cp=2, ring="rsa"), "layout.ring=rsa has no fused attention kernel"),
        (Layout(row=2, ring="rsa"), "layout.ring=rsa has no fused attention kernel"),
        (
            Layout(row=2, attention2d="blocks"),
            "layout.attention2d=blocks has no fused attention kernel",
        ),
    ],
    ids=str,
)
def test_attention_without_a_fused_kernel(layout: Layout, words: str) -> None:
    assert chosen(config(layout), GPU) == ("xla", words)


def test_vectors_of_latent_attention_may_be_wider_than_fused_heads() -> None:
    """Heads of 192 elements fit, and vectors of 512 + 64 do not."""
    absorbed = Layout(latent_products="absorbed")
    assert chosen(config(Layout(), family="deepseek_v3"), GPU) == ("cudnn", None)
    kernel, words = chosen(config(absorbed, family="deepseek_v3"), GPU)
    assert kernel == "xla"
    assert words.endswith("at most 256, not 576")
    assert not sizes_of(config(absorbed, family="deepseek_v3")).is_fused
    narrow = config(absorbed, family="deepseek_v3", latent=Latent(kv_rank=192))
    assert chosen(narrow, GPU) == ("cudnn", None)
    assert sizes_of(narrow).is_fused


def test_a_window_that_ends_in_another_devices_block_has_no_fused_kernel() -> None:
    for layout in (Layout(cp=2), Layout(row=2, col=2)):
        kernel, words = chosen(config(layout, window=100), GPU)
        assert (
            kernel == "xla" and words and words.endswith("not at another device's (model.window)")
        )
    assert chosen(config(Layout(tp=2), window=100), GPU) == ("cudnn", None)
    assert chosen(config(Layout(cp=2), window=256), GPU) == ("cudnn", None)  # all tokens


def test_asking_for_what_cannot_be_is_an_error() -> None:
    kernel, words = chosen(config(Layout()), CPU)
    assert kernel == "xla" and words
    with pytest.raises(UserError, match="model.attention=cudnn: .*; use model.attention=xla"):
        chosen(config(Layout(), attention="cudnn"), CPU)
