"""Defects of ZeRO: shards, their gathers and reduce-scatters, their moments."""

from benchmarks.breaks.table import Break
from benchmarks.defects.cases import TP, ZERO_1, ZERO_2, ZERO_3
from benchmarks.defects.table import Defect, Kind, known

TESTS = "tests/zero/test_zero.py tests/zero/test_prefetching.py"
SHARDS, GATHERING = "jaxptd/zero/shards.py", "jaxptd/zero/gathering.py"
UPDATE = "jaxptd/step/update.py"
STEP = "chosen(sound, old[name] - step, old[name])"
NEXT = (
    "lax.ppermute(m, 'dp', "
    "[(i, (i + 1) % lax.axis_size('dp')) for i in range(lax.axis_size('dp'))])"
)
MOVED = f"jax.tree.map(lambda m: m if 'dp' not in varying_axes(m) else {NEXT}"

ZERO = (
    # ---- shards ----
    Defect(
        Kind.SHARD,
        Break(
            "shards are gathered an element too far",
            SHARDS,
            "        return self.unflatten(flat)\n",
            "        return self.unflatten(jnp.roll(flat, 1, -1))\n",
            TESTS,
        ),
        (ZERO_1,),
    ),
    Defect(
        Kind.SHARD,
        Break(
            "gradients of the next shard",
            SHARDS,
            "        flat = self.flatten(gradient)\n",
            "        flat = jnp.roll(self.flatten(gradient), self.shard_size, -1)\n",
            TESTS,
        ),
        (ZERO_1,),
    ),
    Defect(
        Kind.SHARD,
        Break(
            "a layer's shards are gathered in turned order",
            GATHERING,
            "columns = _split(rows, [",
            "columns = _split(rows[::-1], [",
            TESTS,
        ),
        (ZERO_3,),
    ),
    Defect(
        Kind.SHARD,
        Break(
            "a layer's gradients go to the next shard",
            GATHERING,
            "lax.psum_scatter(jnp.concatenate(rows, axis=1), BATCH_AXES, tiled=True)",
            "lax.psum_scatter(jnp.roll(jnp.concatenate(rows, axis=1), 1, 0), BATCH_AXES, "
            "tiled=True)",
            TESTS,
        ),
        (ZERO_2,),
    ),
    Defect(
        Kind.SHARD,
        Break(
            "shards of dp hold the blocks of tp in turned order",
            SHARDS,
            "return [*range(self.lead), *range(self.lead, end, 2), *range(self.lead + 1, end, 2)]",
            "return [*range(self.lead), *range(self.lead + 1, end, 2), *range(self.lead, end, 2)]",
            TESTS,
        ),
        (f"layout.dp=2 {TP} layout.zero=1",),
    ),
    Defect(Kind.SUM_BACKWARD, known("ZeRO: gradients of layers are halved"), (ZERO_3,)),
    Defect(
        Kind.MICRO_BATCHES,
        Break(
            "gradients of layers are scattered once more at the end of the step",
            "jaxptd/zero/zero.py",
            "if not isinstance(stored, ShardedInfo) or self.is_scattered(name):",
            "if not isinstance(stored, ShardedInfo):",
            TESTS,
        ),
        (ZERO_2,),
    ),
    # ---- stale parameters ----
    Defect(
        Kind.STALE,
        Break(
            "a step leaves shards as they were",
            UPDATE,
            STEP,
            'old[name] if "dp" in varying_axes(old[name]) else chosen(sound, old[name] - step, '
            "old[name])",
            TESTS,
        ),
        (ZERO_3,),
    ),
    Defect(
        Kind.STALE,
        Break(
            "backward gathers parameters that are a thousandth too small",
            GATHERING,
            "        return jax.tree.map(lax.optimization_barrier, leaf) if",
            "        return jax.tree.map(lambda x: x * (1 - 1e-3), leaf) if",
            TESTS,
        ),
        (ZERO_3,),
    ),
    Defect(
        Kind.STALE,
        Break(
            "a shard is updated from its neighbour's parameters",
            UPDATE,
            STEP,
            "chosen(sound, (old[name] if 'dp' not in varying_axes(old[name]) else "
            f"{NEXT.replace('(m,', '(old[name],')}) - step, old[name])",
            TESTS,
        ),
        (ZERO_1,),
    ),
    # ---- moments ----
    Defect(
        Kind.STATE,
        Break(
            "a step reads the moments of another shard",
            UPDATE,
            "{name: gradient}, kept, old,",
            f"{{name: gradient}}, {MOVED}, kept), old,",
            TESTS,
        ),
        (ZERO_1,),
    ),
    Defect(
        Kind.STATE,
        Break(
            "a step leaves its moments on another shard",
            UPDATE,
            "moments.append(new)",
            f"moments.append({MOVED}, new))",
            TESTS,
        ),
        (ZERO_1,),
    ),
)
