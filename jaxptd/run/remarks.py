"""Remarks on the settings of a run, said once when it starts."""

from collections.abc import Iterator

from jaxptd.config.effects import without_effect
from jaxptd.pipeline.statistics import longer_than_needed
from jaxptd.step import Program
from jaxptd.step.stages import in_terms_of_config


def remarks(program: Program) -> Iterator[str]:
    """Yields a sentence for each field without effect, and for a schedule that could be shorter."""
    yield from without_effect(program.config.model, program.config.layout)
    plan = program.resolved.plan
    if plan and (sentence := longer_than_needed(plan.schedule)):
        yield in_terms_of_config(sentence)
