"""Breaks of the options of a block."""

from benchmarks.breaks.table import CONTRACT, Break

DENSE = "tests/layers/test_dense.py"
ROPE = "tests/attention/test_rope.py"

MODELS = (
    # ---- rotary positions ----
    Break(
        "pairs are turned the other way",
        "jaxptd/attention/rope.py",
        "odd * cos + even * sin",
        "odd * cos - even * sin",
        DENSE,
        "groups",
    ),
    Break(
        "padding is turned",
        "jaxptd/attention/rope.py",
        "np.append(turns, 0.0)",
        "np.append(turns, 1.0)",
        ROPE,
    ),
    Break(
        "positions of the first tokens on every row of a grid",
        "jaxptd/layers/attention/itself.py",
        "axes.local_logit_tokens(places.position_T[None])[0]",
        "places.position_T[: x_BTNH.shape[1]]",
        CONTRACT,
        "groups and row",
    ),
    Break(
        "llama3 stretches the short waves",
        "jaxptd/config/rope.py",
        "kept_P * turn_P + (1 - kept_P) * scaled_P",
        "kept_P * scaled_P + (1 - kept_P) * turn_P",
        ROPE,
    ),
    Break(
        "yarn stretches the short waves",
        "jaxptd/config/rope.py",
        "scaled * scaled_P + (1 - scaled) * turn_P",
        "scaled * turn_P + (1 - scaled) * scaled_P",
        ROPE,
    ),
    Break(
        "pairs are cut",
        "jaxptd/config/block.py",
        "return 2 if self.rope else 1",
        "return 1",
        "tests/analysis/test_traffic.py",
        "head_size",
    ),
    # ---- norms and gates ----
    Break(
        "RMSNorm's gradient without the mean of g n",
        "jaxptd/layers/norm.py",
        "g_BTD - n_BTD * over.means(g_BTD * n_BTD)[0]",
        "g_BTD",
        DENSE,
        "rms",
    ),
    Break(
        "the sum over heads of a norm's gradient in every layer",
        "jaxptd/layers/norm.py",
        "over=axes.head_axes",
        "over=()",
        "tests/analysis/test_traffic.py",
        "qwen3 and not blocks",
    ),
    Break(
        "gate and up exchanged",
        "jaxptd/layers/mlp.py",
        "act(h[..., 0, :]) * h[..., 1, :]",
        "act(h[..., 1, :]) * h[..., 0, :]",
        DENSE,
        "gated or every_layer",
    ),
    # ---- losses, encoders ----
    Break(
        "the square of the logsumexp has no gradient",
        "jaxptd/layers/loss.py",
        "d_BTV += softmax_BTV * d_logsumexp_BT[..., None]",
        "d_BTV += 0 * softmax_BTV * d_logsumexp_BT[..., None]",
        "tests/layers/test_loss.py",
    ),
    Break(
        "half of GELU's derivative",
        "jaxptd/layers/mlp.py",
        "dx * (below + x * density)",
        "dx * below",
        "tests/layers/test_activations.py",
    ),
    Break(
        "every device has the first token of a pair",
        "jaxptd/models/bert.py",
        "places.position_T == 0",
        "jnp.arange(places.position_T.size) == 0",
        "tests/hf/test_encoders.py",
        "bert",
    ),
    Break(
        "padding of whole batches counts",
        "jaxptd/models/family.py",
        "return NOT_COUNTED if self.lowest is None else self.lowest",
        "return 0 if self.lowest is None else self.lowest",
        "tests/api/test_whole_batches.py",
    ),
    Break(
        "every term of a loss is the whole loss",
        "jaxptd/step/program.py",
        "{name: metrics.get(name, loss) for name in names}",
        "dict.fromkeys(names, loss)",
        "tests/api/test_whole_batches.py",
        "losses",
    ),
    Break(
        "padding is seen",
        "jaxptd/models/encoder.py",
        'return batch["mask"] - 1',
        'return 0 * batch["mask"]',
        "tests/models/test_encoder.py",
        "padding",
    ),
    # ---- parameters from an inventory ----
    Break(
        "heads of an inventory are not padded",
        "jaxptd/models/parameters.py",
        "(*shape[:dim], size, *shape[dim + 1 :])",
        "(*shape,)",
        "tests/models/test_parameters.py",
    ),
    Break(
        "heads of padding read a kv head of the model",
        "jaxptd/matmul/padding.py",
        "return HeadCounts(groups * keys, keys)",
        "return HeadCounts(padded(heads), keys)",
        "tests/models/test_padding.py",
        "whole or heads",
    ),
    Break(
        "hidden units are not padded over tp in the formulas",
        "jaxptd/matmul/padding.py",
        "return -(-size // layout.tp) * layout.tp",
        "return size",
        "tests/models/test_padding.py",
        "formulas",
    ),
    Break(
        "the first norm of an inventory is forgotten",
        "jaxptd/models/parameters.py",
        "self.norm(size, parts.first_norm)",
        "self.norm(size, 0)",
        "tests/models/test_parameters.py",
    ),
    Break(
        "an inventory's parameters are on no stage",
        "jaxptd/models/parameters.py",
        "{name: place(info) for",
        "{name: info for",
        "tests/models/test_parameters.py",
        "pp",
    ),
    Break(
        "collectives of the ends are in no micro-batch",
        "jaxptd/analysis/traffic/step.py",
        'yield Part("ends")',
        'yield Part("step")',
        "tests/analysis/test_parts.py",
    ),
)
