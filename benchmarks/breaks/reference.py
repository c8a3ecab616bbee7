"""Breaks that one device and all layouts share, so that `verify` cannot see them."""

from benchmarks.breaks.table import Break

STEPS = "tests/reference/test_steps.py"
DROPOUT = "jaxptd/layers/dropout.py"

_SHARED = (
    Break(
        "targets of token 0 are not counted",
        "jaxptd/step/body.py",
        "jnp.sum(batch[name] >= 0, dtype",
        "jnp.sum(batch[name] > 0, dtype",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "what dropout keeps is not scaled",
        DROPOUT,
        "jnp.where(keep_BTD, x_BTD / (1 - rate), 0)",
        "jnp.where(keep_BTD, x_BTD, 0)",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "Adam's mean of gradients a step ahead, as Nesterov's",
        "jaxptd/optimizers/kept.py",
        "mean = optax.tree.bias_correction(new.mu, beta1, new.count)",
        "mean = optax.tree.bias_correction(new.mu, beta1, new.count + 1)",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "Adam's epsilon under the root",
        "jaxptd/step/optimizer.py",
        "config.beta2, config.epsilon)",
        "config.beta2, 0.0, config.epsilon)",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "gradients clipped to twice the limit",
        "jaxptd/step/optimizer.py",
        "scale = limit / jnp.maximum(norm, limit)",
        "scale = 2 * limit / jnp.maximum(norm, limit)",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "norms have weight decay",
        "jaxptd/layers/norm.py",
        "padded=padded, decay=False)",
        "padded=padded, decay=True)",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "the mean of log Z instead of its square",
        "jaxptd/models/gpt.py",
        "terms[Z_LOSS] = jnp.square(logsumexp_BT)",
        "terms[Z_LOSS] = logsumexp_BT",
        STEPS,
        "layouts_step and gpt",
    ),
    Break(
        "a window of one key more",
        "jaxptd/attention/kernel.py",
        "sites.key_S > query_T1 - scores.window",
        "sites.key_S >= query_T1 - scores.window",
        STEPS,
        "one_device and qwen3",
    ),
    Break(
        "rotary positions turn the other way",
        "jaxptd/attention/rope.py",
        "(even * cos - odd * sin, odd * cos + even * sin)",
        "(even * cos + odd * sin, odd * cos - even * sin)",
        STEPS,
        "one_device and qwen3",
    ),
    Break(
        "the second half of a gate is activated",
        "jaxptd/layers/mlp.py",
        "act(h[..., 0, :]) * h[..., 1, :]",
        "act(h[..., 1, :]) * h[..., 0, :]",
        STEPS,
        "one_device and qwen3",
    ),
    Break(
        "a pair is classified at its second token",
        "jaxptd/models/bert.py",
        "places.position_T == 0",
        "places.position_T == 1",
        f"{STEPS} -m slow",
        "one_device and bert",
    ),
    Break(
        "cross-attention drops what self-attention does",
        "jaxptd/models/t5.py",
        "places.at(layer, Site.CROSS_ATTENTION), source",
        "places.at(layer, Site.ATTENTION), source",
        STEPS,
        "one_device and t5",
    ),
    Break(
        "keys after a query share the buckets of those before it",
        "jaxptd/layers/attention/relative.py",
        "count * (both_ways & (distance_R > 0))",
        "0 * (both_ways & (distance_R > 0))",
        STEPS,
        "one_device and t5",
    ),
)

ROPE = "jaxptd/config/rope.py"
WAVES = "tests/reference/test_rope.py"
MUON = "jaxptd/optimizers/muon.py"
ADAFACTOR = "jaxptd/optimizers/adafactor.py"
OPTIMIZER = "jaxptd/step/optimizer.py"

_STRETCHED = (
    Break(
        "llama3 stretches waves of the range's middle wholly",
        ROPE,
        "np.clip((turns_P - low) / (high - low), 0, 1)",
        "np.clip(np.ceil((turns_P - high) / (high - low)) + 1, 0, 1)",
        WAVES,
    ),
    Break(
        "yarn's line begins a pair later",
        ROPE,
        "first, last = max(math.floor(pair_of(high)), 0)",
        "first, last = max(math.ceil(pair_of(high)), 0)",
        WAVES,
    ),
    Break(
        "yarn lengthens no vector", ROPE, "0.1 * math.log(max(rope.factor, 1)) + 1", "1.0", WAVES
    ),
    Break(
        "yarn's line where no wave makes a turn, as if it were a step",
        ROPE,
        "((last - first) or 1e-3)",
        "max(last - first, 1e-3)",
        WAVES,
    ),
    Break(
        "lengthened vectors have a longer sine only",
        "jaxptd/attention/rope.py",
        "length * jnp.cos(angle_T1P), length * jnp.sin",
        "jnp.cos(angle_T1P), length * jnp.sin",
        STEPS,
        "one_device and muon",
    ),
)
_DIRECTIONS = (
    Break(
        "Muon's momentum is not corrected in its first steps",
        MUON,
        "ahead = optax.tree.bias_correction(mu, momentum, steps + 1)",
        "ahead = mu",
        STEPS,
        "one_device and muon",
    ),
    Break(
        "the size of Muon's step by the rows of a matrix",
        MUON,
        "math.sqrt(max(x_SRC.shape[1:]))",
        "math.sqrt(x_SRC.shape[1])",
        STEPS,
        "one_device and muon",
    ),
    Break(
        "Muon takes q, k and v for one matrix",
        "jaxptd/layers/linear.py",
        'matrix="r" + "s" * parts + "c" * (dims - parts)',
        'matrix="r" + "c" * dims',
        STEPS,
        "one_device and muon",
    ),
    Break(
        "Adafactor's decay in float32",
        ADAFACTOR,
        "wide = jnp.result_type(jnp.float32, *grads.values())",
        "wide = jnp.float32",
        STEPS,
        "one_device and adafactor",
    ),
    Break(
        "Adafactor counts its steps from 0",
        ADAFACTOR,
        "(state.steps + 1).astype(wide) ** -DECAY",
        "jnp.maximum(state.steps, 1).astype(wide) ** -DECAY",
        STEPS,
        "one_device and adafactor",
    ),
    Break(
        "Adafactor limits the steps of all layers together",
        ADAFACTOR,
        'rms = jnp.sqrt(sums.mean(step**2, "rc"))',
        'rms = jnp.sqrt(sums.mean(step**2, "src"))',
        STEPS,
        "one_device and adafactor",
    ),
    Break(
        "Lion steps by the mean that it keeps",
        OPTIMIZER,
        "optax.scale_by_lion(c.beta1, c.beta2)",
        "optax.scale_by_lion(c.beta2, c.beta2)",
        f"{STEPS} -m slow",
        "other_options and lion",
    ),
    Break(
        "SGD's momentum a step ahead, as Nesterov's",
        "jaxptd/optimizers/kept.py",
        "return new.trace, new",
        "return jax.tree.map(lambda m, g: decay * m + g, new.trace, grads), new",
        f"{STEPS} -m slow",
        "other_options and sgd",
    ),
)

REFERENCE = (*_SHARED, *_STRETCHED, *_DIRECTIONS)
