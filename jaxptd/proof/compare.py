"""Compares a case with one device, and says how that ended."""

import dataclasses
from typing import Any

import jax

from jaxptd.analysis import verification
from jaxptd.analysis.compiled_step import UNOPTIMISED
from jaxptd.analysis.verification import Reference
from jaxptd.config import Config
from jaxptd.errors import UserError
from jaxptd.layout import Layout
from jaxptd.proof.values import FIXED, HOW, plain


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a comparison.

    Args:
        outcome: equal, refused, crashed or unequal.
        words: the verdict, or the error in a line.
        worst: the largest relative difference of a gradient, if there is one.
    """

    outcome: str
    words: str
    worst: float = 0.0


class Comparer:
    """Compares cases with one device, whose last step is kept for those that share it."""

    def __init__(self) -> None:
        self._key: Config | None = None
        self._reference: Reference | None = None

    def compare(self, config: Config) -> Ending:
        """Compares a case in the precision that its model computes in."""
        dtype = config.model.dtype
        try:
            with jax.enable_x64(dtype == "float64"):
                report = verification.compared(config, self._one_device(config))
        except UserError as error:
            return Ending("refused", str(error))
        except Exception as error:  # whatever it is: this is what is looked for
            return Ending(
                "crashed", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            )
        outcome = "equal" if report.equal else "unequal"
        return Ending(outcome, report.verdict, report.worst_gradient)

    def _one_device(self, config: Config) -> Reference:
        key = on_one_device(config)
        if key != self._key or self._reference is None:
            jax.clear_caches()
            self._reference = verification.one_device(
                key, dtype=key.model.dtype, options=UNOPTIMISED
            )
            self._key = key
        return self._reference


def on_one_device(config: Config) -> Config:
    """The config with the plain value of every field that says how a step is computed."""
    values = {name: plain(name) for name in HOW}
    model = {name.partition(".")[2]: x for name, x in values.items() if name.startswith("model.")}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        layout=Layout(),
        train=dataclasses.replace(config.train, micro_batches=1),
    )


def command_line(config: Config) -> str:
    """The shortest command that compares a config: `jaxptd verify` with what is not default."""
    words = ["jaxptd verify"]
    for section in ("model", "layout", "data", "optimizer", "train"):
        given, default = getattr(config, section), getattr(Config(), section)
        for field in dataclasses.fields(given):
            value, name = getattr(given, field.name), f"{section}.{field.name}"
            unread = name in FIXED and name != "train.platform"
            if value != getattr(default, field.name) and not unread:
                words.append(f"--{name} {_word(value)}")
    return " ".join(words)


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
