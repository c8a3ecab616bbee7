"""Breaks of optimizers, of checkpoints that change their layout, and of XLA's options."""

from benchmarks.breaks.table import Break

OPTIMIZER = "tests/step/test_optimizer.py"
WHOLE = "tests/optimizers"
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
    # ---- compiled pipelines ----
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
)
