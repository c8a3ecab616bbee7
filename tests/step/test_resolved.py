"""Choices made for a mesh, and those that follow the config."""

import dataclasses

import tiny

from jaxptd.layers.for_layout import for_decoding
from jaxptd.mesh import Layout


def test_only_the_attention_kernel_of_the_model_is_chosen() -> None:
    resolved = tiny.program(Layout(offload="activations"), remat="dots").resolved
    assert resolved.config.model.attention == "auto"
    assert resolved.model == dataclasses.replace(resolved.config.model, attention="xla")
    assert resolved.attention_obstacle is not None


def test_only_a_pipeline_has_a_plan() -> None:
    plain, pipeline = (tiny.program(layout).resolved for layout in (Layout(), Layout(pp=2)))
    assert (plain.plan, plain.trips) == (None, {})
    assert pipeline.plan is not None
    assert (pipeline.plan.schedule.stages, pipeline.trips) == (2, pipeline.plan.trips)


def test_the_last_micro_batch_is_a_loop_of_one_trip_where_it_sends_gradients() -> None:
    several, one = (tiny.program(Layout(dp=2, zero=1), micro_batches=m).resolved for m in (2, 1))
    assert (several.trips, one.trips) == ({"apart": 1}, {})


def test_parameters_follow_from_the_placement() -> None:
    """Replacing a field changes everything derived from it."""
    pipeline = tiny.program(Layout(pp=2)).resolved
    name = "tokens.table"
    assert "pp" in pipeline.infos[name].axes
    assert "pp" in pipeline.stored[name].axes
    plain = dataclasses.replace(pipeline, placement=lambda info: info)
    assert "pp" not in plain.infos[name].axes
    assert "pp" not in plain.stored[name].axes


def test_the_form_for_decoding_keeps_the_parameters_shardings() -> None:
    """`generate` relies on this, as it reads the training state."""
    for layout in (
        Layout(row=2, col=2),
        Layout(tp=2, sequence_parallel=True),
        Layout(cp=2, zero=3),
    ):
        resolved = tiny.program(layout).resolved
        decoding = dataclasses.replace(resolved, tensor_parallel=for_decoding(layout))
        found, want = (
            [(info.spec, info.stored_shape) for info in each.stored.values()]
            for each in (decoding, resolved)
        )
        assert found == want
