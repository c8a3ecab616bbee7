"""Breaks of models with several stacks of layers, and of parameters that all layers read."""

from benchmarks.breaks.table import Break

EXECUTOR = "tests/pipeline/test_stacks.py"
STEPS = "tests/step/test_stacks.py"

STACKS = (
    Break(
        "the decoder's first stage has no embedding",
        "jaxptd/mesh.py",
        "first_stages = {0, split_rank or 0}",
        "first_stages = {0}",
        "tests/test_mesh.py",
        "megatron",
    ),
    Break(
        "parts without layers of a stack take its slots",
        "jaxptd/pipeline/plan.py",
        "for stack in (stack for stack, sizes in self.stacks.items() if sizes[part]):",
        "for stack in self.stacks:",
        EXECUTOR,
        "slots",
    ),
    Break(
        "a decoder's layers have the numbers of the encoder's",
        "jaxptd/pipeline/placement.py",
        "        before += sum(of_parts)\n",
        "",
        EXECUTOR,
        "gradients",
    ),
    Break(
        "backward goes through the encoder first",
        "jaxptd/pipeline/executor.py",
        "in reversed(kinds) if reverse else kinds:",
        "in kinds:",
        EXECUTOR,
        "gradients",
    ),
    Break(
        "chunks without layers of a stack have rows of it",
        "jaxptd/pipeline/placement.py",
        "(max(sizes) * (chunk in used) for chunk in",
        "(max(sizes) for chunk in",
        "tests/pipeline/test_placement.py",
    ),
    Break(
        "common parameters get the gradient of one layer",
        "jaxptd/pipeline/training.py",
        "common=jax.tree.map(jnp.add, carry.common, common),",
        "common=common,",
        EXECUTOR,
        "gradients",
    ),
    Break(
        "residuals made of the second array of x are not saved",
        "jaxptd/pipeline/split_backward.py",
        "of_x = program.arguments[others:]",
        "of_x = program.arguments[others : others + 1]",
        EXECUTOR,
        "gradients",
    ),
    Break(
        "a hop counts one array of x",
        "jaxptd/analysis/traffic/pipeline.py",
        "for size in sizes.streams:",
        "for size in sizes.streams[:1]:",
        STEPS,
        "moves",
    ),
    Break(
        "messages of ZeRO have the parameters of all stacks",
        "jaxptd/analysis/traffic/zero.py",
        "own = stored.info.stack == stack.name",
        "own = True",
        STEPS,
        "moves",
    ),
    Break(
        "layers of the second stack are numbered from 0 without a pipeline",
        "jaxptd/models/model.py",
        "        first += number_of_layers(stack)\n",
        "",
        "tests/models/test_model.py",
    ),
    Break(
        "a barrier's result depends on all of its operands",
        "jaxptd/pipeline/again.py",
        "        read = [read[equation.outvars.index(result)]]\n",
        "        pass\n",
        "tests/pipeline/test_again.py",
    ),
    Break(
        "W makes products again",
        "jaxptd/pipeline/again.py",
        "if is_heavy(eqn) or not",
        "if not",
        "tests/pipeline/test_again.py",
    ),
    Break(
        "no block passes around the ring again",
        "jaxptd/pipeline/again.py",
        'is_named |= eqn.params.get("name") == AGAIN',
        "is_named |= False",
        "tests/analysis/test_traffic.py",
        "zb-v",
    ),
)
