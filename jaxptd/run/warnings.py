"""Remarks on a run: about its settings when it starts, about resuming when it stops."""

from collections.abc import Iterator
from functools import partial

from jaxptd.config import Config, flat
from jaxptd.config.effects import without_effect
from jaxptd.matmul.padding import heads_for, padded_for
from jaxptd.models.families import architecture_of
from jaxptd.models.stages import in_terms_of_config
from jaxptd.parts.specs import Specs
from jaxptd.pipeline.statistics import longer_than_needed
from jaxptd.step import Program
from jaxptd.topology import known_domains, split_groups

MOST_PADDING = 0.1  # share of padding in a vocabulary up to which nothing is said


def remarks(program: Program) -> Iterator[str]:
    """Yields a sentence for each field without effect, for padding, and for a better schedule.

    A better schedule is shorter, or has no empty rows of layers. Also remarks on settings that are
    rarely meant: a warm-up that never ends, sequences longer than the weights were trained for, and
    axes that leave the devices that NVLink joins.
    """
    yield from without_effect(program.config.model, program.config.layout)
    yield from _beyond_positions(program.config)
    yield from _endless_warmup(program.config)
    yield from _padding(program.config)
    yield from _padded_sizes(program.config)
    yield from split_groups(program.config.layout, known_domains([*program.mesh.devices.flat]))
    plan = program.resolved.plan
    if plan and (sentence := longer_than_needed(plan.schedule)):
        yield in_terms_of_config(sentence)
    if plan and plan.schedule.chunks < len(plan.stacks):
        used = sum(map(sum, plan.stacks.values()))
        yield (
            f"layout.schedule={program.config.layout.schedule} uses {used} of the {plan.rows} rows "
            f"of layers on its stages: a stage has one chunk, but the model has "
            f"{len(plan.stacks)} stacks; use interleaved or zb-v, which have two chunks"
        )


def _padding(config: Config) -> Iterator[str]:
    """A sentence for each length that the layout does not divide."""
    for name in ("seq_length", "encoder_decoder.seq_length"):
        length, padded = flat(config.model).get(name), flat(config.padded_model).get(name)
        if length != padded:
            yield (
                f"model.{name}={length}: every sequence is padded to {padded} to split over the "
                f"devices; a multiple of {config.layout.sequence_unit} needs no padding"
            )


def _beyond_positions(config: Config) -> Iterator[str]:
    """A sentence if sequences are longer than the model's rotary positions were trained for."""
    model = config.model
    if model.seq_length > model.num_positions:  # position tables were checked before
        yield (
            f"model.seq_length={model.seq_length} exceeds model.max_positions="
            f"{model.max_positions}, the longest sequence that the model was trained for; use "
            f"{model.max_positions} or less, unless you train it on longer ones"
        )


def _endless_warmup(config: Config) -> Iterator[str]:
    """A sentence if the learning rate rises until the run ends."""
    optimizer, steps = config.optimizer, config.train.steps
    if (warmup := optimizer.warmup(steps)) >= max(steps, 2):
        peak = optimizer.learning_rate
        last = peak * steps / warmup
        fraction = optimizer.warmup_fraction
        given = f"optimizer.warmup_steps={warmup}"
        given = given if fraction is None else f"optimizer.warmup_fraction={fraction}"
        reached = "its peak" if last == peak else f"{last:g}, below its peak of {peak:g}"
        yield (
            f"{given} with train.steps={steps}: the "
            f"learning rate rises until the last step, to {reached}; use fewer warm-up steps"
        )


def _padded_sizes(config: Config) -> Iterator[str]:
    """A sentence for padded heads, and for a vocabulary with much padding."""
    model, layout = config.model, config.layout
    stacks = [] if Specs.of(layout).head_dim else architecture_of(model).stacks
    shapes = [part.head_shape for stack in stacks for part in stack.parts]
    for heads in filter(None, shapes):
        counts = heads_for(layout, *heads)
        if counts.queries > heads.queries:
            shared = heads.keys < heads.queries
            keys = f" ({heads.keys} KV heads to {counts.keys})" if shared else ""
            yield (
                f"{heads.queries} attention heads are padded to {counts.queries}{keys} to split "
                f"over {layout.tp * layout.col} devices, which wastes compute; use a layout.tp "
                f"or layout.col that divides {heads.keys}"
            )
            break
    size = model.vocab_size or 0
    rows = model.padded_vocab(partial(padded_for, layout))
    if model.vocab_multiple > 1 and rows - size > MOST_PADDING * size:
        yield f"model.vocab_size={size} is padded to {rows}; use a smaller model.vocab_multiple"


def nothing_left(config: Config, step: int) -> str:
    """Says that a run is already complete."""
    return (
        f"nothing left to do: {config.train.run_dir} is at step {step} of "
        f"train.steps={config.train.steps}; raise train.steps to train further"
    )


def how_to_resume(config: Config) -> str:
    """Says how to resume a stopped run."""
    if config.checkpoint.every == 0:
        return "nothing was saved, because checkpoint.every is 0"
    same = config.checkpoint.resume == "auto"
    return f"saved; {'repeat the command' if same else 'use checkpoint.resume=auto'} to continue"
