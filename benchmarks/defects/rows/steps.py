"""Defects of the step around the model: sums of losses and gradients, clipping, the optimizer."""

from benchmarks.breaks.table import Break
from benchmarks.defects.cases import CP, DP, PP, QWEN, ROW_COL, SP, THREE, TP, ZERO_1
from benchmarks.defects.table import Defect, Kind, Reach, known

BODY = "jaxptd/step/body.py"
TESTS = (  # steps of layouts that have pp, row, col; dp, tp; cp
    "tests/pipeline/test_training.py tests/reference/test_steps.py "
    "tests/models/test_sequence_padding.py"
)
OPTIMIZER = "jaxptd/step/optimizer.py"
MATRICES = "jaxptd/optimizers/matrices.py"
WHOLE = "tests/optimizers/test_whole_matrices.py"
MUON, ADAFACTOR = "optimizer.name=muon", "optimizer.name=adafactor"

LOSS_AXES = """axes = (Axis.PP, *BATCH_AXES, *self.resolved.form.axes.logit_tokens)
        varying = frozenset().union(*map(varying_axes, losses.values())).difference(axes)
        axes = (*axes, *(axis for axis in self.resolved.form.axes.tokens if axis in varying))"""
LOSS_SUM = "return lax.psum({name: as_varying(x, axes) for name, x in losses.items()}, axes)"
GRADIENT_SUM = "reduced |= lax.psum({name: grads[name] for name in names}, axes)"
# An axis -> the loss's axes without it, and a layout that has the axis. One for each axis that
# shards tokens, samples or layers.
LESS = {
    "pp": ("(*BATCH_AXES, *self.resolved.form.axes.logit_tokens)", PP),
    "dp": ("(Axis.PP, Axis.CP, *self.resolved.form.axes.logit_tokens)", DP),
    "cp": ("(Axis.PP, Axis.DP, *self.resolved.form.axes.logit_tokens)", CP),
    "row": ("(Axis.PP, *BATCH_AXES)", ROW_COL),
}
# No dim of a table splits over three stages, so that its gradient is owed over pp.
OF_AXIS = {"pp": THREE, "dp": DP, "cp": CP, "tp": SP, "row": ROW_COL}


def _loss_without(axis: str) -> Defect:
    less, case = LESS[axis]
    patch = Break(f"the loss is not summed over {axis}", BODY, LOSS_AXES, f"axes = {less}", TESTS)
    return Defect(Kind.SUM_FORWARD, patch, (case,))


def _loss_twice(axis: str) -> Defect:
    twice = f'jax.tree.map(lambda x: x * lax.axis_size("{axis}"), {LOSS_SUM[7:]})'
    patch = Break(
        f"the loss is summed over {axis} once more", BODY, LOSS_SUM, f"return {twice}", TESTS
    )
    return Defect(Kind.SUM_FORWARD, patch, (LESS[axis][1],))


def _gradients_of_first(axis: str) -> Defect:
    """Types stay as they are, so tracing cannot see it."""
    first = f'jnp.where(lax.axis_index("{axis}") == 0, grads[name], 0)'
    new = GRADIENT_SUM.replace(
        "grads[name] for", f'({first} if "{axis}" in axes else grads[name]) for'
    )
    words = "a norm's gradient without the tokens of others" if axis == "tp" else ""
    name = words or f"gradients over {axis} are those of its first device"
    kind = Kind.NORM if axis == "tp" else Kind.OWED
    return Defect(kind, Break(name, BODY, GRADIENT_SUM, new, TESTS), (OF_AXIS[axis],))


def _gradients_twice(axis: str) -> Defect:
    new = GRADIENT_SUM.replace(
        "grads[name] for", f'grads[name] * (lax.axis_size("{axis}") if "{axis}" in axes else 1) for'
    )
    patch = Break(f"gradients are summed over {axis} once more", BODY, GRADIENT_SUM, new, TESTS)
    return Defect(Kind.SUM_BACKWARD, patch, (OF_AXIS[axis],))


STEPS = (
    *map(_loss_without, LESS),
    *map(_loss_twice, LESS),
    *map(_gradients_of_first, OF_AXIS),
    *map(_gradients_twice, OF_AXIS),
    # ---- owed sums ----
    Defect(
        Kind.OWED,
        Break(
            "owed sums over one axis too few",
            BODY,
            GRADIENT_SUM,
            GRADIENT_SUM.replace(", axes)", ", axes[:-1])"),
            TESTS,
        ),
        (CP,),
    ),
    Defect(
        Kind.OWED,
        Break(
            "nothing is owed over the axes of the residual stream's tokens",
            BODY,
            "axes = (Axis.PP, *BATCH_AXES, *self.resolved.form.axes.tokens)",
            "axes = (Axis.PP, *BATCH_AXES)",
            "tests/analysis/test_traffic.py",
        ),
        (SP,),
        explained="the norm's parameters do not vary over tp then, and autodiff of the typed "
        "program sums their gradients where they meet the tokens: the same sum, more often",
    ),
    Defect(
        Kind.OWED,
        Break(
            "nothing is owed over the axes of a head's norm",
            BODY,
            "return tuple(a for a in (*axes, *others) if a not in stored.axes)",
            "return tuple(a for a in axes if a not in stored.axes)",
            "tests/analysis/test_traffic.py",
            "qwen3 and not blocks",
        ),
        (f"{TP} {QWEN}",),
        explained="as above: autodiff makes the sum in every layer, and moves more bytes",
    ),
    # ---- counts ----
    Defect(Kind.COUNT, known("the loss is a mean of one device's tokens"), (DP,)),
    Defect(
        Kind.COUNT,
        Break(
            "the loss is a mean over what all devices count together, once more",
            BODY,
            "name: lax.psum(x, [a for a in BATCH_AXES if a in varying_axes(x)])",
            "name: lax.axis_size(Axis.DP) * lax.psum(x, [a for a in BATCH_AXES if a in "
            "varying_axes(x)])",
            TESTS,
        ),
        (DP,),
    ),
    Defect(
        Kind.COUNT,
        Break(
            "targets are counted over dp only",
            BODY,
            "[a for a in BATCH_AXES if a in varying_axes(x)]",
            "[a for a in (Axis.DP,) if a in varying_axes(x)]",
            TESTS,
        ),
        (CP,),
    ),
    Defect(
        Kind.COUNT,
        Break(
            "targets that do not count are counted",
            BODY,
            "jnp.sum(batch[name] >= 0, dtype=jnp.int32)",
            "jnp.sum(batch[name] >= -1, dtype=jnp.int32)",
            "tests/reference/test_steps.py",
        ),
        (DP,),
        Reach.BOTH,
    ),
    # ---- micro-batches ----
    Defect(
        Kind.MICRO_BATCHES,
        Break(
            "gradients are reduced for each micro-batch, and once more",
            "jaxptd/step/passes.py",
            "gradient(handles_of(params))\n",
            "gradient(handles_of(params))\n"
            "        gradients = jax.tree.map(lambda g: as_varying(lax.psum(as_varying(g, "
            "[Axis.DP]), Axis.DP), [Axis.DP]), gradients)\n",
            "tests/step/test_program.py",
        ),
        (DP,),
    ),
    Defect(
        Kind.MICRO_BATCHES,
        Break(
            "only the last micro-batch has gradients outside of layers",
            "jaxptd/zero/sums.py",
            "return gradient if has_sum else rest + gradient",
            "return gradient",
            "tests/reference/test_steps.py",
        ),
        (DP,),
    ),
    # ---- clipping, scaling, updates ----
    Defect(Kind.CLIP, known("the norm counts what is sharded once per device"), (TP, ZERO_1)),
    Defect(
        Kind.CLIP,
        Break(
            "clipping by a local norm",
            OPTIMIZER,
            "sum(lax.psum(square, axes) if axes else square for",
            "sum(square for",
            "tests/step/test_optimizer.py",
        ),
        (TP,),
    ),
    Defect(
        Kind.CLIP,
        Break(
            "clipping by the mean of local norms",
            OPTIMIZER,
            "sum(lax.psum(square, axes) if axes else square for",
            "sum(lax.pmean(square, axes) if axes else square for",
            "tests/step/test_optimizer.py",
        ),
        (TP,),
    ),
    Defect(
        Kind.SCALE,
        Break(
            "the scale of float16 is not undone",
            "jaxptd/step/skipping.py",
            "return jax.tree.map(lambda x: x / scale, tree) if scales(dtype) else tree",
            "return tree",
            "tests/step/test_skipping.py",
        ),
        ("layout.tp=2 model.dtype=float16",),
        Reach.BOTH,
    ),
    # ---- optimizers of whole matrices ----
    Defect(
        Kind.OPTIMIZER,
        known("blocks of matrices are taken for matrices"),
        (f"{TP} {MUON}",),
    ),
    Defect(Kind.OPTIMIZER, known("means of rows are those of a block"), (f"{TP} {ADAFACTOR}",)),
    Defect(
        Kind.OPTIMIZER,
        Break(
            "a shard's means at the place of the next",
            MATRICES,
            "first = lax.axis_index(BATCH_AXES) * self.stored.shard_size",
            "first = (lax.axis_index(BATCH_AXES) + 1) % lax.axis_size(BATCH_AXES) * "
            "self.stored.shard_size",
            WHOLE,
            "layouts",
        ),
        (f"{ZERO_1} {ADAFACTOR}",),
    ),
    Defect(
        Kind.OPTIMIZER,
        Break(
            "matrices come back to the device after",
            MATRICES,
            "return lax.all_to_all(fn(mine), axes, dim, 0, tiled=True)[:count]",
            "return jnp.roll(lax.all_to_all(fn(mine), axes, dim, 0, tiled=True), 1, 0)[:count]",
            WHOLE,
            "layouts",
        ),
        (f"{TP} {MUON}",),
    ),
    Defect(
        Kind.OPTIMIZER,
        Break(
            "means are over rows and columns of a device",
            MATRICES,
            "return math.prod(self.info.shape[dim] for dim in self.dims(kinds))",
            "return math.prod(self.info.shape[dim] for dim in self.dims(kinds)) // "
            "math.prod(lax.axis_size(a) for a in self.axes(kinds))",
            WHOLE,
            "layouts",
        ),
        (f"{TP} {ADAFACTOR}",),
    ),
    Defect(
        Kind.OPTIMIZER,
        known("padding is part of a matrix"),
        (f"{TP} {MUON} model.ffn_hidden_size=23",),
    ),
    # ---- offload ----
    Defect(
        Kind.OFFLOAD,
        Break(
            "what comes from host memory loses its last digits",
            "jaxptd/zero/host.py",
            "jax.device_put(x, jax.memory.Space.Device) if is_on_host(x)",
            "jax.lax.reduce_precision(jax.device_put(x, jax.memory.Space.Device), 8, 7) if "
            "is_on_host(x) and x.ndim",
            "tests/step/test_offload.py",
        ),
        ("layout.tp=2 layout.offload=optimizer",),
    ),
)
