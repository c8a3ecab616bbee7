"""Breaks of models with several stacks of layers, of common parameters, and of images."""

from benchmarks.breaks.table import Break

EXECUTOR = "tests/pipeline/test_stacks.py"
STEPS = "tests/step/test_stacks.py"
LAYOUTS = "tests/models/test_swin.py"
REFERENCE = "tests/reference/test_images.py"
IMAGES_DATA = "tests/data/images/test_images.py"
LOSS = "tests/layers/images/test_image_loss.py"
DISTANCE = "tests/layers/images/test_distance.py"

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
        "jaxptd/pipeline/programs.py",
        "        read = [read[equation.outvars.index(result)]]\n",
        "        pass\n",
        "tests/pipeline/test_again.py",
    ),
    Break(
        "W makes products again",
        "jaxptd/pipeline/programs.py",
        "if is_heavy(eqn) or not",
        "if not",
        "tests/pipeline/test_again.py",
    ),
    Break(
        "no block passes around the ring again",
        "jaxptd/pipeline/programs.py",
        'is_named |= eqn.params.get("name") == AGAIN',
        "is_named |= False",
        "tests/analysis/test_traffic.py",
        "zb-v",
    ),
)

IMAGES = (
    Break(
        "losses of images are not summed over the devices that share them",
        "jaxptd/layers/axes.py",
        "return lax.psum(s, axes) if axes else s",
        "return lax.pmax(s, axes) if axes else s",
        LAYOUTS,
        "one_devices",
    ),
    Break(
        "a shifted window sees all of its patches",
        "jaxptd/layers/images/windows.py",
        "return in_last.astype(jnp.int32) + (rolled & in_last)",
        "return 0 * in_last.astype(jnp.int32)",
        LAYOUTS,
        "sees_neighbours",
    ),
    Break(
        "windows are not moved back",
        "jaxptd/layers/images/windows.py",
        "o = _rolled(self.windows.join(checkpoint_name(o, CORE)), shift)",
        "o = self.windows.join(checkpoint_name(o, CORE))",
        REFERENCE,
        "of_the_reference",
    ),
    Break(
        "biases of a window are of the place of the query from the key",
        "jaxptd/layers/images/windows.py",
        "each[:, None] - each[None, :] + self.size - 1",
        "each[None, :] - each[:, None] + self.size - 1",
        REFERENCE,
        "of_the_reference",
    ),
    Break(
        "weights of losses are rounded to float32",
        "jaxptd/step/body.py",
        "scale = scale.astype(dtype)",
        "scale = scale + 0",
        REFERENCE,
        "of_the_reference",
    ),
    Break(
        "a Dice loss is not weighted by the pixels of its image",
        "jaxptd/layers/images/loss.py",
        "return jnp.sum(loss_B * jnp.sum(counts_BRQ1, (1, 2, 3)))",
        "return jnp.mean(loss_B) * jnp.sum(counts_BRQ1)",
        LOSS,
        "dice_loss",
    ),
    Break(
        "labels are not turned with their images",
        "jaxptd/data/images/samples.py",
        "return _turned(image, turn), _turned(label, turn)",
        "return _turned(image, turn), label",
        IMAGES_DATA,
        "turned_alike",
    ),
    Break(
        "phantoms of validation are those of training",
        "jaxptd/data/images/phantoms.py",
        "counter = np.array([0, 0, stream, number], np.uint64)",
        "counter = np.array([0, 0, 0, number], np.uint64)",
        IMAGES_DATA,
        "function_of_its_seed",
    ),
    Break(
        "Hausdorff distances are of one border to the other only",
        "jaxptd/layers/images/distance.py",
        "zip(borders, borders[::-1], strict=True)",
        "zip(borders[:1], borders[1:], strict=True)",
        DISTANCE,
        "all_pairs",
    ),
    Break(
        "rows of an image are not apart",
        "jaxptd/layers/images/distance.py",
        "along_Q[..., None, :] + apart_R[:, None]",
        "along_Q[..., None, :] + 0 * apart_R[:, None]",
        DISTANCE,
    ),
    Break(
        "classes of images are those of one device's",
        "jaxptd/layers/axes.py",
        "for axis in reversed(self.tokens):\n            x_b = ",
        "for axis in ():\n            x_b = ",
        "tests/run/images/test_classes.py",
        "one_device",
    ),
    Break(
        "lines of a PNG are not undone by the ones above",
        "jaxptd/data/images/png.py",
        "row[:] = line + before",
        "row[:] = line",
        "tests/data/images/test_png.py",
    ),
    Break(
        "the last classes by name are held out",
        "jaxptd/data/images/files.py",
        "((place + 0.5) / len(files), number, path)",
        "(0.0, number, path)",
        IMAGES_DATA,
        "folders",
    ),
)
