"""Fields without effect: refused if only a pipeline or a grid uses them, otherwise named."""

import dataclasses

import pytest

from jaxptd.config import Config, ModelConfig
from jaxptd.config.effects import without_effect
from jaxptd.errors import UserError
from jaxptd.layout import Layout

MODEL = ModelConfig()


@pytest.mark.parametrize(
    ("fields", "axes", "words"),
    [
        (
            {"schedule": "zb-h1"},
            {"pp": 2},
            "layout.schedule=zb-h1 has no effect without a pipeline",
        ),
        ({"virtual_stages": 2}, {"pp": 2}, "layout.virtual_stages=2 has no effect without a pipe"),
        ({"stage_layers": (4,)}, {"pp": 2}, "layout.stage_layers=(4,) has no effect without a pip"),
        ({"matmul2d": "summa"}, {"row": 2}, "layout.matmul2d=summa has no effect without a grid"),
        ({"matmul2d_slices": 2}, {"col": 2}, "layout.matmul2d_slices=2 has no effect without a gr"),
    ],
)
def test_fields_of_a_pipeline_or_of_a_grid_are_refused_elsewhere(fields, axes, words) -> None:
    assert list(without_effect(MODEL, Layout(**axes, **fields))) == []
    with pytest.raises(UserError) as caught:
        Config(layout=Layout(dp=2, **fields))
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith(f"set that as well, or leave layout.{next(iter(fields))} out")


@pytest.mark.parametrize(
    ("layout", "axes", "sentence"),
    [
        (Layout(ring="rsa"), {"cp": 2}, "layout.ring=rsa has no effect without a ring"),
        (Layout(ring="rsa", tp=2), {"cp": 2}, "layout.ring=rsa has no effect without a ring"),
        (Layout(ring="blockwise"), {"row": 2}, "layout.ring=blockwise has no effect without a ri"),
        (Layout(attention2d="blocks"), {"row": 2}, "layout.attention2d=blocks has no effect with"),
        (Layout(sequence_parallel=True), {"tp": 2}, "layout.sequence_parallel=True has no effect"),
        (Layout(zero=1, tp=2), {"dp": 2}, "layout.zero=1 has no effect without layout.dp, layout."),
        (Layout(zero=2), {"ep": 2}, "layout.zero=2 has no effect without layout.dp, layout.ep, "),
        (Layout(zero=3), {"cp": 2}, "layout.zero=3 has no effect without layout.dp, layout.ep, "),
        (
            Layout(replicas=2, dp=2),
            {"zero": 1},
            "layout.replicas=2 has no effect without layout.",
        ),
        (
            Layout(dp=2, zero=1, replica_state="split"),
            {"replicas": 2},
            "layout.replica_state=split has no effect without layout.zero, and layout.replicas of ",
        ),
        (
            Layout(dp=2, zero=1, replica_state="split"),
            {"replicas": 2, "dp": 1},
            "layout.replica_state=split has no effect without layout.zero, and layout.replicas of ",
        ),
    ],
)
def test_other_fields_without_effect_are_named(layout, axes, sentence) -> None:
    (found,) = without_effect(MODEL, layout)
    assert found.startswith(sentence)
    assert Config(layout=layout).layout == layout  # not refused
    assert list(without_effect(MODEL, dataclasses.replace(layout, **axes))) == []


@pytest.mark.parametrize(
    ("layout", "model", "has_effect"),
    [
        ({"tp": 2, "sequence_parallel": True}, {}, True),
        ({"tp": 2, "sequence_parallel": True}, {"remat": "attention"}, True),
        ({"tp": 2, "sequence_parallel": True}, {"remat": "full", "remat_layers": 1}, True),
        ({"tp": 2, "sequence_parallel": True}, {"remat": "dots"}, False),
        ({"tp": 2, "sequence_parallel": True}, {"remat": "full"}, False),
        ({"tp": 2, "sequence_parallel": True, "collective_matmul": True}, {}, False),
        ({"tp": 2}, {}, False),
        ({"row": 2}, {}, False),
        ({}, {}, False),
    ],
)
def test_gathered_inputs_are_kept_only_where_there_are_any(layout, model, has_effect) -> None:
    found = list(without_effect(ModelConfig(**model), Layout(**layout, keep_gathered=True)))
    want = "layout.keep_gathered=True has no effect without layout.sequence_parallel without "
    assert [each.startswith(want) for each in found] == [] if has_effect else [True]
    again = Config(model=ModelConfig(**model), layout=Layout(**layout)).gathers_again
    assert again == has_effect


def test_a_window_as_long_as_the_sequence_is_named() -> None:
    (found,) = without_effect(ModelConfig(window=256), Layout())
    assert found == "model.window=256 has no effect without a longer model.seq_length"
    assert list(without_effect(ModelConfig(window=255), Layout())) == []


def test_layers_that_recompute_nothing_are_named() -> None:
    (found,) = without_effect(ModelConfig(remat_layers=1), Layout())
    assert found == "model.remat_layers=1 has no effect without model.remat"
    assert list(without_effect(ModelConfig(remat_layers=1, remat="full"), Layout())) == []


def test_defaults_are_never_named() -> None:
    assert list(without_effect(MODEL, Layout())) == []


@pytest.mark.parametrize("ep", [1, 2])
def test_collective_matmul_has_an_effect_on_experts_without_tp(ep: int) -> None:
    """Tokens hop over ep, so the field and the sequence parallelism it needs have an effect."""
    model = ModelConfig(family="mixtral", moe={"num_experts": 4, "top_k": 2})
    layout = Layout(ep=ep, sequence_parallel=True, collective_matmul=True)
    found = [sentence for sentence in without_effect(model, layout) if "has no effect" in sentence]
    assert len(found) == (2 if ep == 1 else 0)


def test_what_latent_attention_exchanges_is_named_where_nothing_is_exchanged() -> None:
    latent = ModelConfig(family="deepseek_v3")
    for model, fields in (
        (MODEL, {"cp": 2}),
        (latent, {"tp": 2}),
        (latent, {"cp": 2, "ring": "rsa"}),
        (latent, {"cp": 2, "latent_products": "absorbed"}),
    ):
        layout = Layout(**fields, latent_exchange="expanded")
        (found,) = without_effect(model, layout)
        assert found.startswith("layout.latent_exchange=expanded has no effect without latent att")
    for fields in ({"cp": 2}, {"ulysses": 2}, {"cp": 2, "ring": "gather"}):
        assert list(without_effect(latent, Layout(**fields, latent_exchange="expanded"))) == []


def test_products_of_latent_attention_are_named_where_there_is_none() -> None:
    layout = Layout(latent_products="absorbed")
    (found,) = without_effect(MODEL, layout)
    assert found == "layout.latent_products=absorbed has no effect without latent attention"
    assert list(without_effect(ModelConfig(family="deepseek_v3"), layout)) == []
