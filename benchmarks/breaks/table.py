"""The breaks: the place, the replacement, and the tests that must notice."""

from typing import NamedTuple


class Break(NamedTuple):
    """One break.

    name: the mistake that it makes.
    file: of the package.
    old: text that the file has once.
    new: the text that replaces it.
    tests: files of tests that are run.
    select: pytest's -k, or nothing.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    select: str = ""


CONTRACT = "tests/layers/test_contract.py"
RING = "tests/test_ring_attention.py"
SUMMA = "tests/test_summa2d.py"
PIPELINE = "tests/pipeline/test_executor.py"

BREAKS = (
    # ---- collectives ----
    Break(
        "reduce_from sums nothing",
        "jaxptd/collectives.py",
        "    return lax.psum(x, axis)\n\n\ndef local_block",
        "    return lax.pmax(x, axis)\n\n\ndef local_block",
        "tests/test_collectives.py",
    ),
    Break(
        "local block of the next device",
        "jaxptd/collectives.py",
        "start = lax.axis_index(axis) * (size // blocks)",
        "start = (lax.axis_index(axis) + 1) % blocks * (size // blocks)",
        "tests/test_collectives.py",
    ),
    Break(
        "scatter_to's gradient not gathered in order",
        "jaxptd/collectives.py",
        "return (gather_from(dy, axis, dim),)",
        "return (gather_from(dy[::-1], axis, dim),)",
        "tests/test_collectives.py",
    ),
    Break(
        "all_gather puts blocks in the other order",
        "jaxptd/collectives.py",
        "y = jnp.moveaxis(lax.all_gather(x, axis), 0, dim)",
        "y = jnp.moveaxis(lax.all_gather(x, axis)[::-1], 0, dim)",
        "tests/test_collectives.py",
    ),
    Break(
        "ring turned round",
        "jaxptd/collectives.py",
        "(i, (i + by) % size)",
        "(i, (i - by) % size)",
        f"tests/test_collectives.py {RING}",
    ),
    Break(
        "permute by gather takes its own block",
        "jaxptd/collectives.py",
        "mine = jnp.asarray(number, jnp.int32)[lax.axis_index(axes)]",
        "mine = jnp.asarray(number, jnp.int32)[0] * 0",
        "tests/test_collectives.py",
    ),
    # ---- attention ----
    Break(
        "scores scaled twice",
        "jaxptd/attention/xla.py",
        "add_bias(s_GTS * scores.scale, sites, groups)",
        "add_bias(s_GTS * scores.scale**2, sites, groups)",
        "tests/attention/test_xla.py",
    ),
    Break(
        "gradient of scores not scaled",
        "jaxptd/attention/xla.py",
        "ds_GTS = (ds_GTS * scores.scale).astype(dtype)",
        "ds_GTS = ds_GTS.astype(dtype)",
        "tests/attention/test_xla.py",
    ),
    Break(
        "dropout of probabilities forgotten in dv",
        "jaxptd/attention/xla.py",
        "dropped_GTS = drop_groups(p_GTS, sites, dropout).astype(dtype)",
        "dropped_GTS = p_GTS.astype(dtype)",
        "tests/attention/test_xla.py",
    ),
    Break(
        "a zigzag's second chunk at its first one's mirror",
        "jaxptd/attention/ring.py",
        "((2 * devices - 1 - device) * half, length - half)",
        "((2 * devices - 2 - device) % (2 * devices) * half, length - half)",
        f"tests/attention/test_ring.py {RING}",
    ),
    Break(
        "forward ring believes the block is the next device's",
        "jaxptd/attention/ring.py",
        "return (ring.shift(x), visit(total, x, (me - hop) % size)), None",
        "return (ring.shift(x), visit(total, x, (me + hop) % size)), None",
        RING,
    ),
    Break(
        "gradients of keys stay one device too early",
        "jaxptd/attention/ring.py",
        "return total, ring.shift(dx, -hops)",
        "return total, dx",
        RING,
    ),
    Break(
        "causal ring sees later devices",
        "jaxptd/attention/tiles.py",
        "return lax.cond(source < me, visit_all",
        "return lax.cond(source > me, visit_all",
        RING,
    ),
    Break(
        "documents of the sender ignored",
        "jaxptd/attention/ring.py",
        "_of_device(tokens.key_segment_BCS, source)",
        "_of_device(tokens.key_segment_BCS, lax.axis_index(self.axis))",
        RING,
    ),
    # ---- grid ----
    Break(
        "SUMMA broadcasts the first device's panels only",
        "jaxptd/matmul/grid.py",
        "return broadcast(local, self.axis, source)",
        "return broadcast(local, self.axis, 0)",
        SUMMA,
        "summa",
    ),
    Break(
        "gradient of A multiplied with B instead of its transpose's blocks",
        "jaxptd/summa2d.py",
        "along_row, along_column = panel_moves(grid, first=1)",
        "along_row, along_column = panel_moves(grid, first=0)",
        SUMMA,
        "fox or cannon",
    ),
    Break(
        "padding of the hidden units not zeroed",
        "jaxptd/layers/axes.py",
        "return jnp.where(_numbers(axis, x.shape[-1]) < size, x, 0)",
        "return x",
        CONTRACT,
        "slices and (norm or block)",
    ),
    # ---- collective matmul ----
    Break(
        "collective matmul: a block too early",
        "jaxptd/matmul/ring.py",
        "source, now = (me - step) % size, x",
        "source, now = (me - step - 1) % size, x",
        "tests/matmul/test_ring.py",
    ),
    Break(
        "collective matmul: dw in the precision of x",
        "jaxptd/matmul/ring.py",
        "return dot(x, y, COLUMNS_BY_COLUMNS, wide, gradient=1)",
        "return dot(x, y, COLUMNS_BY_COLUMNS, x.dtype, gradient=1)",
        "tests/matmul/test_ring.py",
    ),
    # ---- layers ----
    Break(
        "norm's gradient without the mean of g n",
        "jaxptd/layers/norm.py",
        "g_BTD - mean_g - n_BTD * mean_gn",
        "g_BTD - mean_g",
        "tests/layers/test_dense.py",
    ),
    Break(
        "tokens of the residual stream not sharded for dropout",
        "jaxptd/layers/axes.py",
        "return _local_block(position_T, self.tokens, 0)",
        "return position_T[: position_T.shape[0] // (lax.axis_size(self.tokens[0]) "
        "if self.tokens else 1)]",
        CONTRACT,
        "block and sequence_parallel",
    ),
    Break(
        "rows of the vocabulary of the device before",
        "jaxptd/layers/axes.py",
        "mine = (local >= 0) & (local < table.shape[0])",
        "mine = (local > 0) & (local < table.shape[0])",
        CONTRACT,
        "embedding",
    ),
    Break(
        "maximum over the vocabulary is local",
        "jaxptd/layers/axes.py",
        "return lax.psum(s, self.inner)",
        "return lax.pmax(s, self.inner)",
        f"{CONTRACT} tests/layers/test_loss.py",
        "loss",
    ),
    # ---- step ----
    Break(
        "the loss is a mean of one device's tokens",
        "jaxptd/step/body.py",
        "name: lax.psum(x, [a for a in BATCH_AXES if a in varying_axes(x)])",
        "name: x",
        "tests/step tests/test_verify.py",
    ),
    Break(
        "samples of all devices have the same numbers",
        "jaxptd/step/body.py",
        "sample_B = lax.axis_index(Axis.DP) * size + jnp.arange(size, dtype=jnp.int32)",
        "sample_B = lax.axis_index(Axis.DP) * 0 + jnp.arange(size, dtype=jnp.int32)",
        "tests/reference/test_steps.py tests/zero",
    ),
    Break(
        "clipping to twice the limit",
        "jaxptd/step/optimizer.py",
        "scale = limit / jnp.maximum(norm, limit)",
        "scale = 2 * limit / jnp.maximum(norm, 2 * limit)",
        "tests/step/test_optimizer.py",
    ),
    Break(
        "the norm counts what is sharded once per device",
        "jaxptd/step/optimizer.py",
        "sum(lax.psum(square, axes) if axes else square",
        "sum(lax.pmax(square, axes) if axes else square",
        "tests/step tests/test_verify.py",
    ),
    Break(
        "warm-up from zero",
        "jaxptd/step/optimizer.py",
        "(done + 1) / max(config.warmup_steps, 1)",
        "done / max(config.warmup_steps, 1)",
        "tests/step/test_optimizer.py",
    ),
    # ---- pipeline ----
    Break(
        "layers of a part in the wrong order",
        "jaxptd/pipeline/executor.py",
        "offset = end - 1 - i if reverse else begin + i",
        "offset = begin + i",
        PIPELINE,
    ),
    Break(
        "layers of all parts have the numbers of the first",
        "jaxptd/pipeline/executor.py",
        'inputs = LayerInputs(places, instruction[of_stack("layer", stack)] + offset)',
        "inputs = LayerInputs(places, offset)",
        f"{PIPELINE} tests/pipeline/test_training.py",
    ),
    Break(
        "bodies of loops do not depend on the trip",
        "jaxptd/pipeline/pools.py",
        "{key: number + i for key, number in instruction.items()}",
        "dict(instruction)",
        "tests/pipeline tests/analysis/test_traffic.py",
    ),
    Break(
        "ticks that take no hop take the first one",
        "jaxptd/pipeline/hops.py",
        "numbers = {hops: number for number, hops in enumerate(self.together)}",
        "numbers = {hops: max(number, 1) for number, hops in enumerate(self.together)}",
        "tests/pipeline/test_hops.py",
    ),
)
