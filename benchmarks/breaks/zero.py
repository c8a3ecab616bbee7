"""Breaks of ZeRO, and of the gradients of layers in a loop."""

from benchmarks.breaks.table import Break

ZERO = (
    Break(
        "ZeRO: gradients of layers are halved",
        "jaxptd/zero/gathering.py",
        "sums = lax.psum_scatter(jnp.concatenate(rows, axis=1), BATCH_AXES, tiled=True)",
        "sums = lax.psum_scatter(jnp.concatenate(rows, axis=1), BATCH_AXES, tiled=True) / 2",
        "tests/zero",
    ),
    Break(
        "ZeRO: backward uses what forward gathered",
        "jaxptd/zero/gathering.py",
        "return jax.tree.map(behind_barrier, layer, is_leaf=_is_gatherable)",
        "return layer",
        "tests/zero/test_costs.py",
        "unrolled",
    ),
    Break(
        "ZeRO: a loop's layers gather themselves",
        "jaxptd/layers/block.py",
        "if scanned and is_gathered(stack):",
        "if False:",
        "tests/zero/test_prefetching.py",
    ),
    Break(
        "gradients of a loop's layers are in their precision",
        "jaxptd/zero/shapes.py",
        "return self.narrows and narrower and self.infos[name].stack is not None",
        "return False",
        "tests/zero/test_narrowing.py",
        "precision",
    ),
    Break(
        "a layer that nothing gathers is not gathered again",
        "jaxptd/zero/gathering.py",
        "return self.info is not None or is_on_host(self.shard)",
        "return True",
        "tests/zero/test_narrowing.py",
        "not_gathered_again",
    ),
    Break(
        "gradients reach their handles",
        "jaxptd/zero/gathering.py",
        "return None, gradient.astype(like.dtype)",
        "return gradient, jnp.zeros_like(gradient, like.dtype)",
        "tests/zero/test_narrowing.py",
        "rounded",
    ),
    Break(
        "ZeRO: gradients are sent to the layer below",
        "jaxptd/zero/prefetching.py",
        "found = send(found, gradients, i + 1)",
        "found = send(found, gradients, i)",
        "tests/zero",
        "equals_one_device",
    ),
    Break(
        "ZeRO: blocks that are held belong to the layer above",
        "jaxptd/zero/prefetching.py",
        "return (x, following, hold(held, following, i + 1)), result",
        "return (x, following, hold(held, following, i)), result",
        "tests/zero/test_prefetching.py",
        "equals_one_device",
    ),
    Break(
        "ZeRO: stage 1 sends gradients after backward also where nothing is summed",
        "jaxptd/config/run.py",
        "return 2 if alike else self.layout.zero",
        "return self.layout.zero",
        "tests/zero/test_prefetching.py",
    ),
    Break(
        "ZeRO: stage 2 gathers all layers at the beginning of the step",
        "jaxptd/zero/shapes.py",
        "alone = self.fetches or self.holds",
        "alone = self.fetches",
        "tests/zero/test_prefetching.py",
    ),
)
