"""Breaks of optimizers, checkpoints that change layouts, pipelines, XLA's options, our kernels."""

from benchmarks.breaks.table import Break

OPTIMIZER = "tests/step/test_optimizer.py"
WHOLE = "tests/optimizers"
PEERS = "benchmarks/peers/test_memory.py"
CONVERSION = "tests/checkpoint/test_conversion.py"

TRAINING = (
    # ---- optimizers ----
    Break(
        "Lion's two means exchanged",
        "jaxptd/step/optimizer.py",
        "optax.scale_by_lion(c.beta1, c.beta2)",
        "optax.scale_by_lion(c.beta2, c.beta1)",
        OPTIMIZER,
    ),
    Break(
        "a decay that ends with the run",
        "jaxptd/step/optimizer.py",
        "end = config.decay_steps or steps",
        "end = steps",
        OPTIMIZER,
    ),
    Break(
        "q, k and v as one matrix",
        "jaxptd/layers/linear.py",
        '"r" + "s" * parts + "c" * (dims - parts)',
        '"r" + "c" * dims',
        WHOLE,
        "muon_takes",
    ),
    Break(
        "padding is part of a matrix",
        "jaxptd/optimizers/matrices.py",
        "cropped = x[(slice(None), *map(slice, sizes))]",
        "cropped = x",
        WHOLE,
        "layouts",
    ),
    Break(
        "blocks of matrices are taken for matrices",
        "jaxptd/optimizers/matrices.py",
        "if axes := info.axes_of_dims[dim]:",
        "if axes := ():",
        WHOLE,
        "layouts",
    ),
    Break(
        "means of rows are those of a block",
        "jaxptd/optimizers/matrices.py",
        "(lax.psum(total, axes) if axes else total) / self.size(kinds)",
        "(lax.pmax(total, axes) if axes else total) / self.size(kinds)",
        WHOLE,
        "layouts",
    ),
    Break(
        "the padding of rows is in their mean",
        "jaxptd/optimizers/matrices.py",
        "x = jnp.where(numbers < size, x, 0)",
        "x = jnp.where(numbers >= 0, x, 1)",
        WHOLE,
        "layouts",
    ),
    Break(
        "Newton-Schulz without its fifth power",
        "jaxptd/optimizers/muon.py",
        "c * gram_RR @ gram_RR",
        "c * gram_RR",
        WHOLE,
        "newton_schulz",
    ),
    # ---- memory ----
    Break(
        "a skipped step has Adam's new moments",
        "jaxptd/optimizers/kept.py",
        "_, new = adam.update(grads, state, sound=sound)",
        "_, new = adam.update(grads, state)",
        "tests/step/test_skipping.py",
        "explosion",
    ),
    Break(
        "forward keeps the normalised x",
        "jaxptd/layers/norm.py",
        "wide(*new())",
        "wide(x_BTD, dy_BTD)",
        PEERS,
        "tp",
    ),
    Break(
        "forward computes backward's scores",
        "jaxptd/ring_attention.py",
        "q, do = lax.optimization_barrier((saved.q, do))",
        "q = saved.q",
        PEERS,
        "dp",
    ),
    # ---- verify ----
    Break(
        "verify's second step begins with moments of zero",
        "jaxptd/analysis/verification.py",
        'step({**first, "optimizer": state["optimizer"]}, self.batch)',
        "step(first, self.batch)",
        "tests/analysis/test_verification.py -m slow",
        "moments_on",
    ),
    Break(
        "what whole matrices round in their products is not allowed for",
        "jaxptd/analysis/first_steps.py",
        "+ ROUNDINGS * products * np",
        "+ 0 * products * np",
        "tests/analysis/test_first_steps.py",
    ),
    # ---- pipelines ----
    Break(
        "interleaved stages run F and B at the same ticks",
        "jaxptd/pipeline/schedules.py",
        "alternates=True",
        "alternates=False",
        "tests/pipeline/test_statistics.py tests/pipeline/test_hops.py",
        "interleaved",
    ),
    Break(
        "of the operations that share a switch, the one that saves comes first",
        "jaxptd/pipeline/plan.py",
        'return ("weight" if self.splits else "backward"), "forward"',
        'return "forward", ("weight" if self.splits else "backward")',
        "tests/pipeline/test_copies.py",
        "no_tick_copies",
    ),
    Break(
        "loops of stages count as one trip in compiled programs",
        "jaxptd/analysis/hlo/text.py",
        "known = loop_runs(each, times, self.trips)",
        "known = loop_runs(each, times, {})",
        "tests/analysis/hlo/test_kernels.py",
    ),
    Break(
        "branches of stages count as often as their conditional",
        "jaxptd/analysis/jaxprs.py",
        "yield inner, known.get(number, 0) if known else times",
        "yield inner, times",
        "tests/analysis/test_traffic.py",
    ),
    Break(
        "the last condition of a loop makes nothing wait",
        "jaxptd/analysis/hlo/waits.py",
        "found += times + sum(number for _, number in runs)",
        "found += sum(number for _, number in runs)",
        "tests/analysis/hlo/test_waits.py",
    ),
    # ---- checkpoints between layouts ----
    Break(
        "what is outside of a block is written, too",
        "jaxptd/checkpoint/parts.py",
        "& (entries >= 0) & (entries < size)",
        "& (entries >= 0)",
        CONVERSION,
    ),
    Break(
        "a shard begins with a whole entry",
        "jaxptd/checkpoint/parts.py",
        "* self.width - jnp.asarray(rest, jnp.int32)[shard]",
        "* self.width",
        CONVERSION,
    ),
    Break(
        "a piece as long as a device's line",
        "jaxptd/checkpoint/conversion.py",
        "line // (4 * math.prod",
        "line // (1 * math.prod",
        CONVERSION,
    ),
    Break(
        "canonical arrays are not sharded over the axes of padding",
        "jaxptd/checkpoint/canonical.py",
        "for axis in Axis:",
        "for axis in (Axis.PP, Axis.DP, Axis.CP):",
        "tests/checkpoint/test_canonical.py",
        "host_memory",
    ),
    # ---- XLA's options ----
    Break(
        "permutes join what they connect with Cannon's algorithm, too",
        "jaxptd/config/xla.py",
        'layout.matmul2d != "cannon"',
        'layout.matmul2d != ""',
        "tests/config/test_xla.py",
        "divisions",
    ),
    # ---- loggers and traces ----
    Break(
        "a service gets the steps of a resumed run again",
        "jaxptd/run/loggers/service.py",
        'if row["step"] <= self._last:',
        'if row["step"] < 0:',
        "tests/run/loggers/test_services.py",
    ),
    Break(
        "a resumed run begins its logs with rows after the checkpoint",
        "jaxptd/run/folder.py",
        'rows = [row for row in rows if row["step"] <= step]',
        "rows = list(rows)",
        "tests/run/loggers/test_comma_separated.py",
    ),
    Break(
        "metrics.csv forgets the rows before a new column",
        "jaxptd/run/loggers/comma_separated.py",
        "self._rewrite(self._columns, [*written, *self._waiting])",
        "self._rewrite(self._columns, self._waiting)",
        "tests/run/loggers/test_comma_separated.py",
    ),
    Break(
        "TensorBoard's config is no code",
        "jaxptd/run/loggers/tensorboard.py",
        'f"    {line}\\n"',
        'f"{line}\\n"',
        "tests/run/loggers/test_tensorboard.py",
    ),
    Break(
        "a trace has one step too many",
        "jaxptd/run/trace.py",
        "if step == self._last:",
        "if step == self._last + 1:",
        "tests/run/test_trace.py",
        "window",
    ),
    Break(
        "activations stay on the device where the state is offloaded, too",
        "jaxptd/step/resolved.py",
        'offload = "activations" in self.config.layout.offloaded',
        'offload = self.config.layout.offload == "activations"',
        "tests/step/test_offload.py",
        "state_and",
    ),
)
