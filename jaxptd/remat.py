"""Selects the values that a layer saves for backward, by the policies of `model.remat`.

Layers name their values with `checkpoint_name`; a policy selects names, and all else is recomputed.
`none` has no policy: JAX saves all that backward needs.
"""

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

# First matmuls with their biases, residual sums, other all-reduced values, statistics of norms:
SAVED_MATMUL_OUT = "kept"
# The output and the logsumexp of attention whose backward recomputes scores:
SAVED_ATTENTION_OUT = "core"
# Other inputs of matmuls, norms, GELU and attention:
SAVED_MATMUL_IN = "taken"
# The experts that a router chose. All policies save them: computed again, a near tie might fall the
# other way, and backward would silently differentiate another function.
SAVED_CHOICE = "choice"
# What each policy saves of a layer, besides its input:
_SAVES = {
    "dots": (SAVED_MATMUL_OUT, SAVED_ATTENTION_OUT, SAVED_CHOICE),
    "attention": (SAVED_MATMUL_OUT, SAVED_MATMUL_IN, SAVED_CHOICE),
    "full": (SAVED_CHOICE,),
}


def with_remat(run: Any, remat: str, *, scanned: bool, offload: bool = False) -> Any:
    """Wraps `run` so that it saves for backward what the policy selects.

    Args:
        run: a layer's forward pass, `run(params, inputs, x)`.
        remat: the policy, not none.
        scanned: whether `run` is the body of a scan, where XLA cannot undo the recomputation.
        offload: whether to save to host memory; only for the policy dots.
    """
    if offload:
        return jax.checkpoint(partial(_named, run), policy=_to_host(), prevent_cse=not scanned)
    policy = jax.checkpoint_policies.save_only_these_names(*_SAVES[remat])
    return jax.checkpoint(run, policy=policy, prevent_cse=not scanned)


def _named(run: Any, params: Any, inputs: Any, x: Any) -> Any:
    """Names the input of `run`, so that it is also offloaded (unnamed values are not)."""
    named = partial(checkpoint_name, name=SAVED_MATMUL_OUT)
    return run(params, inputs, jax.tree.map(named, x))


def _to_host() -> Any:
    """The policy that holds what `dots` saves in host memory until backward."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SAVED_CHOICE],
        names_which_can_be_offloaded=[SAVED_MATMUL_OUT, SAVED_ATTENTION_OUT],
        offload_src="device",
        offload_dst="pinned_host",
    )
