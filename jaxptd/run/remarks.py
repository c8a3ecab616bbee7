"""Remarks on a run: on its settings, when it starts; on how it is resumed, when it ends."""

from collections.abc import Iterator

from jaxptd.config import Config
from jaxptd.config.effects import without_effect
from jaxptd.models.stages import in_terms_of_config
from jaxptd.pipeline.statistics import longer_than_needed
from jaxptd.step import Program


def remarks(program: Program) -> Iterator[str]:
    """Yields a sentence for each field without effect, for padding, and for a better schedule.

    One may be shorter, or its stages may have no rows of layers in vain.
    """
    yield from without_effect(program.config.model, program.config.layout)
    yield from _padding(program.config)
    plan = program.resolved.plan
    if plan and (sentence := longer_than_needed(plan.schedule)):
        yield in_terms_of_config(sentence)
    if plan and plan.schedule.chunks < len(plan.stacks):
        used = sum(map(sum, plan.stacks.values()))
        yield (
            f"layout.schedule={program.config.layout.schedule} has {plan.rows} rows of layers on "
            f"its stages and uses {used}, since a stage has one chunk and the model "
            f"{len(plan.stacks)} stacks; interleaved and zb-v have two"
        )


def _padding(config: Config) -> Iterator[str]:
    """A sentence for each length that the layout does not divide."""
    for name in ("seq_length", "decoder_seq_length"):
        length, padded = getattr(config.model, name), getattr(config.padded_model, name)
        if length != padded:
            yield (
                f"model.{name}={length}: every sequence is padded to {padded}, a multiple of "
                f"{config.layout.sequence_unit}, to split over the devices"
            )


def nothing_left(config: Config, step: int) -> str:
    """Says that a run is at its end already."""
    return (
        f"nothing left to do: {config.train.run_dir} is at step {step}, "
        f"train.steps={config.train.steps}; raise train.steps to train on"
    )


def how_to_resume(config: Config) -> str:
    """Says how a run that was stopped is resumed."""
    if config.checkpoint.every == 0:
        return "nothing saved, checkpoint.every is 0"
    same = config.checkpoint.resume == "auto"
    return f"saved; {'the same command' if same else 'checkpoint.resume=auto'} goes on"
