"""Evaluations of a run: the number of samples that they read, and the means of their losses."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxptd.checkpoint.manifest import METRICS
from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.config.training import VALIDATION_LOSS
from jaxptd.data import NOT_COUNTED, Samples
from jaxptd.errors import UserError
from jaxptd.models.families import family_of
from jaxptd.models.family import Loss

EMA = "_ema"  # ends the names of metrics of the parameters' moving average
LARGEST_LOSS = 700.0  # the exponential of larger losses overflows


def mean_losses(
    model: ModelConfig, batches: Sequence[Mapping[str, Any]], name: str = "", weights: str = ""
) -> dict[str, float]:
    """`validation_loss` in nats per target, `perplexity` for token ids, and each of several losses.

    Args:
        model: the evaluated model.
        batches: what `Program.eval_step` returned for each batch.
        name: of the evaluated set, which ends the names as in `validation_loss/law`; "" for the
            held-out part of the corpus.
        weights: `EMA` if the batches are of the moving average.
    """
    terms = _terms(model)
    means = {
        name: sum(float(batch[name]["sum"]) for batch in batches)
        / sum(int(batch[name]["targets"]) for batch in batches)
        for name in terms
    }
    loss = sum(terms[name].weight * mean for name, mean in means.items())
    first = next(iter(means.values()))
    perplexity = math.exp(min(first, LARGEST_LOSS))
    each = {f"validation_{name}": mean for name, mean in means.items()}
    found = {VALIDATION_LOSS: loss, "perplexity": perplexity, **each}
    return {metric_of(f"{key}{weights}", name): found[key] for key in _keys(model)}


def _terms(model: ModelConfig) -> dict[str, Loss]:
    """The losses and scores that an evaluation reports."""
    losses = family_of(model).losses(model)
    return {name: term for name, term in losses.items() if term.evaluated}


def _keys(model: ModelConfig) -> list[str]:
    """The names of an evaluation's metrics, of the held-out part of the corpus."""
    names = [*_terms(model)]
    each = [f"validation_{name}" for name in names] if len(names) > 1 else []
    of_tokens = family_of(model).has_vocabulary and model.preference is None
    return [VALIDATION_LOSS, *(["perplexity"] * of_tokens), *each]


def metrics_of(config: Config) -> list[str]:
    """The names of all metrics that the evaluations of a run have."""
    data, keys = config.data, _keys(config.model)
    sets = [*([""] if data.validation_fraction else []), *(data.validation or {})]
    if config.optimizer.ema_decay:
        keys += [f"{key}{EMA}" for key in keys]
    return [metric_of(key, name) for name in sets for key in keys]


def evaluation_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of the evaluation in a row of metrics.jsonl; empty without one."""
    return {name: value for name, value in row.items() if name.startswith(METRICS)}


def rises(metric: str) -> bool:
    """True for a metric that is higher for a better model, such as accuracy."""
    return re.fullmatch(rf"validation_(accuracy|dice(_\d+)?)({EMA})?(/.*)?", metric) is not None


def metric_of(key: str, name: str) -> str:
    """The name of an evaluated set's metric; "" is the held-out part of the corpus."""
    return f"{key}/{name}" if name else key


def evaluated_samples(windows: Samples, train: TrainConfig) -> int:
    """Number of samples that an evaluation reads: `eval_batches` batches, or all there are."""
    return min(train.eval_batches * train.global_batch_size, windows.windows_per_epoch)


def require_targets(windows: Samples, config: Config, name: str) -> None:
    """Raises UserError unless an evaluation, which reads the same samples each time, has targets.

    Args:
        windows: the validation windows.
        config: of the run.
        name: of the set, or "". Without `data.prompt_field` every token is a target.
    """
    if config.data.counts_all:
        return
    number = evaluated_samples(windows, config.train)
    if not any((windows.targets(np.array([i])) != NOT_COUNTED).any() for i in range(number)):
        of_set = f" of data.validation.{name}" if name else ""
        raise UserError(
            f"data.source: the {number} sequences of an evaluation{of_set} hold only prompts and "
            "no answers; raise train.eval_batches, or use another data.validation_fraction"
        )
