"""Compares one training step on a layout with the same step on one device, tensor by tensor.

Both start from the same parameters and batch. Loss, gradient norm, every gradient and every updated
parameter are compared in canonical form, in the order of backward.
Source of the method: TTrace, arXiv 2506.09280; the tolerance is explained in `comparison.py`.
"""

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxptd.analysis.comparison import (
    Choices,
    FirstSteps,
    Outcome,
    Row,
    Tensors,
    backward_order,
    compare,
    perturbed,
)
from jaxptd.analysis.compiled_step import random_batch
from jaxptd.analysis.memory_needs import out_of_memory_explained, require_fits
from jaxptd.config import Config, Dtype, ModelConfig, Products
from jaxptd.display import Table, html_of
from jaxptd.mesh import Layout, jax_option, make_mesh
from jaxptd.models.decoder import CHOICES
from jaxptd.models.families import family_of
from jaxptd.params import Params, shardings
from jaxptd.step import Batch, Program

SEEDS = (1, 2, 3)  # for the signs of rounding errors
FAR_SEEDS = tuple(range(1, 9))  # more: units that cross an activation's kink are rare
FAR = 2.0**-3  # relative change of parameters after which roundings are unrelated
Precision = Literal["float64", "float32", "bfloat16", "float16", "fp8"]
# Precisions too coarse to be their own reference -> the precision of the one device.
REFERENCE_DTYPE: Mapping[Precision, Dtype] = dict.fromkeys(
    ("bfloat16", "float16", "fp8"), "float32"
)
FP8_ROUNDING = 2.0**-4  # e4m3's, with three mantissa bits


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """All comparisons of a layout in one precision, in the order of backward.

    margin: of a mixture of experts the smallest by which a router chose, where the layout was
    given one device's choices; None where it chose itself.
    """

    layout: Layout
    dtype: Precision
    rows: list[Row]
    margin: float | None = None

    @property
    def equal(self) -> bool:
        """True if the layout computes what one device computes."""
        return not self.wrong

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if not row.equal]

    @property
    def worst_gradient(self) -> float:
        """The largest relative difference of any gradient."""
        return max(row.error for row in self.rows if row.what == "gradient")

    @property
    def precision(self) -> str:
        """The precision in words, with that of the one device if it differs."""
        other = REFERENCE_DTYPE.get(self.dtype)
        return f"in {self.dtype}" + (f", which computes in {other}" if other else "")

    @property
    def verdict(self) -> str:
        if not self.wrong:
            given = ""
            if self.margin is not None:
                margin = f"smallest margin {self.margin:.1e}"
                tokens = margin if math.isfinite(self.margin) else "every token passes all experts"
                given = f", given its choices ({tokens})"
            worst = f"gradients to {self.worst_gradient:.1e}"
            return f"equal to one device {self.precision}{given}: {worst}"
        first = self.wrong[0]
        return (
            f"NOT equal to one device {self.precision}: {len(self.wrong)} of {len(self.rows)} "
            f"comparisons; first {first.what} {first.name}, off by {first.error:.2e}, "
            f"allowed {first.allowed:.2e}"
        )

    def __repr__(self) -> str:
        return "\n".join([f"{self.layout}: {self.verdict}", str(self.table(self.nearest()))])

    def _repr_html_(self) -> str:
        return html_of(f"{self.layout}: {self.verdict}", self.table(self.rows))

    def nearest(self, number: int = 3) -> list[Row]:
        """The comparisons that are wrong or closest to it, in the order of backward."""
        worst = sorted(self.rows, key=lambda row: row.error - row.allowed)[-number:]
        return [row for row in self.rows if row in (self.wrong or worst)][:number]

    def table(self, rows: Sequence[Row]) -> Table:
        """These rows as a table."""
        title = f"{len(rows)} of {len(self.rows)} comparisons"
        cells = [
            (r.name, r.what, f"{r.error:.1e}", f"{r.allowed:.1e}", "" if r.equal else "WRONG")
            for r in rows
        ]
        return Table(title, ("tensor", "what", "difference", "allowed", ""), cells)


def verify(config: Config, *, dtype: Precision) -> Report:
    """Compares one step of `config` on its layout with one device, computing in `dtype`.

    Args:
        config: with model.vocab_size set; JAX must have the layout's devices.
        dtype: float32; float64, which this enables in JAX; or one to compare with float32:
            bfloat16, float16 with its scaled loss, or fp8 matmuls.
    """
    with jax.enable_x64(jax_option("jax_enable_x64") or dtype == "float64"):
        return _verify(config, dtype)


def _verify(config: Config, dtype: Precision) -> Report:
    return compared(config, one_device(config, dtype=dtype))


@dataclasses.dataclass(frozen=True)
class Reference:
    """One device's step, with which steps on layouts are compared.

    Args:
        dtype: the layouts' precision.
        start: the parameters of both steps, canonical.
        expected: the outcome from there.
        rounded: pairs of such outcomes that differ only by rounding.
        steps: the optimizer's, in the layouts' precision.
        options: of the compiler, for both steps; None: its defaults.
        choices: of routers, which all these outcomes have in common; None: each chose itself.
    """

    dtype: Precision
    start: Tensors
    expected: Outcome
    rounded: Sequence[tuple[Outcome, Outcome]]
    steps: FirstSteps
    options: Mapping[str, Any] | None = None
    choices: Choices | None = None


def one_device(
    config: Config, *, dtype: Precision, options: Mapping[str, Any] | None = None
) -> Reference:
    """Runs the step of a config on one device.

    Args:
        config: as in `verify`.
        dtype: the layouts' precision; the one device may compute in a finer one.
        options: of the compiler.
    """
    xla = dataclasses.replace(config.model, kernels="xla")  # ours must not be their own reference
    single = dataclasses.replace(_comparable(config), layout=Layout(), model=xla)
    eps = FP8_ROUNDING if dtype == "fp8" else float(jnp.finfo(dtype).eps)
    fine = REFERENCE_DTYPE.get(dtype, dtype)
    step = _one_step(with_precision(fine, single), options, config.layout)
    with out_of_memory_explained(step.program, config.layout):
        start = step.parameters()
        changed = [perturbed(start, eps, seed) for seed in SEEDS]
        choices = Choices.of(step.choices, start, changed) if step.replays else None
        expected = step.run(start, choices)
        rounded = [(step.run(each, choices), expected) for each in changed]
    if dtype in REFERENCE_DTYPE:
        half = with_precision(dtype, single).model.dtype  # with native products
        coarse = _one_step(with_precision(half, single), options)
        with out_of_memory_explained(coarse.program, config.layout):
            rounded += _noise_of(coarse, step, start, choices)
    rounding = float(jnp.finfo(with_precision(dtype, single).model.dtype).eps)
    steps = FirstSteps(single.optimizer, step.program.infos, rounding, options)
    return Reference(dtype, start, expected, rounded, steps, options, choices)


def _noise_of(
    coarse: "OneStep", fine: "OneStep", start: Tensors, choices: Choices | None
) -> Iterator[tuple[Outcome, Outcome]]:
    """Yields pairs of outcomes that differ by the coarse step's rounding at different parameters.

    An error that all of them share is in no pair.
    """
    far = [perturbed(start, FAR, seed) for seed in FAR_SEEDS]
    pairs = [(coarse.run(each, choices), fine.run(each, choices)) for each in far]
    for a, b in itertools.combinations(pairs, 2):
        yield a[0].plus(b[1]), b[0].plus(a[1])


def _one_step(config: Config, options: Any, spread: Layout | None = None) -> "OneStep":
    """The step of a config, after a check that it fits in its devices' memory."""
    step = OneStep(Program(config, make_mesh(config.layout)), options)
    require_fits(step.program, spread)
    return step


def compared(config: Config, reference: Reference) -> Report:
    """Compares the step of a config on its layout with one device's."""
    config = with_precision(reference.dtype, _comparable(config))
    spread = _one_step(config, reference.options)
    with out_of_memory_explained(spread.program):
        outcome = spread.run(reference.start, reference.choices)
    terms = max(math.prod(x.shape) for x in jax.tree.leaves(spread.program.abstract_batch))
    choices, own_rows = reference.choices, list[Row]()
    if choices:
        own_rows = [*choices.compared(reference.expected, spread.run(reference.start))]
    rows = compare(
        reference.expected, reference.rounded, outcome, steps=reference.steps, terms=terms
    )
    last = family_of(config.model).last
    order = sorted([*own_rows, *rows], key=lambda row: backward_order(row, last))
    margin = choices.smallest if choices else None
    return Report(config.layout, reference.dtype, order, margin)


def _comparable(config: Config) -> Config:
    """The config without skipping of steps, which would update nothing."""
    optimizer = dataclasses.replace(config.optimizer, skip_above=0.0)
    return dataclasses.replace(config, optimizer=optimizer)


def _replaying(precision: Precision, model: ModelConfig) -> ModelConfig:
    """The model, whose routers take choices from the batch where rounding may tip a near tie."""
    if model.moe is None or precision == "float64":
        return model
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, replay=True))


def with_precision(precision: Precision, config: Config) -> Config:
    """The config in a precision, with kernels that compute in it.

    fp8 uses the config's 16-bit precision, or bfloat16; other precisions use native matmuls.
    """
    model = config.model
    half: Dtype = "float16" if model.dtype == "float16" else "bfloat16"
    dtype: Dtype = half if precision == "fp8" else precision
    products: Products = "fp8" if precision == "fp8" else "native"
    model = dataclasses.replace(_replaying(precision, model), dtype=dtype, products=products)
    if model.attention == "cudnn" and dtype not in REFERENCE_DTYPE:
        model = dataclasses.replace(model, attention="auto")
    if model.kernels == "triton" and dtype == "float64":
        model = dataclasses.replace(model, kernels="auto")
    return dataclasses.replace(config, model=model)


@dataclasses.dataclass(frozen=True)
class OneStep:
    """Runs single steps of a program from canonical parameters.

    Args:
        program: holds the step.
        options: the compiler's; None: its defaults.
    """

    program: Program
    options: Mapping[str, Any] | None = None

    def parameters(self) -> Tensors:
        """Initial parameters with a little noise, so that no bias or norm starts without effect."""
        params = self.program.canonical(self.program.init_state()["params"])
        return {
            name: np.asarray(p) + _noise(name, p.shape).astype(p.dtype)
            for name, p in params.items()
        }

    @property
    def replays(self) -> bool:
        """True if routers take choices from the batch."""
        moe = self.program.config.model.moe
        return moe is not None and moe.replay

    @cached_property
    def _given(self) -> dict[str, np.ndarray]:
        """Random numbers, as a user gives them."""
        config = self.program.config
        return random_batch(config, config.train.seed)

    @cached_property
    def batch(self) -> Batch:
        """A random batch."""
        return self.program.place(self._given)

    def _batch_with(self, choices: Choices | None) -> Batch:
        """The same batch, with choices of routers if there are any."""
        if choices is None:
            return self.batch
        return self.program.place(self._given | {CHOICES: choices.experts})

    def choices(self, params: Tensors) -> tuple[np.ndarray, np.ndarray]:
        """The choices of routers in step 0 from canonical `params`, see `Program.choices`."""
        return self.program.choices(self._state(params)["params"], self.batch, step=0)

    @cached_property
    def _step(self) -> Any:
        """The step, compiled once for all parameters that it is run from."""
        program: Any = self.program
        step = program.step_with_gradients
        if self.options is None:
            return step
        lowered = step.lower(program.abstract_state, program.abstract_batch)
        return lowered.compile(compiler_options=dict(self.options))

    def _state(self, params: Tensors) -> Any:
        """The state of step 0 with canonical `params`."""
        states = self.program.states
        stored = jax.tree.map(np.asarray, self._to_stored(params))  # sharded without a program
        return states.new(jax.device_put(stored, shardings(states.stored, self.program.mesh)))

    def run(self, params: Tensors, choices: Choices | None = None) -> Outcome:
        """Runs one step from canonical `params`, then another from the first's moments.

        choices: of routers; None: they choose themselves.
        """
        step, first, batch = self._step, self._state(params), self._batch_with(choices)
        state, metrics, grads = step(first, batch)
        while metrics.get("loss_scale", 1) > 1 and metrics["skipped_in_row"]:
            first = {**first, "guard": state["guard"]}  # with half the scale, as in training
            state, metrics, grads = step(first, batch)
        again, _, _ = step({**first, "optimizer": state["optimizer"]}, batch)
        return Outcome(
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            learning_rate=float(metrics["learning_rate"]),
            gradients=self._by_layer(grads),
            parameters=self._by_layer(state["params"]),
            again=self._by_layer(self.program.states.averaged(again)),
        )

    @cached_property
    def _to_stored(self) -> Callable[[Tensors], Params]:
        stored = self.program.states.stored
        return jax.jit(lambda params: {n: stored[n].from_canonical(p) for n, p in params.items()})

    @cached_property
    def _to_canonical(self) -> Callable[[Mapping[str, jax.Array]], Params]:
        return jax.jit(self.program.canonical)

    def _by_layer(self, tensors: Mapping[str, jax.Array]) -> Tensors:
        """Splits canonical stacks by layer: `blocks.mlp.up.w` -> `blocks.0.mlp.up.w`."""
        result: Tensors = {}
        for name, x in self._to_canonical(tensors).items():
            root, _, rest = name.partition(".")
            if self.program.infos[name].stack:
                layers = enumerate(np.asarray(x))
                result |= {f"{root}.{number}.{rest}": layer for number, layer in layers}
            else:
                result[name] = np.asarray(x)
        return result


def _noise(name: str, shape: Sequence[int]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return 0.02 * rng.standard_normal(shape).astype(np.float32)
